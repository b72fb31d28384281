"""Our own layout has the tensors of `state_dict()`, so that other libraries read our folders without help."""

import pytest
from accelerate import load_checkpoint_and_dispatch
from support.models import MODELS, assert_same_weights, tensors_in
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers.trainer_utils import load_sharded_checkpoint

pytestmark = pytest.mark.slow

BY_NAME = {case.name: case for case in MODELS}
MIXTRAL, TEXT = BY_NAME["LlamoeMixtralForCausalLM"], BY_NAME["LlamoeForCausalLM"]
NAMED = {"ids": lambda value: getattr(value, "name", value)}


LOADERS = {
    "load_state_dict": lambda model, folder: model.load_state_dict(tensors_in(folder), assign=True),
    "set_model_state_dict": lambda model, folder: set_model_state_dict(
        model, tensors_in(folder), options=StateDictOptions(full_state_dict=True)
    ),
    "load_checkpoint_and_dispatch": lambda model, folder: load_checkpoint_and_dispatch(
        model, folder, device_map={"": "cpu"}
    ),
    # Trainer resumes by this one.
    "load_sharded_checkpoint": load_sharded_checkpoint,
}


@pytest.mark.parametrize("case", [MIXTRAL, TEXT], **NAMED)
@pytest.mark.parametrize("loader", LOADERS)
def test_other_libraries_read_our_layout(loader, case, tmp_path):
    model, other = case.make_small(), case.make_small(seed=5)
    model.save_pretrained(tmp_path, max_shard_size="90KB")
    LOADERS[loader](other, tmp_path)
    assert_same_weights(other.state_dict(), model.state_dict())
