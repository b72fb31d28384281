"""Where a checkpoint has which expert's numbers, bitsandbytes' too: one index, however its files store them.

Files have a layer's experts as two stacks, or each expert's gate, up and down as linear layers, `[out, in]`:

* `experts.N.w1.weight` (gate), `w3` (up) and `w2` (down): Mixtral;
* `experts.N.gate_proj.weight`, `up_proj`, `down_proj`: transformers, llm-compressor, GPTQModel, `llamoe convert`;
* `experts.gate_projs.N.weight`, `up_projs`, `down_projs`: Axolotl.

Packed stacks have several parts, and beside a linear layer's weight that bitsandbytes has packed stand tensors of other
kinds (`weight.absmax`, `SCB` …). Who wants experts asks here: to fuse, quantize or unpack them while they are loaded
(`load_weights`), or to read them where they are (`offload`).

Shapes: E experts, H hidden_size, I intermediate_size.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming, rename_source_key

from ...configuration.errors import CheckpointError
from ..moe import PARTS_OF_STACKS, PLACES, STACKS, ExpertMatrix, Experts, matrix_named, missing_matrices
from .safetensors_files import WEIGHT_DTYPES
from .stored import OTHER_MODEL, Stored, check_tensor

WEIGHT = "weight"
"""Kind of the tensor that has an expert's numbers, or their codes."""

_BELOW_EXPERTS = re.compile(r"(.*(feed_forward|mlp)\.experts)\.(.+)")
# Any name of a single expert's tensor, also in an unknown spelling or from a quantizer.
_OF_ONE = re.compile(r"(.*(?:feed_forward|mlp)\.experts)\.(\w+\.)?\d+\.")
# What follows an expert's packed weight, or stands in the place of "weight".
_BESIDE = re.compile(r"(.*\.experts\..*\.)(?:weight\.(.+)|(SCB|weight_format))")


class ExpertName(NamedTuple):
    """A tensor of one expert: its name up to `experts`, the matrix that it belongs to, and its kind."""

    experts: str
    matrix: ExpertMatrix
    kind: str = WEIGHT


def expert_of(name: str) -> ExpertName | None:
    """The expert's tensor that a checkpoint's name means; None for other names."""
    beside = _BESIDE.fullmatch(name)
    match = _BELOW_EXPERTS.fullmatch(f"{beside[1]}weight" if beside else name)
    matrix = match and matrix_named(match[3])
    if match is None or matrix is None or matrix.part.startswith("w") != (match[2] == "mlp"):
        return None
    return ExpertName(match[1], matrix, beside[2] or beside[3] if beside else WEIGHT)


@dataclass
class StoredStack:
    """What a checkpoint has of one stack.

    Attributes:
        whole: by the suffix of its parts, the tensors that hold all experts.
        single: by expert and place in its part of the stack (`PLACES`), a matrix's tensors by their kind.
    """

    whole: dict[str, Stored] = field(default_factory=dict)
    single: dict[tuple[int, int], dict[str, Stored]] = field(default_factory=dict)

    @property
    def first(self) -> Stored | None:
        """Any of the tensors."""
        for kinds in self.single.values():
            return kinds.get(WEIGHT) or next(iter(kinds.values()))
        return next(iter(self.whole.values()), None)

    def names(self) -> set[str]:
        """The names of all tensors, as stored."""
        singles = (stored.name for kinds in self.single.values() for stored in kinds.values())
        return {*(stored.name for stored in self.whole.values()), *singles}


Index = dict[str, dict[str, StoredStack]]
"""By the name of a layer's experts and that of a stack."""


def names_in_model(model: PreTrainedModel, rules: Iterable[Any] | None) -> Callable[[str], list[str]]:
    """A function that gives the names which a checkpoint's key may have in the model, by transformers' rules."""
    renamings = [rule for rule in rules or () if isinstance(rule, WeightRenaming)]
    prefixes = getattr(model, "_checkpoint_prefixes", {})
    patterns = [(re.compile(f"^{old}"), new) for old, new in prefixes.items()]
    prefix = f"{model.base_model_prefix}."

    def names(key: str) -> list[str]:
        renamed, _ = rename_source_key(key, renamings, [])
        found = [renamed, *(pattern.sub(new, renamed) for pattern, new in patterns)]
        # A model without its head, or the other way round.
        return [*found, *(prefix + name for name in found), *(name.removeprefix(prefix) for name in found)]

    return names


