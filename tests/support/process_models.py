"""Load models into processes that run them together, and compare them with the same models in one process.

`process_worker.py` runs the checks that `process_checks.py` and `process_saves.py` register here. A check returns
figures: largest differences, or whether something holds.
"""

import copy
import os
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.distributed import DistributedConfig

import llamoe

from .models import max_abs

# Folder of the checkpoints that checks load, and of all that they save.
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
# transformers' own ways to distribute a model over two processes.
CONFIGS = {
    "tensor": dict(tp_size=2, tp_plan="auto"),
    "expert": dict(tp_size=2, ep_size=2),
    "fsdp": dict(fsdp_size=2),
    "fsdp+expert": dict(fsdp_size=2, ep_size=2),
    "pipeline": dict(pp_size=2),
}
CHECKS = {}


def check(*arguments):
    """Register a function as the check "<function's name>-<argument>", for each argument."""

    def register(function):
        for argument in arguments:
            CHECKS[f"{function.__name__}-{argument}"] = lambda argument=argument: function(argument)
        return function

    return register


def load(name, **kwargs):
    """Load a checkpoint of `FOLDER` in float32; its name may end in "-split" (one tensor an expert)."""
    model_class = getattr(llamoe, CLASSES[name.removesuffix("-split")])
    return model_class.from_pretrained(FOLDER / name, dtype=torch.float32, **kwargs)


@cache
def whole(name):
    """Return the undistributed model; callers must not change it."""
    return load(name)


def copy_of(name):
    """Return a copy of the undistributed model, which callers may change."""
    return copy.deepcopy(whole(name))


def distributed(kind):
    """Return transformers' configuration of an entry of `CONFIGS`."""
    return DistributedConfig(**CONFIGS[kind])


def load_sharded(name, kind, changed=lambda model: model, **kwargs):
    """Load a model that all processes share.

    Args:
        name: of the checkpoint.
        kind: a key of `CONFIGS`, "ddp", "accelerate" (its FSDP2), or "torch" (torch's own FSDP2).
        changed: a function that returns the model with changes; torch and accelerate distribute what it returns.
        kwargs: options of `from_pretrained`, if `kind` is a key of `CONFIGS`.
    """
    if kind == "accelerate":
        return shard_with_accelerate(name, changed)
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(changed(load(name)))
    if kind == "torch":
        model, mesh = changed(load(name)), init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return changed(load(name, distributed_config=distributed(kind), **kwargs))


@contextmanager
def fsdp2_of_accelerate(**options):
    """Yield an accelerator with FSDP2, which accelerate offers on GPUs only: pretend that each process has one."""
    environment = dict(os.environ)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
        **options,
    )
    try:
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        assert accelerator.is_fsdp2
        yield accelerator
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(environment)


def shard_with_accelerate(name, changed):
    """Load a model in the first process alone, as examples/accelerate asks, and prepare it with accelerate."""
    with fsdp2_of_accelerate(cpu_ram_efficient_loading=True) as accelerator:
        model = changed(load(name))
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    units = {type(unit).__name__ for unit in model.modules() if isinstance(unit, FSDPModule)}
    assert {f"FSDP{layer}" for layer in model._no_split_modules} < units
    return model


def unwrapped(model):
    """Return the model inside of DistributedDataParallel."""
    return getattr(model, "module", model)


def is_split(tensor):
    """Return True if a process holds only a part of a tensor."""
    return isinstance(tensor, DTensor) and tensor.to_local().shape != tensor.shape


def difference(given, expected):
    """Return the largest difference between this process's part of a tensor and the same part of a whole tensor.

    Each process compares its part, since gathering takes longer than the comparison.
    """
    if isinstance(given, DTensor) and all(type(part) in (Shard, Replicate) for part in given.placements):
        expected = distribute_tensor(expected, given.device_mesh, given.placements, src_data_rank=None)
        given, expected = given.to_local(), expected.to_local()
        assert given.shape == expected.shape
    elif isinstance(given, DTensor):
        # Fused columns, whose halves are split one by one, have a placement that `distribute_tensor` does not take.
        given = given.full_tensor()
    return max_abs(given, expected) if given.numel() else 0.0


def weight_difference(model, reference, part=""):
    """Return the largest difference from a whole model's weights, among weights with `part` in their names."""
    expected = {name: p.detach() for name, p in reference.named_parameters() if part in name}
    given = {name: p.detach() for name, p in unwrapped(model).named_parameters() if part in name}
    assert given.keys() == expected.keys() and given
    return max(difference(given[name], expected[name]) for name in expected)


def saved_difference(folder, reference):
    """Return the largest difference of a folder's weights from a whole model's.

    Only the last process reads, to save time; the first one has written. All others return 0.
    """
    if dist.get_rank() != dist.get_world_size() - 1:
        return 0.0
    return weight_difference(type(reference).from_pretrained(folder), reference)


def gradient_difference(model, reference):
    """Return the largest difference of gradients from a whole model's, relative to each trained weight's largest.

    Weights with small gradients count as if their largest were a hundredth of the largest of all.
    """
    expected = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    given = {name: p.grad for name, p in unwrapped(model).named_parameters() if p.requires_grad}
    assert given.keys() == expected.keys() and len(given) > 3
    assert not [name for name in given if given[name] is None], "weights without a gradient"
    scales = {name: gradient.abs().max().item() for name, gradient in expected.items()}
    floor = max(scales.values()) / 100
    return max(difference(given[name], expected[name]) / max(scales[name], floor) for name in expected)


def half(inputs):
    """Return this process's half of the rows."""
    return {name: value.chunk(2)[dist.get_rank()] for name, value in inputs.items()}
