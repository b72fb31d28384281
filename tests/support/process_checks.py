"""What the checks of the two processes share: their registry, the models, a measure."""

import copy
import sys
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from support.models import max_abs
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.distributed import DistributedConfig

import llamoe
from llamoe.modeling._private_api import gather

FOLDER = Path(sys.argv[1])
CLASSES = {
    "dense": "LlamoeDenseForCausalLM",
    "tied": "LlamoeDenseForCausalLM",
    "text": "LlamoeForCausalLM",
    "top1": "LlamoeForCausalLM",
    "mixtral": "LlamoeMixtralForCausalLM",
    "multimodal": "LlamoeForConditionalGeneration",
    "lone": "LlamoeForCausalLM",
}
CHECKS = {}


def check(*names):
    """Register a check, once for each of the models."""

    def register(function):
        for name in names:
            CHECKS[f"{function.__name__}-{name}"] = lambda name=name: function(name)
        return function

    return register


def load(name, **kwargs):
    model_class = getattr(llamoe, CLASSES[name.removesuffix("-split")])
    return model_class.from_pretrained(FOLDER / name, dtype=torch.float32, **kwargs)


@cache
def whole(name):
    """The model that this process has for itself, only to be read."""
    return load(name)


def own(name):
    """A copy of that model, to be changed."""
    return copy.deepcopy(whole(name))


def tensor_parallel(**kwargs):
    return DistributedConfig(tp_size=2, tp_plan="auto", **kwargs)


def expert_parallel():
    return DistributedConfig(tp_size=2, ep_size=2)


def saved_difference(folder, reference):
    """How far the weights in a folder are from a whole model's; what one process reads, the others need not read again.

    The last process reads, as the first has written.
    """
    if dist.get_rank() != dist.get_world_size() - 1:
        return 0.0
    return weight_difference(type(reference).from_pretrained(folder), reference)


def weight_difference(model, reference):
    """How far this process's part of a model's weights is from a whole model's."""
    expected = dict(reference.named_parameters())
    given = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    assert given.keys() == expected.keys()
    return max(difference(given[name], expected[name].detach()) for name in expected)


def difference(given, expected):
    """How far this process's part of a tensor is from the same part of a whole one.

    Each process compares its own, since gathering takes longer than all that is compared.
    """
    if isinstance(given, DTensor) and all(type(part) in (Shard, Replicate) for part in given.placements):
        expected = distribute_tensor(expected, given.device_mesh, given.placements, src_data_rank=None)
        given, expected = given.to_local(), expected.to_local()
        assert given.shape == expected.shape
    # Packed columns, of which each half is split by itself.
    given = gather(given)
    return max_abs(given, expected) if given.numel() else 0.0
