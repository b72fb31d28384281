"""Our own layout has the tensors of `state_dict()`, so that other libraries read our folders without help."""

import copy

import pytest
from accelerate import load_checkpoint_and_dispatch
from safetensors.torch import load_file
from support.models import MODELS, assert_same_weights
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers.trainer_utils import load_sharded_checkpoint

import llamoe
from llamoe.configuration.errors import CheckpointError

pytestmark = pytest.mark.slow

BY_NAME = {case.name: case for case in MODELS}
MIXTRAL, TEXT = BY_NAME["LlamoeMixtralForCausalLM"], BY_NAME["LlamoeForCausalLM"]
NAMED = {"ids": lambda value: getattr(value, "name", value)}


def tensors_in(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


LOADERS = {
    "load_state_dict": lambda model, folder: model.load_state_dict(tensors_in(folder), assign=True),
    "set_model_state_dict": lambda model, folder: set_model_state_dict(
        model, tensors_in(folder), options=StateDictOptions(full_state_dict=True)
    ),
    "load_checkpoint_and_dispatch": lambda model, folder: load_checkpoint_and_dispatch(
        model, folder, device_map={"": "cpu"}
    ),
    # Trainer's, to go on from a checkpoint.
    "load_sharded_checkpoint": load_sharded_checkpoint,
}


@pytest.mark.parametrize("case", [MIXTRAL, TEXT], **NAMED)
@pytest.mark.parametrize("loader", LOADERS)
def test_other_libraries_read_our_layout(loader, case, tmp_path):
    model, other = case.make_small(), case.make_small(seed=5)
    model.save_pretrained(tmp_path, max_shard_size="90KB")
    LOADERS[loader](other, tmp_path)
    assert_same_weights(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("case", "weights", "dtype"),
    [(MIXTRAL, "int8", "torch.int8"), (TEXT, "int4", "torch.uint8")],
    **NAMED,
)
def test_packed_weights_are_of_packed_models(weights, dtype, case, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    plain = case.make_small(**sizes)
    plain.save_pretrained(tmp_path / "plain")
    form = llamoe.QuantizationConfig(weights, linears=False)
    packed = case.model_class.from_pretrained(tmp_path / "plain", quantization_config=form)
    packed.save_pretrained(tmp_path / "packed")
    state = load_file(tmp_path / "packed" / "model.safetensors")
    another = copy.deepcopy(packed)
    for parameter in another.parameters():
        parameter.data.zero_()
    assert not any(another.load_state_dict(state))
    assert_same_weights(another.state_dict(), packed.state_dict())
    with pytest.raises(CheckpointError, match=dtype):
        plain.load_state_dict(state, strict=False)
