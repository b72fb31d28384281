"""Experts that a checkpoint stores as one linear layer each: their names, and how loading fuses them.

Files of Mixtral have them so: `experts.N.w1.weight` (gate), `w3` (up) and `w2` (down). transformers' own rules fuse
them; here they are only checked.

Quantizers and trainers split the stacks of Llama 4. Two spellings are known, for an expert N:

* `experts.N.gate_proj.weight`, `up_proj`, `down_proj`: transformers, llm-compressor, GPTQModel, `llamoe convert`;
* `experts.gate_projs.N.weight`, `up_projs`, `down_projs`: Axolotl.

Each is `[out, in]`, like a linear layer's weight; the model's stacks are `[E, H, 2I]` (gate first) and `[E, I, H]`.
Loading fuses them by rules of transformers' own kind. Under tensor parallelism transformers cuts out a device's shard
before a rule sees the tensor, along the stack's axes: a rule that transposes would get a wrong shard. So the tensors
are transposed to `[in, out]` first, as views, and the rules only stack.

Shapes: E experts, H hidden_size, I intermediate_size.
"""

import dataclasses
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import patch_environment
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import load_state_dict

from ...configuration.errors import CheckpointError
from .._private_api import forget_conversions
from ..moe import PARTS_OF_STACKS, matrix_named
from .checkpoint_files import read_header
from .safetensors_files import DTYPE_NAMES, WEIGHT_DTYPES

_EXPERTS = "feed_forward.experts"
_NUMBER = r"(?:0|[1-9]\d*)"
# Spellings between `experts.` and `.weight`.
_SPELLINGS = (rf"{_NUMBER}\.{{}}_proj", rf"{{}}_projs\.{_NUMBER}")
# Such a name has two numbers, of the layer and the expert, whatever a `key_mapping` changes.
_TWO_NUMBERS = re.compile(r"\d\D+\d")
_BELOW_EXPERTS = re.compile(r"(.*(feed_forward|mlp)\.experts)\.(.+)")
# Any name of a single expert's tensor, also in an unknown spelling or from a quantizer.
_OF_ONE = re.compile(r"(feed_forward|mlp)\.experts\.(\w+\.)?\d+\.")
# The words of `ExpertName` for the matrices of a stack.
_PARTS, _PARTS_OF_MIXTRAL = (
    {
        stack: tuple(part.removesuffix("_proj") for part in parts)
        for stack, parts in PARTS_OF_STACKS[is_input_first].items()
    }
    for is_input_first in (True, False)
)


class ExpertName(NamedTuple):
    """An expert's weight: its name up to `experts`, the expert's number, and "gate", "up", "down" (or "w1" …)."""

    experts: str
    number: int
    part: str

    def __str__(self) -> str:
        """The name with the expert's number first."""
        return f"{self.experts}.{self.number}.{self.part}_proj.weight"


def expert_of(name: str) -> ExpertName | None:
    """The expert's weight that a checkpoint's name means; None for other names."""
    match = _BELOW_EXPERTS.fullmatch(name)
    matrix = match and matrix_named(match[3])
    if match is None or matrix is None or matrix.part.startswith("w") != (match[2] == "mlp"):
        return None
    return ExpertName(match[1], matrix.number, matrix.part.removesuffix("_proj"))


class StackExperts(MergeModulelist):
    """Writes the experts that a device holds into its shard of a stack, gate and up side by side.

    transformers' `MergeModulelist` and `Concatenate` would copy a layer three times, and fail on a device without
    experts. Releases before 5.23 count a rule's tensors only for operations of this class.
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


def fusing_rules(operation: MergeModulelist | None = None) -> list[WeightConverter]:
    """Rules that fuse the experts of Llama 4; each by `operation`, by default `StackExperts`."""
    operation = operation or StackExperts()
    return [
        WeightConverter(
            [rf"{re.escape(_EXPERTS)}\.{spelling.format(part)}\.weight$" for part in parts],
            f"{_EXPERTS}.{stack}",
            [operation],
        )
        for spelling in _SPELLINGS
        for stack, parts in _PARTS.items()
    ]


class _Tensor(NamedTuple):
    """A tensor's facts that are known before it is read."""

    origin: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.origin}: {self.name}"


def _tensors(state_dict: Mapping[str, torch.Tensor] | None, files: Iterable[str] | None) -> Iterator[_Tensor]:
    if state_dict is None:
        for file in files or ():
            for name, header in read_header(file).items():
                yield _Tensor(file, name, header.dtype, header.shape)
        return
    for name, tensor in state_dict.items():
        if isinstance(tensor, torch.Tensor):
            dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
            yield _Tensor("state_dict", name, dtype, tuple(tensor.shape))


