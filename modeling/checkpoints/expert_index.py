"""An index of the experts' tensors in a checkpoint, for all layouts of files.

Files store a layer's experts as two stacks, or each expert's gate, up and down as linear layers, `[out, in]`:

* `experts.N.w1.weight` (gate), `w3` (up) and `w2` (down): Mixtral;
* `experts.N.gate_proj.weight`, `up_proj`, `down_proj`: transformers, llm-compressor, GPTQModel, `llamoe convert`;
* `experts.gate_projs.N.weight`, `up_projs`, `down_projs`: Axolotl.

Packed stacks have several parts; a linear layer packed by bitsandbytes has further tensors (`weight.absmax`, `SCB` …).
`offload` and `conversion` use this index; loading into memory uses rules of transformers' loader for the same names
(`conversions`).

Shapes: E experts, H hidden_size, I intermediate_size.
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
"""Kind of the tensor that has an expert's numbers, or their codes."""

_BELOW_EXPERTS = re.compile(r"(.*(feed_forward|mlp)\.experts)\.(.+)")
# Name suffixes of packed weights, after "weight" or instead of it.
_BESIDE = re.compile(r"(.*\.experts\..*\.)(weight\..+|SCB|weight_format)")


class ExpertName(NamedTuple):
    """A tensor of one expert: its name up to `experts`, the matrix that it belongs to, and its kind."""

    experts: str
    matrix: ExpertMatrix
    kind: str = WEIGHT


def expert_of(name: str) -> ExpertName | None:
    """Parse the name of an expert's tensor; None for other names."""
    beside = _BESIDE.fullmatch(name)
    match = _BELOW_EXPERTS.fullmatch(f"{beside[1]}weight" if beside else name)
    matrix = match and matrix_named(match[3])
    if match is None or matrix is None or matrix.part.startswith("w") != (match[2] == "mlp"):
        return None
    return ExpertName(match[1], matrix, beside[2] if beside else WEIGHT)


@dataclass
class StoredStack:
    """A checkpoint's tensors of one stack.

    Attributes:
        whole: tensors with all experts, by the suffix of the part.
        single: tensors of single matrices, by expert and position within its part of the stack (`PLACES`), by kind.
    """

    whole: dict[str, Stored] = field(default_factory=dict)
    single: dict[tuple[int, int], dict[str, Stored]] = field(default_factory=dict)

    @property
    def first(self) -> Stored | None:
        """Any of the tensors."""
        for kinds in self.single.values():
            return kinds.get(WEIGHT) or next(iter(kinds.values()))
        return next(iter(self.whole.values()), None)


Index = dict[str, dict[str, StoredStack]]
"""By the name of a layer's experts and that of a stack."""


def names_in_model(model: PreTrainedModel, rules: Iterable[Any] | None) -> Callable[[str], list[str]]:
    """Return a function from a checkpoint's key to its possible names in the model, by transformers' rules."""
    renamings = [rule for rule in rules or () if isinstance(rule, WeightRenaming)]
    prefixes = getattr(model, "_checkpoint_prefixes", {})
    patterns = [(re.compile(f"^{old}"), new) for old, new in prefixes.items()]
    prefix = f"{model.base_model_prefix}."

    def names(key: str) -> list[str]:
        renamed, _ = rename_source_key(key, renamings, [])
        found = [renamed, *(pattern.sub(new, renamed) for pattern, new in patterns)]
        # The checkpoint may have a head that the model lacks, or the other way round.
        return [*found, *(prefix + name for name in found), *(name.removeprefix(prefix) for name in found)]

    return names


def suffixes_in_files(experts: Experts) -> tuple[str, ...]:
    """Return the name suffixes of a stack's parts; only "" for plain stacks."""
    return experts.format.suffixes if experts.is_packed else ("",)


