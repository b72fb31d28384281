"""These tests save adapters hundreds of times; writing peft's model card takes half of that time."""

import pytest
from peft import PeftModel


@pytest.fixture(scope="module", autouse=True)
def no_pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeftModel, "create_or_update_model_card", lambda *_: None)
        yield