def find_split_experts(
    model: PreTrainedModel,
    state_dict: Mapping[str, torch.Tensor] | None,
    files: Iterable[str] | None,
    load_config: Any,
    expected: Mapping[str, tuple[int, ...]],
    passed_over: Container[str] = (),
) -> dict[str, set[str]]:
    """Find the stacks that a checkpoint stores as one linear layer an expert, and check that all experts exist.

    The model is empty yet, and `expected` has its keys and shapes. `state_dict` has the weights if they are in memory,
    otherwise `files` hold them. Tensors of the names `passed_over` are read by others.

    Returns:
        the model's keys of these stacks, to the names of their experts in the checkpoint; empty where there are none,
        or transformers' own rules fuse them.

    Raises:
        CheckpointError: an expert is missing, stored twice, of another shape, or packed by a quantizer.
        ValueError: such experts under DeepSpeed's ZeRO-3.
    """
    renamings = [rule for rule in load_config.weight_mapping or () if isinstance(rule, WeightRenaming)]
    tensors = [tensor for tensor in _tensors(state_dict, files) if tensor.name not in passed_over]
    numbered = [tensor.name for tensor in tensors if _TWO_NUMBERS.search(tensor.name)]
    if not any(_OF_ONE.search(rename_source_key(name, renamings, [])[0]) for name in numbered):
        return {}
    is_mixtral = model.config.get_text_config().experts_are_output_first
    parts_of_stacks = _PARTS_OF_MIXTRAL if is_mixtral else _PARTS
    rules = fusing_rules()
    if is_mixtral:
        rules = [rule for rule in load_config.weight_mapping or () if isinstance(rule, WeightConverter)]
    whole: dict[str, _Tensor] = {}
    stacks: dict[str, dict[tuple[str, int], _Tensor]] = {}
    for tensor in tensors:
        name, _ = rename_source_key(tensor.name, renamings, [])
        if ".experts." not in name:
            continue
        key, _ = rename_source_key(name, [], rules, model.base_model_prefix, expected)
        expert = expert_of(name)
        if expert is None and _OF_ONE.search(name):
            raise CheckpointError(
                f"{tensor} belongs to one expert, but is no weight that can be fused: known are "
                + (
                    "experts.N.w1.weight, w2 and w3."
                    if is_mixtral
                    else "experts.N.gate_proj.weight and experts.gate_projs.N.weight, with up and down likewise."
                )
            )
        if expert is None:
            whole[key] = tensor
        # Keys of another pipeline stage are not expected.
        elif key in expected:
            found = stacks.setdefault(key, {})
            if other := found.get((expert.part, expert.number)):
                raise CheckpointError(f"{tensor} is there a second time: {other}.")
            found[expert.part, expert.number] = tensor
    for key, found in stacks.items():
        first = next(iter(found.values()))
        if is_deepspeed_zero3_enabled() and not is_mixtral:
            raise ValueError(
                f"{first.origin} has one linear layer an expert, which ZeRO-3 does not load: fuse the experts first, "
                "by `llamoe convert IN OUT`."
            )
        if key in whole:
            raise CheckpointError(f"{first} is there a second time: {whole[key]} has it, too.")
        experts, _, stack = key.rpartition(".")
        count, *sizes = expected[key]
        size_in, size_out = reversed(sizes) if is_mixtral else sizes
        parts = parts_of_stacks[stack]
        _check_stack(key, found, parts, count, (size_out // len(parts), size_in), load_config)
        for other in (f"{experts}.{stack}" for stack in parts_of_stacks):
            if other not in stacks and other not in whole:
                raise CheckpointError(f"{first} has no counterpart: {other} is missing, fused or not.")
    if is_mixtral:
        return {}
    return {key: {tensor.name for tensor in found.values()} for key, found in stacks.items()}


def _check_stack(
    key: str,
    found: Mapping[tuple[str, int], _Tensor],
    parts: tuple[str, ...],
    count: int,
    wanted: tuple[int, ...],
    load_config: Any,
) -> None:
    """Check the experts of one stack, against each other and, unless any sizes are asked for, against the model.

    `parts` are what an expert has in this stack, `[out, in]` in files, as `wanted`; `count` is the number of experts.
    """
    first = next(iter(found.values()))
    source = f"the model that config.json describes has {list(wanted)}"
    if load_config.ignore_mismatched_sizes:
        count, wanted = 1 + max(number for _, number in found), first.shape
        source = f"{first.name} has {list(wanted)}"
    for (_, number), tensor in found.items():
        if tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{tensor} has dtype {tensor.dtype}: experts that a quantizer has packed cannot be fused. Load the "
                "unquantized checkpoint."
            )
        if number >= count:
            raise CheckpointError(
                f"{tensor} is of expert {number}, but num_local_experts in config.json is {count}."
            )
        if tensor.shape != wanted or len(wanted) != 2:
            raise CheckpointError(
                f"{tensor} has shape {list(tensor.shape)}, but {source}. Weights and config.json do not belong "
                "together."
            )
    # Names may contain any number: the numbers below it are not put into a list.
    if missing := count * len(parts) - len(found):
        wanted_parts = ((number, part) for number in range(count) for part in parts)
        number, part = next((number, part) for number, part in wanted_parts if (part, number) not in found)
        name = f"{part}_projs.{number}" if "_projs." in first.name else f"{number}.{part}_proj"
        if part.startswith("w"):
            name = f"{number}.{part}"
        place = first.name.partition(".experts.")[0]
        raise CheckpointError(
            f"{first.origin}: {place}.experts.{name}.weight is missing ({missing} such), though the "
            f"checkpoint has {first.name}, and num_local_experts in config.json is {count}."
        )


def fuse_while_loading(
    stacks: Mapping[str, Iterable[str]],
    model: PreTrainedModel,
    state_dict: Mapping[str, torch.Tensor] | None,
    files: Iterable[str] | None,
    load_config: Any,
    operation: MergeModulelist | None = None,
) -> tuple[Any, Any]:
    """`PreTrainedModel._load_pretrained_model`, which also fuses the experts that `find_split_experts` found.

    The rules are removed afterwards: saving would run them in reverse. `stacks` is what `find_split_experts` returned.
    An `operation` takes the experts as they are stored, `[out, in]`, in place of `StackExperts`.

    Raises:
        CheckpointError: a stack could not be made.
    """
    if state_dict is None:
        state_dict = {}
        for file in files or ():
            state_dict |= load_state_dict(file, disable_mmap=load_config.disable_mmap)
    experts = set() if operation else set().union(*stacks.values())
    turned = {name: tensor.T if name in experts else tensor for name, tensor in state_dict.items()}
    rules = fusing_rules(operation)
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