def index_experts(
    layers: Mapping[str, Experts], tensors: Iterable[Stored], names: Callable[[str], Iterable[str]]
) -> Index:
    """Index the tensors of these layers' experts in a checkpoint.

    Args:
        layers: names in the model, and experts with the shapes of the model.
        tensors: of the checkpoint.
        names: the names that a key of the checkpoint may have in the model.

    Raises:
        CheckpointError: a tensor is there twice.
    """
    index: Index = {layer: {stack: StoredStack() for stack in STACKS} for layer in layers}
    wanted = {
        f"{layer}.{stack}{suffix}": (layer, stack, suffix)
        for layer, experts in layers.items()
        for stack in STACKS
        for suffix in suffixes_in_files(experts)
    }
    for tensor in tensors:
        for key in names(tensor.name):
            if key in wanted:
                layer, stack, kind = wanted[key]
                kinds = index[layer][stack].whole
            elif (expert := expert_of(key)) and expert.experts in layers:
                layer, (number, part), kind = expert
                stack, place = PLACES[part]
                kinds = index[layer][stack].single.setdefault((number, place), {})
            else:
                continue
            if other := kinds.get(kind):
                raise CheckpointError(f"{tensor} is stored twice: {other} has it, too.")
            kinds[kind] = tensor
            break
    return index


def check_experts(layer: str, experts: Experts, found: Mapping[str, StoredStack]) -> None:
    """Check a checkpoint's tensors of one layer's experts: plain, or packed in stacks or one by one.

    Args:
        layer: name of the experts in the model.
        experts: with the shapes of the model.
        found: by stack.

    Raises:
        CheckpointError: an expert is missing, there twice, has another shape, or a dtype that is not read.
    """
    for stack, stored in found.items():
        whole = next(iter(stored.whole.values()), None)
        if stored.first is None or (experts.format.is_unfused_in_files and not stored.single):
            raise CheckpointError(
                f"{layer}.{stack} is missing, fused or not. Download or copy the checkpoint again."
            )
        if stored.single and whole:
            raise CheckpointError(f"{stored.first} is stored twice: {whole} has it, too.")
        if stored.single and experts.is_packed and not experts.format.is_unfused_in_files:
            raise CheckpointError(
                f"{stored.first} is one expert by itself, where config.json says that experts are packed in stacks."
            )
        if stored.single:
            _check_single(stack, experts, stored)
            continue
        for suffix in suffixes_in_files(experts):
            if suffix not in stored.whole:
                raise CheckpointError(
                    f"{whole} is there, but {layer}.{stack}{suffix} is missing. Download or copy the checkpoint again."
                )
            part: Any = getattr(experts, stack + suffix)
            check_tensor(stored.whole[suffix], tuple(part.shape), part.dtype if experts.is_packed else None)


def shape_of_one(experts: Experts, stack: str) -> tuple[int, int]:
    """Return the shape `[out, in]` of an expert's gate, up or down projection."""
    size_out, size_in = experts.sizes_of(stack)
    return size_out // len(PARTS_OF_STACKS[experts.is_transposed][stack]), size_in


def _check_single(stack: str, experts: Experts, stored: StoredStack) -> None:
    """Check that each expert has its matrices; further tensors of packed ones are checked when they are unpacked."""
    first: Any = stored.first
    parts, count = PARTS_OF_STACKS[experts.is_transposed][stack], experts.num_experts
    found = {ExpertMatrix(n, parts[place]) for (n, place), kinds in stored.single.items() if WEIGHT in kinds}
    wanted = {ExpertMatrix(number, part) for number in range(count) for part in parts}
    if found != wanted:
        wrong = min(found ^ wanted)
        problem = "is missing" if wrong in wanted else "is one too many"
        raise CheckpointError(
            f"{first.origin}: {wrong} {problem} beside {first.name}, though num_local_experts in config.json is "
            f"{count}. Download or copy the checkpoint again."
        )
    for kinds in stored.single.values():
        tensor = kinds[WEIGHT]
        is_plain = len(kinds) == 1 and tensor.dtype in WEIGHT_DTYPES
        if is_plain == experts.is_packed:
            raise CheckpointError(
                f"{tensor} has dtype {tensor.dtype}, where packed experts and plain ones are not read side by side. "
                "Load the unquantized checkpoint, or quantize it again."
            )
        if not experts.is_packed:
            check_tensor(tensor, shape_of_one(experts, stack), None)
