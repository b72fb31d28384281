"""Experts of Llama 4 that a checkpoint stores one by one, in a model that several processes share.

Each process needs its own shard, which transformers' loader cuts out along the stack's axes before a rule sees the
tensor: a rule that transposes would get a wrong shard. So the tensors are transposed to `[in, out]` first, as views,
and the rules only stack. Mixtral's are fused by transformers' own rules; a process that has the whole model fuses both
by itself (`load_experts`).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.modeling_utils import load_state_dict

from ...configuration.errors import CheckpointError
from .._private_api import forget_conversions
from ..moe import PARTS_OF_STACKS
from .expert_index import Index

_EXPERTS = "feed_forward.experts"
_NUMBER = r"(?:0|[1-9]\d*)"


class StackExperts(MergeModulelist):
    """Writes the experts that a device holds into its shard of a stack, gate and up side by side.

    transformers' `MergeModulelist` and `Concatenate` would copy a layer three times, and fail on a device without
    experts.
    """

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor | None]],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: nn.Module | None = None,
        **kwargs,
    ) -> dict[str, torch.Tensor]:
        """The one target pattern, with `[experts, in, out]`; the outs of several sources, gate before up, are joined.

        `input_dict` maps the source patterns to tensors `[in, out]` in the order of the experts, and is emptied;
        `full_layer_name` is the stack's name in `model`.
        """
        parts = [input_dict.pop(pattern) for pattern in source_patterns]
        if not parts[0]:
            # The shard [0, ...] of a device without experts; the parameter is still on the meta device.
            stack: Any = model.get_parameter(full_layer_name)
            shard = torch.empty_like(stack.to_local(), device=stack.device_mesh.device_type)
            return {target_patterns[0]: shard}
        size_in, size_out = parts[0][0].shape
        stack = parts[0][0].new_empty(len(parts[0]), size_in, len(parts) * size_out)
        for part, columns in zip(parts, stack.split(size_out, dim=-1), strict=True):
            for expert in range(len(part)):
                # Copying a transposed view into a strided target is four times as slow as transposing first, expert
                # by expert.
                columns[expert].copy_(part[expert].contiguous() if len(parts) > 1 else part[expert])
                # Frees a tensor that was cast, or moved to another device.
                part[expert] = None
        return {target_patterns[0]: stack}


def fusing_rules() -> list[WeightConverter]:
    """Rules that fuse the experts of Llama 4, for each of the two spellings of their names."""
    spellings = (lambda part: rf"{_NUMBER}\.{part}", lambda part: rf"{part}s\.{_NUMBER}")
    return [
        WeightConverter(
            [rf"{re.escape(_EXPERTS)}\.{spelling(part)}\.weight$" for part in parts],
            f"{_EXPERTS}.{stack}",
            [StackExperts()],
        )
        for spelling in spellings
        for stack, parts in PARTS_OF_STACKS[True].items()
    ]


def fuse_while_loading(
    index: Index,
    model: PreTrainedModel,
    state_dict: Mapping[str, torch.Tensor] | None,
    files: Iterable[str] | None,
    load_config: Any,
) -> tuple[Any, Any]:
    """`PreTrainedModel._load_pretrained_model`, which also fuses the experts that an index has one by one.

    The rules are removed afterwards: saving would run them in reverse.

    Raises:
        CheckpointError: a stack could not be made.
    """
    if state_dict is None:
        state_dict = {}
        for file in files or ():
            state_dict |= load_state_dict(file, disable_mmap=load_config.disable_mmap)
    stacks = {
        f"{layer}.{stack}": stored.names()
        for layer, found in index.items()
        for stack, stored in found.items()
        if stored.single
    }
    experts = set().union(*stacks.values())
    turned = {name: tensor.T if name in experts else tensor for name, tensor in state_dict.items()}
    rules = fusing_rules()
    mapping = [*(load_config.weight_mapping or []), *rules]
    # Threads that read ahead are faster where a tensor is used as it is. Where many tensors are fused into one, they
    # hold the checkpoint in memory twice: all layers are read while the first is being fused.
    with patch_environment(HF_DEACTIVATE_ASYNC_LOAD=1):
        loading_info, offload_index = PreTrainedModel._load_pretrained_model(
            model, turned, files, dataclasses.replace(load_config, weight_mapping=mapping)
        )
    forget_conversions(model, rules)
    for key in stacks:
        if report := loading_info.conversion_errors.get(key):
            names = sorted(stacks[key])
            raise CheckpointError(f"{key} could not be made of {names[0]} … {names[-1]}: {report}")
    return loading_info, offload_index
