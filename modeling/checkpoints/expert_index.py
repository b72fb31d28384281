"""An index of the experts' tensors in a checkpoint, whichever of these layouts its files have.

Files store a layer's experts as two stacks of all experts, or each expert's gate, up and down projections as linear
layers, `[out, in]`. N is the number of the expert:

* `experts.N.w1.weight` (gate), `w3` (up) and `w2` (down): Mixtral;
* `experts.N.gate_proj.weight`, `up_proj`, `down_proj`: transformers, llm-compressor, GPTQModel, `llamoe convert`;
* `experts.gate_projs.N.weight`, `up_projs`, `down_projs`: Axolotl.

A packed stack is stored as several tensors, such as codes and scales; a linear layer packed by bitsandbytes has tensors
such as `weight.absmax` or `SCB` beside `weight`. `offload` and `conversion` use this index. Loading into memory uses
rules for the same names in transformers' loader (`conversions.py`).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming, rename_source_key

from ...configuration.errors import CheckpointError
from ..moe import PARTS_OF_STACKS, PLACES, STACKS, ExpertMatrix, Experts, matrix_named
from .safetensors_files import WEIGHT_DTYPES
from .stored import Stored, check_tensor

WEIGHT = "weight"
"""Kind of the tensor with a matrix's numbers, or with the codes of a packed matrix."""

_BELOW_EXPERTS = re.compile(r"(.*(feed_forward|mlp)\.experts)\.(.+)")
# Tensors that packed matrices have beside their codes.
_BESIDE = re.compile(r"(.*\.experts\..*\.)(weight\..+|SCB|weight_format)")


class ExpertName(NamedTuple):
    """The parsed name of a tensor of one expert.

    Attributes:
        experts: the name up to and including `experts`.
        matrix: number of the expert, and name of its projection.
        kind: "weight"; or for a tensor beside the codes of a packed matrix the rest of its name, as "weight.absmax".
    """

    experts: str
    matrix: ExpertMatrix
    kind: str = WEIGHT


def expert_of(name: str) -> ExpertName | None:
    """Parse the name of a tensor of one expert; return None for all other names."""
    beside = _BESIDE.fullmatch(name)
    match = _BELOW_EXPERTS.fullmatch(f"{beside[1]}weight" if beside else name)
    matrix = match and matrix_named(match[3])
    if match is None or matrix is None or matrix.part.startswith("w") != (match[2] == "mlp"):
        return None
    return ExpertName(match[1], matrix, beside[2] if beside else WEIGHT)


@dataclass
class StoredStack:
    """A checkpoint's tensors for one stack.

    Attributes:
        whole: tensors with all experts, by the suffix of their names: "" for a plain stack or a packed stack's codes.
        single: tensors of single matrices, first by the number of the expert and the matrix's position in the stack
            (`PLACES`: gate before up), then by kind.
    """

    whole: dict[str, Stored] = field(default_factory=dict)
    single: dict[tuple[int, int], dict[str, Stored]] = field(default_factory=dict)

    @property
    def first(self) -> Stored | None:
        """Any of the tensors, for error messages; None if there is none."""
        for kinds in self.single.values():
            return kinds.get(WEIGHT) or next(iter(kinds.values()))
        return next(iter(self.whole.values()), None)


Index = dict[str, dict[str, StoredStack]]
"""The tensors of each stack, by the name of a layer's experts in the model, then by the name of the stack."""


def names_in_model(model: PreTrainedModel, rules: Iterable[Any] | None) -> Callable[[str], list[str]]:
    """Return a function that lists the names which a key of a checkpoint or adapter may have in the model.

    `rules` are those by which transformers' loader renames keys.
    """
    renamings = [rule for rule in rules or () if isinstance(rule, WeightRenaming)]
    prefixes = getattr(model, "_checkpoint_prefixes", {})
    patterns = [(re.compile(f"^{old}"), new) for old, new in prefixes.items()]
    prefix = f"{model.base_model_prefix}."

    def names_of(key: str) -> list[str]:
        renamed, _ = rename_source_key(key, renamings, [])
        names = [renamed, *(pattern.sub(new, renamed) for pattern, new in patterns)]
        # A model with a head has a prefix that a model without a head lacks; the checkpoint may be of either.
        return [*names, *(prefix + name for name in names), *(name.removeprefix(prefix) for name in names)]

    return names_of