def suffixes_in_files(experts: Experts, is_packed: bool) -> tuple[str, ...]:
    """What follows a stack's name in the names of its parts; of plain stacks nothing."""
    if not (is_packed and experts.is_packed):
        return ("",)
    return experts.format.suffixes


def index_experts(
    layers: Mapping[str, Experts],
    tensors: Iterable[Stored],
    names: Callable[[str], Iterable[str]],
    is_packed: bool = False,
) -> Index:
    """Where a checkpoint has the experts of these layers.

    Args:
        layers: names in the model, and experts with the shapes of the model.
        tensors: of the checkpoint.
        names: the names that a key of the checkpoint may have in the model.
        is_packed: whether packed experts of the model are packed in the checkpoint, too.

    Raises:
        CheckpointError: a tensor is there twice, or is of one expert and nothing that is known.
    """
    index: Index = {layer: {stack: StoredStack() for stack in STACKS} for layer in layers}
    wanted = {
        f"{layer}.{stack}{suffix}": (layer, stack, suffix)
        for layer, experts in layers.items()
        for stack in STACKS
        for suffix in suffixes_in_files(experts, is_packed)
    }
    for tensor in tensors:
        for key in names(tensor.name):
            if "experts" not in key:
                continue
            if key in wanted:
                layer, stack, kind = wanted[key]
                kinds = index[layer][stack].whole
            elif (expert := expert_of(key)) and expert.experts in layers:
                layer, (number, part), kind = expert
                stack, place = PLACES[part]
                kinds = index[layer][stack].single.setdefault((number, place), {})
            elif (match := _OF_ONE.match(key)) and match[1] in layers:
                raise CheckpointError(_unknown(tensor, layers[match[1]]))
            else:
                continue
            if other := kinds.get(kind):
                raise CheckpointError(f"{tensor} is there a second time: {other} has it, too.")
            kinds[kind] = tensor
            break
    return index


def _unknown(tensor: Stored, experts: Experts) -> str:
    known = "experts.N.gate_proj.weight and experts.gate_projs.N.weight, with up and down likewise."
    if not experts.is_transposed:
        known = "experts.N.w1.weight, w2 and w3."
    return f"{tensor} belongs to one expert, but is not a weight that can be fused: known are {known}"


def check_experts(
    layer: str,
    experts: Experts,
    found: Mapping[str, StoredStack],
    is_packed: bool = False,
    ignores_sizes: bool = False,
) -> None:
    """Check what a checkpoint has of one layer's experts: plain, or packed in stacks or one by one.

    Args:
        layer: name of the experts in the model.
        experts: with the shapes of the model.
        found: by stack.
        is_packed: as in `index_experts`.
        ignores_sizes: whether sizes need only agree with each other.

    Raises:
        CheckpointError: an expert is missing, there twice, has another shape, or a dtype that is not read.
    """
    first = next((stored.first for stored in found.values() if stored.first), None)
    is_packed = is_packed and experts.is_packed
    for stack, stored in found.items():
        whole = next(iter(stored.whole.values()), None)
        if stored.first is None:
            other = f"{first} has no counterpart: {layer}.{stack}" if first else f"{layer}.{stack}"
            raise CheckpointError(f"{other} is missing, fused or not. Download or copy the checkpoint again.")
        if stored.single and whole:
            raise CheckpointError(f"{stored.first} is there a second time: {whole} has it, too.")
        if is_packed and experts.is_packed_one_by_one:
            _check_packed_one_by_one(layer, stack, experts, stored)
        elif is_packed and stored.single:
            raise CheckpointError(
                f"{stored.first} is one expert by itself, where config.json says that experts are packed in stacks."
            )
        elif stored.single:
            _check_single(stack, experts, stored, ignores_sizes)
        else:
            for suffix in suffixes_in_files(experts, is_packed):
                if suffix not in stored.whole:
                    raise CheckpointError(
                        f"{whole} is there, but {layer}.{stack}{suffix} is missing. Download or copy the checkpoint "
                        "again."
                    )
                part: Any = getattr(experts, stack + suffix)
                wanted = (tuple(part.shape), part.dtype) if is_packed else (shape(experts, stack), None)
                check_tensor(stored.whole[suffix], *wanted)


