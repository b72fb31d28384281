"""Experts stacked, as models keep them, or one linear layer for each, as files may have them.

Shapes: E experts, H hidden size, I inner size of an expert; gate first.

Llama 4, stacked: `feed_forward.experts.gate_up_proj [E, H, 2I]` and `down_proj [E, I, H]`, input before output; stock
files have the same. Split, for quantizers and other tools: `experts.0.gate_proj.weight [I, H]`, `up_proj [I, H]`,
`down_proj [H, I]` and so on, output before input. `modeling.split_experts` lists the spellings that are read.

Mixtral, stacked: `mlp.experts.gate_up_proj [E, 2I, H]` and `down_proj [E, H, I]`, output before input. Stock files are
always split and say `block_sparse_moe` for `mlp`: `block_sparse_moe.experts.0.w1.weight [I, H]` (gate), `w3 [I, H]`
(up), `w2 [H, I]` (down).
"""

import re
from collections.abc import Mapping

from ...configuration.errors import CheckpointError
from ...modeling.checkpoints import expert_of
from ..io import LazyTensor, Slot, check_alike, join, stack

_PARTS = ("gate", "up", "down")
_STACK = re.compile(r"(.*(?:feed_forward|mlp)\.experts)\.(gate_up_proj|down_proj)")
_OF_MIXTRAL = ".mlp.experts"
_MIXTRAL_NAME = re.compile(r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(0|[1-9]\d*)\.w([132])\.weight")
_MIXTRAL_NUMBERS = dict(zip(_PARTS, "132", strict=True))


def _place(name: str) -> tuple[str, int, str] | None:
    """An expert's weight: the stacks' name, the expert's number, and "gate", "up" or "down"; None for other names."""
    if match := _MIXTRAL_NAME.fullmatch(name):
        return f"{match[1]}{_OF_MIXTRAL}", int(match[2]), _PARTS["132".index(match[3])]
    return expert_of(name)


def _name(stacks: str, number: int, part: str) -> str:
    """The name of an expert's weight in a file; of several spellings, ours."""
    if stacks.endswith(_OF_MIXTRAL):
        begin = f"{stacks.removesuffix(_OF_MIXTRAL)}.block_sparse_moe.experts"
        return f"{begin}.{number}.w{_MIXTRAL_NUMBERS[part]}.weight"
    return f"{stacks}.{number}.{part}_proj.weight"


def name_of_one_expert(name: str) -> str | None:
    """A single expert's weight in our spelling; None for other names."""
    place = _place(name)
    return place and _name(*place)


def fuse_experts(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Stack experts that are stored as linear layers; other tensors only get their modules' names.

    Raises:
        CheckpointError: a layer's experts are not numbered from 0, differ in shape or dtype, or are stored twice.
    """
    found: dict[str, dict[str, dict[int, LazyTensor]]] = {}
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        place = _place(name)
        if place is None:
            result[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
            continue
        stacks, number, part = place
        experts = found.setdefault(stacks, {}).setdefault(part, {})
        if number in experts:
            raise CheckpointError(f"{tensor.origin} is there a second time: {experts[number].origin}.")
        experts[number] = tensor
    for stacks, parts in found.items():
        count = max(len(experts) for experts in parts.values())
        for part in _PARTS:
            experts = parts.get(part, {})
            for number in range(count):
                if number not in experts:
                    raise CheckpointError(
                        f"{_name(stacks, number, part)} missing, though {stacks} has {count} experts."
                    )
                if experts[number].ndim != 2:
                    raise CheckpointError(
                        f"{experts[number].origin}: is {experts[number].described}, no matrix."
                    )
            check_alike([experts[number] for number in range(count)])
        gate, up, down = (parts[part][0] for part in _PARTS)
        check_alike([gate, up])
        if gate.dtype != down.dtype:
            raise CheckpointError(
                f"{down.origin} is {down.described}, but {gate.origin} is {gate.described}."
            )
        in_order = [[parts[part][number] for number in range(count)] for part in _PARTS]
        make = stack_rows if stacks.endswith(_OF_MIXTRAL) else _stack_columns
        for name, tensor in zip(("gate_up_proj", "down_proj"), make(*in_order), strict=True):
            if f"{stacks}.{name}" in result:
                raise CheckpointError(
                    f"{result[f'{stacks}.{name}'].origin}: its experts are there one by one, too."
                )
            result[f"{stacks}.{name}"] = tensor
    return result


def stack_rows(
    gates: list[LazyTensor], ups: list[LazyTensor], downs: list[LazyTensor]
) -> tuple[LazyTensor, LazyTensor]:
    """Mixtral's stacks `[E, 2I, H]` and `[E, H, I]` of its experts' matrices `[I, H]`, `[I, H]` and `[H, I]`."""
    return stack([join(pair, 0) for pair in zip(gates, ups, strict=True)]), stack(downs)


def _stack_columns(
    gates: list[LazyTensor], ups: list[LazyTensor], downs: list[LazyTensor]
) -> tuple[LazyTensor, LazyTensor]:
    """Llama 4's stacks `[E, H, 2I]` and `[E, I, H]` of the same matrices."""
    gate, up, down = (stack([tensor.transpose() for tensor in part]) for part in (gates, ups, downs))
    return join([gate, up], 2), down


def split_experts(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Undo `fuse_experts`: for each expert the linear layers gate, up and down, `[out, in]`, named as in files."""
    slot = Slot()
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        if not match:
            result[re.sub(r"\.mlp\.gate\.weight$", ".block_sparse_moe.gate.weight", name)] = tensor
            continue
        is_mixtral = match[1].endswith(_OF_MIXTRAL)
        # A part of Llama 4's is a transposed piece of a block; of Mixtral's, rows, which are read by themselves.
        whole, axis = (tensor, 0) if is_mixtral else (tensor.remember(slot), 1)
        for number in range(tensor.shape[0]):
            one = whole.row(number)
            parts = {"down": one}
            if match[2] == "gate_up_proj":
                inner = one.shape[axis] // 2
                parts = {"gate": one.cut(axis, 0, inner), "up": one.cut(axis, inner, 2 * inner)}
            for part, matrix in parts.items():
                result[_name(match[1], number, part)] = matrix if is_mixtral else matrix.transpose()
    return result