def index_experts(
    layers: Mapping[str, Experts], tensors: Iterable[Stored], names: Callable[[str], Iterable[str]]
) -> Index:
    """Find the tensors of some layers' experts in a checkpoint.

    Args:
        layers: the layers' experts by their names in the model.
        tensors: all tensors of the checkpoint.
        names: lists the names that a key of the checkpoint may have in the model (`names_in_model`).

    Raises:
        CheckpointError: a tensor is stored twice.
    """
    index: Index = {layer: {stack: StoredStack() for stack in STACKS} for layer in layers}
    wanted = {
        f"{layer}.{stack}{suffix}": (layer, stack, suffix)
        for layer, experts in layers.items()
        for stack in STACKS
        for suffix in experts.format.suffixes
    }
    for tensor in tensors:
        for key in names(tensor.name):
            if key in wanted:
                layer, stack, kind = wanted[key]
                kinds = index[layer][stack].whole
            elif (expert := expert_of(key)) and expert.experts in layers:
                layer, (number, part), kind = expert
                stack, position = PLACES[part]
                kinds = index[layer][stack].single.setdefault((number, position), {})
            else:
                continue
            if other := kinds.get(kind):
                raise CheckpointError(f"{tensor} is stored twice: {other} has it, too.")
            kinds[kind] = tensor
            break
    return index


def check_experts(layer: str, experts: Experts, stacks: Mapping[str, StoredStack]) -> None:
    """Check that a checkpoint has all tensors of one layer's experts, with the model's shapes and dtypes.

    Args:
        layer: name of the experts in the model.
        experts: the experts of the model, plain or packed.
        stacks: the checkpoint's tensors by the name of the stack.

    Raises:
        CheckpointError: an expert is missing or stored twice, or has another shape, or a dtype that is not read.
    """
    for stack, stored in stacks.items():
        whole = next(iter(stored.whole.values()), None)
        if stored.first is None or (experts.format.is_unfused_in_files and not stored.single):
            raise CheckpointError(
                f"{layer}.{stack} is missing, as a stack and expert by expert. Download or copy the checkpoint again."
            )
        if stored.single and whole:
            raise CheckpointError(f"{stored.first} is stored twice: {whole} has it, too.")
        if stored.single:
            _check_single(stack, experts, stored)
            continue
        for suffix in experts.format.suffixes:
            if suffix not in stored.whole:
                raise CheckpointError(
                    f"{whole} is stored, but {layer}.{stack}{suffix} is missing. Download or copy the checkpoint again."
                )
            part: Any = getattr(experts, stack + suffix)
            check_tensor(stored.whole[suffix], tuple(part.shape), part.dtype if experts.is_packed else None)


def shape_of_one(experts: Experts, stack: str) -> tuple[int, int]:
    """Return the shape `[out, in]` of an expert's gate, up or down projection."""
    size_out, size_in = experts.sizes_of(stack)
    return size_out // len(PARTS_OF_STACKS[experts.is_transposed][stack]), size_in


def _check_single(stack: str, experts: Experts, stored: StoredStack) -> None:
    """Check tensors of experts that are stored one by one.

    Packed matrices' other tensors, such as scales, are checked when the matrices are unpacked.
    """
    first: Any = stored.first
    parts, count = PARTS_OF_STACKS[experts.is_transposed][stack], experts.num_experts
    present = {
        ExpertMatrix(number, parts[position])
        for (number, position), kinds in stored.single.items()
        if WEIGHT in kinds
    }
    wanted = {ExpertMatrix(number, part) for number in range(count) for part in parts}
    if present != wanted:
        wrong = min(present ^ wanted)
        problem = "is missing" if wrong in wanted else "is one too many"
        raise CheckpointError(
            f"{first.origin}: {wrong} {problem} beside {first.name}: num_local_experts in config.json is {count}. "
            "Download or copy the checkpoint again."
        )
    for kinds in stored.single.values():
        tensor = kinds[WEIGHT]
        is_plain = len(kinds) == 1 and tensor.dtype in WEIGHT_DTYPES
        # llamoe's own formats pack whole stacks, never single experts.
        if is_plain == experts.is_packed or (experts.is_packed and not experts.format.is_unfused_in_files):
            raise CheckpointError(
                f"{tensor} has dtype {tensor.dtype}, which contradicts quantization_config in config.json, or its "
                "absence. Load the unquantized checkpoint, or quantize it again."
            )
        if not experts.is_packed:
            check_tensor(tensor, shape_of_one(experts, stack), None)
