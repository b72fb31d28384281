"""Convert between stacked experts, as models have them, and a linear layer for each expert, as files may have them.

Shapes: E experts, H hidden size, I inner size of an expert. In `gate_up_proj` the gate comes first.

Llama 4: the stacks `feed_forward.experts.gate_up_proj [E, H, 2I]` and `down_proj [E, I, H]`, input before output, in
models and in transformers' files. Split, for quantizers and other tools: `experts.0.gate_proj.weight [I, H]`,
`up_proj [I, H]`, `down_proj [H, I]` and so on, output before input. `modeling/checkpoints/expert_index.py` lists all
names that are read.

Mixtral: the stacks `mlp.experts.gate_up_proj [E, 2I, H]` and `down_proj [E, H, I]`, output before input, in models.
transformers' files are always split, and have `block_sparse_moe` in place of `mlp`:
`block_sparse_moe.experts.0.w1.weight [I, H]` (gate), `w3 [I, H]` (up), `w2 [H, I]` (down).
"""

import re
from collections.abc import Mapping
from itertools import chain

from ...configuration.errors import CheckpointError
from ...modeling.checkpoints import WEIGHT, expert_of
from ...modeling.moe import PARTS_OF_STACKS
from ..io import LazyTensor, join, stack

_STACK = re.compile(r"(.*(?:feed_forward|mlp)\.experts)\.(gate_up_proj|down_proj)")
_OF_MIXTRAL, _IN_FILES = ".mlp.experts", ".block_sparse_moe.experts"


def _parts(experts: str) -> Mapping[str, tuple[str, ...]]:
    """Map each stack's name to its matrices' names in files; `experts` is the key of a layer's experts."""
    return PARTS_OF_STACKS[not experts.endswith(_OF_MIXTRAL)]


def _split_name(name: str) -> tuple[str, int, str] | None:
    """Split the name of an expert's matrix into its layer's experts, its number and its part; None for other names."""
    expert = expert_of(name.replace(_IN_FILES, _OF_MIXTRAL))
    if expert is None or expert.kind != WEIGHT:
        return None
    return expert.experts, expert.matrix.number, expert.matrix.part


def _in_files(name: str) -> str:
    return name.replace(_OF_MIXTRAL, _IN_FILES)


def fuse_experts(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Stack experts that are stored as linear layers; give other tensors the names of the model's modules.

    Raises:
        CheckpointError: an expert of a layer is missing, has another shape or dtype than others, or is stored twice.
    """
    layers: dict[str, dict[tuple[int, str], LazyTensor]] = {}
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        parts_of_name = _split_name(name)
        if parts_of_name is None:
            result[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
            continue
        experts, *matrix = parts_of_name
        other = layers.setdefault(experts, {}).setdefault(tuple(matrix), tensor)
        if other is not tensor:
            raise CheckpointError(f"{tensor.origin} is the same matrix as {other.origin}. Remove one.")
    for experts, matrices in layers.items():
        numbers, parts = range(1 + max(number for number, _ in matrices)), [*chain(*_parts(experts).values())]
        # Stop at the first missing expert, since a damaged name may hold a huge number.
        for key in ((number, part) for number in numbers for part in parts):
            if key not in matrices:
                missing = _in_files("{}.{}.{}.weight".format(experts, *key))
                there = next(iter(matrices.values())).origin
                raise CheckpointError(
                    f"{missing} missing, though {there} is there; the checkpoint is incomplete."
                )
        in_order = [[matrices[number, part] for number in numbers] for part in parts]
        make = _stack_rows if experts.endswith(_OF_MIXTRAL) else _stack_columns
        for stacked, tensor in zip(_parts(experts), make(*in_order), strict=True):
            name = f"{experts}.{stacked}"
            if name in result:
                raise CheckpointError(f"{result[name].origin}: its experts are also stored separately.")
            result[name] = tensor
    return result


def _stack_rows(
    gates: list[LazyTensor], ups: list[LazyTensor], downs: list[LazyTensor]
) -> tuple[LazyTensor, LazyTensor]:
    """Make Mixtral's stacks `[E, 2I, H]` and `[E, H, I]` of its experts' matrices `[I, H]`, `[I, H]` and `[H, I]`."""
    return stack([join(pair, 0) for pair in zip(gates, ups, strict=True)]), stack(downs)


def _stack_columns(
    gates: list[LazyTensor], ups: list[LazyTensor], downs: list[LazyTensor]
) -> tuple[LazyTensor, LazyTensor]:
    """Make Llama 4's stacks `[E, H, 2I]` and `[E, I, H]` of gate, up `[I, H]` and down `[H, I]`."""
    gate, up, down = (stack([tensor.transpose() for tensor in part]) for part in (gates, ups, downs))
    return join([gate, up], 2), down


def split_experts(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Undo `fuse_experts`: return each expert's linear layers gate, up and down, `[out, in]`, named as in files."""
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        if not match:
            result[re.sub(r"\.mlp\.gate\.weight$", ".block_sparse_moe.gate.weight", name)] = tensor
            continue
        is_mixtral = match[1].endswith(_OF_MIXTRAL)
        axis = 0 if is_mixtral else 1
        parts = _parts(match[1])[match[2]]
        for number in range(tensor.shape[0]):
            one = tensor.row(number)
            size = one.shape[axis] // len(parts)
            for index, part in enumerate(parts):
                matrix = one.cut(axis, index * size, (index + 1) * size)
                name = _in_files(f"{match[1]}.{number}.{part}.weight")
                result[name] = matrix if is_mixtral else matrix.transpose()
    return result
