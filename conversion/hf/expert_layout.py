"""Experts stacked, as stock keeps them, or one linear layer for each, as quantizers and other tools want them.

Shapes: E experts, H hidden size, I inner size of an expert. Stacked: `experts.gate_up_proj [E, H, 2I]` (gate first) and
`experts.down_proj [E, I, H]`, input before output. Split: `experts.0.gate_proj.weight [I, H]`, `up_proj [I, H]`,
`down_proj [H, I]` and so on, output before input. `modeling.split_experts` lists the spellings that are read.
"""

import re
from collections.abc import Mapping

from ...configuration.errors import CheckpointError
from ...modeling.checkpoints import expert_of
from ..io import LazyTensor, Slot, join, stack

_KINDS = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = re.compile(r"(.*feed_forward\.experts)\.(gate_up_proj|down_proj)")


def fuse_experts(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Stack experts that are stored as linear layers; other tensors are unchanged.

    Raises:
        CheckpointError: a layer's experts are not numbered from 0, differ in shape or dtype, or are stored twice.
    """
    found: dict[str, dict[str, dict[int, LazyTensor]]] = {}
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        expert = expert_of(name)
        if expert is None:
            result[name] = tensor
            continue
        experts = found.setdefault(expert.experts, {}).setdefault(f"{expert.part}_proj", {})
        if expert.number in experts:
            raise CheckpointError(f"{tensor.origin} is there a second time: {experts[expert.number].origin}.")
        experts[expert.number] = tensor
    for prefix, kinds in found.items():
        count = max(len(experts) for experts in kinds.values())
        for kind in _KINDS:
            experts = kinds.get(kind, {})
            for expert in range(count):
                if expert not in experts:
                    raise CheckpointError(
                        f"{prefix}.{expert}.{kind}.weight missing, though {prefix} has {count} experts."
                    )
                first, tensor = experts[0], experts[expert]
                if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.ndim != 2:
                    raise CheckpointError(
                        f"{tensor.origin}: is {tensor.dtype} {list(tensor.shape)}, but {first.origin} is {first.dtype} "
                        f"{list(first.shape)}."
                    )
        gate, up, down = (kinds[kind][0] for kind in _KINDS)
        if gate.shape != up.shape or len({gate.dtype, up.dtype, down.dtype}) > 1:
            raise CheckpointError(f"{prefix}: gate_proj and up_proj differ in shape or dtype.")
        stacks = [stack([kinds[kind][expert].transpose() for expert in range(count)]) for kind in _KINDS]
        for name, tensor in (("gate_up_proj", join(stacks[:2], 2)), ("down_proj", stacks[2])):
            if f"{prefix}.{name}" in result:
                raise CheckpointError(
                    f"{result[f'{prefix}.{name}'].origin}: its experts are there one by one, too."
                )
            result[f"{prefix}.{name}"] = tensor
    return result


def split_experts(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Undo `fuse_experts`: for each expert the linear layers gate, up and down, `[out, in]`."""
    slot = Slot()
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERTS.fullmatch(name)
        if not match:
            result[name] = tensor
            continue
        whole = tensor.remember(slot)
        for expert in range(tensor.shape[0]):
            row = whole.row(expert)  # [in, out]
            if match[2] == "down_proj":
                parts = {"down_proj": row}
            else:
                inner = row.shape[1] // 2
                parts = {"gate_proj": row.cut(1, 0, inner), "up_proj": row.cut(1, inner, 2 * inner)}
            for kind, part in parts.items():
                result[f"{match[1]}.{expert}.{kind}.weight"] = part.transpose()
    return result
