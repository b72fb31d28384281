"""What the checks of the two processes share: their registry, the models, a measure."""

import sys
from pathlib import Path

import torch
from support.models import max_abs
from transformers.distributed import DistributedConfig

import llamoe
from llamoe.modeling._private_api import gather

FOLDER = Path(sys.argv[1])
CLASSES = {
    "dense": "LlamoeDenseForCausalLM",
    "tied": "LlamoeDenseForCausalLM",
    "text": "LlamoeForCausalLM",
    "top1": "LlamoeForCausalLM",
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


def tensor_parallel(**kwargs):
    return DistributedConfig(tp_size=2, tp_plan="auto", **kwargs)


def expert_parallel():
    return DistributedConfig(tp_size=2, ep_size=2)


def weight_difference(model, reference):
    expected = dict(reference.named_parameters())
    given = {name.removeprefix("module."): gather(p.detach()) for name, p in model.named_parameters()}
    assert given.keys() == expected.keys()
    return max(max_abs(given[name], expected[name]) for name in expected)
