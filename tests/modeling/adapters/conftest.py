"""Leave out the model card that peft writes with each adapter: it takes half of the time of saving."""

import pytest
from peft import PeftModel


@pytest.fixture(scope="module", autouse=True)
def no_pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeftModel, "create_or_update_model_card", lambda *_: None)
        yield
