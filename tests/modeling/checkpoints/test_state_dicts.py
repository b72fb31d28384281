"""Our own layout has the tensors of `state_dict()`, so that other libraries read our folders without help."""

import copy

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from safetensors.torch import load_file
from support.models import MODELS
from support.tables import in_turn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers.trainer_utils import load_sharded_checkpoint

import llamoe
from llamoe.configuration.errors import CheckpointError

pytestmark = pytest.mark.slow

BY_NAME = {case.name: case for case in MODELS}
MIXTRAL, TEXT = BY_NAME["LlamoeMixtralForCausalLM"], BY_NAME["LlamoeForCausalLM"]
NAMED = {"ids": lambda value: getattr(value, "name", value)}


class Kept:
    """A model and its folders, of one file and of many."""

    def __init__(self, case, place):
        self.case, self.model = case, case.make_small()
        self.folder, self.shards = place / "whole", place / "shards"
        self.model.save_pretrained(self.folder)
        self.state = load_file(self.folder / "model.safetensors")
        size = sum(tensor.nbytes for tensor in self.state.values()) // 24
        self.model.save_pretrained(self.shards, max_shard_size=size)

    def other(self):
        """A model of the same sizes with other weights."""
        return self.case.make_small(seed=5)

    def empty(self):
        with init_empty_weights():
            return type(self.model)(copy.deepcopy(self.model.config))

    def check(self, model):
        for name, tensor in self.model.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name


def strictly(kept, **options):
    model = kept.other()
    assert not any(model.load_state_dict(kept.state, **options))
    return model


def by_torchs_function(kept):
    model = kept.other()
    set_model_state_dict(model, dict(kept.state), options=StateDictOptions(full_state_dict=True))
    return model


def by_accelerate(kept):
    model = kept.other()
    load_checkpoint_in_model(model, kept.shards, strict=True)
    return model


def by_trainers_shards(kept):
    model = kept.other()
    assert not any(load_sharded_checkpoint(model, kept.shards))
    return model


LOADERS = {
    "load_state_dict": strictly,
    "assign": lambda kept: strictly(kept, assign=True),
    "set_model_state_dict": by_torchs_function,
    "load_checkpoint_in_model": by_accelerate,
    "load_checkpoint_and_dispatch": lambda kept: load_checkpoint_and_dispatch(
        kept.empty(), kept.shards, device_map={"": "cpu"}
    ),
    "load_sharded_checkpoint": by_trainers_shards,
}


@pytest.mark.parametrize(
    ("loader", "case"),
    [*in_turn(LOADERS, [MIXTRAL, TEXT]), *in_turn(LOADERS, [TEXT, MIXTRAL])],
    **NAMED,
)
def test_other_libraries_read_our_layout(loader, case, tmp_path):
    kept = Kept(case, tmp_path)
    kept.check(LOADERS[loader](kept))


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
    for name, tensor in packed.state_dict().items():
        assert torch.equal(another.state_dict()[name], tensor), name
    with pytest.raises(CheckpointError, match=dtype):
        plain.load_state_dict(state, strict=False)