def shape(experts: Experts, stack: str) -> tuple[int, ...]:
    """Shape of a plain stack; under DeepSpeed's ZeRO-3 an empty model is in parts already."""
    return tuple(getattr(experts._parameters.get(stack), "ds_shape", None) or experts.stack_shape(stack))


def shape_of_one(experts: Experts, stack: str) -> tuple[int, int]:
    """Shape `[out, in]` of an expert's gate, up or down."""
    _, size_out, size_in = shape(experts, stack)
    if experts.is_transposed:
        size_out, size_in = size_in, size_out
    return size_out // len(PARTS_OF_STACKS[experts.is_transposed][stack]), size_in


def _check_single(stack: str, experts: Experts, stored: StoredStack, ignores_sizes: bool) -> None:
    first: Any = stored.first
    # Under expert parallelism a process holds some of them.
    count, wanted = experts.config.num_local_experts, shape_of_one(experts, stack)
    source = f"the model that config.json describes has {list(wanted)}"
    if ignores_sizes:
        count, wanted = 1 + max(number for number, _ in stored.single), first.shape
        source = f"{first.name} has {list(wanted)}"
    _check_numbers(stack, experts, stored, count)
    for kinds in stored.single.values():
        tensor = kinds[WEIGHT]
        if tensor.dtype not in WEIGHT_DTYPES or len(kinds) > 1:
            raise CheckpointError(
                f"{tensor} has dtype {tensor.dtype}: experts that a quantizer has packed cannot be fused. Load the "
                "unquantized checkpoint."
            )
        if tensor.shape != wanted or len(wanted) != 2:
            raise CheckpointError(f"{tensor} has shape {list(tensor.shape)}, but {source}. {OTHER_MODEL}")


def _check_packed_one_by_one(layer: str, stack: str, experts: Experts, stored: StoredStack) -> None:
    """Check that each expert has its packed matrices; what belongs to each is checked when it is unpacked."""
    if not stored.single:
        raise CheckpointError(
            f"{layer}.{stack} is missing: the checkpoint has no quantized experts for it, though it has others. "
            "Download or copy it again."
        )
    _check_numbers(stack, experts, stored, experts.num_experts)
    for kinds in stored.single.values():
        if len(kinds) == 1 and kinds[WEIGHT].dtype in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{kinds[WEIGHT]} has dtype {kinds[WEIGHT].dtype}, though other experts of its layer are packed. "
                "Quantize the original checkpoint again."
            )


def _check_numbers(stack: str, experts: Experts, stored: StoredStack, count: int) -> None:
    """Check that a stack has each of `count` experts, with each of its matrices, and no others."""
    first: Any = stored.first
    for (number, _), kinds in stored.single.items():
        if number >= count:
            raise CheckpointError(
                f"{next(iter(kinds.values()))} is of expert {number}, but num_local_experts in config.json is {count}."
            )
    parts = PARTS_OF_STACKS[experts.is_transposed][stack]
    found = {ExpertMatrix(n, parts[place]) for (n, place), kinds in stored.single.items() if WEIGHT in kinds}
    if missing := count * len(parts) - len(found):
        number, part = next(missing_matrices(found, stack, count, experts.is_transposed))
        name = f"{part}s.{number}" if "_projs." in first.name else f"{number}.{part}"
        path = first.name.partition(".experts.")[0]
        raise CheckpointError(
            f"{first.origin}: {path}.experts.{name}.weight is missing ({missing} such), though the checkpoint has "
            f"{first.name}, and num_local_experts in config.json is {count}. Download or copy the checkpoint again."
        )
