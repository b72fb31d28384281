"""Rules for transformers' loader to read folders that store packed linear layers, also for each expert.

The loader collects the tensors of a linear layer, or of the layers of all experts of a stack. An operation converts
them to the parts of a packed module, or, for a plain module, to the plain weight. The folder's `Layout` does it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from ...configuration.errors import CheckpointError
from ..checkpoints import shape_of_one
from ..formats import Format, Parts, Sizes
from ..moe import PARTS_OF_STACKS, PLACES
from .packed import Packed

Tensors = Mapping[str, torch.Tensor]
"""The tensors of a linear layer, by what follows its name."""


class Layout(Protocol):
    """Interface: how a folder stores the matrices of linear layers."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The suffixes of a layer's tensors after its name."""
        ...

    @property
    def in_stacks(self) -> tuple[str, ...]:
        """The suffixes of a stack's codes and scales after its name; empty if layers are stored one by one."""
        ...

    def parts_of(self, matrices: Sequence[Tensors], sizes: Sizes, form: Format) -> Parts:
        """Return the parts of one packed matrix, made of linear layers of these sizes stacked along the outputs."""
        ...

    def weight_of(self, tensors: Tensors, sizes: Sizes) -> torch.Tensor:
        """Return a layer's weight `[O, I]`, unpacked unless it is plain already."""
        ...

    def weight_in_stack(
        self, codes: Sequence[torch.Tensor], scale: torch.Tensor, is_transposed: bool
    ) -> torch.Tensor:
        """Return an expert's matrix from codes and a scale in the order of axes of the stacks that hold them."""
        ...


def reading_rules(layout: Layout, layers: Iterable[str] = ("",)) -> list[WeightConverter]:
    """Return the rules for stacks of experts, and for linear layers with these name suffixes."""
    # Convert on the CPU, where files are mapped: otherwise the loader copies all tensors to the GPU first.
    rules = [
        WeightConverter(
            [
                *(
                    f".experts.*.{part}.{kind}"
                    for part in PLACES
                    if PLACES[part][0] == stack
                    for kind in layout.kinds
                ),
                # The longer name first, for it begins with the shorter.
                *(f".experts.{stack}{suffix}" for suffix in reversed(layout.in_stacks)),
            ],
            f".experts.{stack}",
            [_ReadStack(layout)],
            force_cpu=True,
        )
        for stack in PARTS_OF_STACKS[True]
    ]
    return rules + [
        WeightConverter(
            [f"{layer}.{kind}" for kind in layout.kinds],
            f"{layer}.weight",
            [_ReadLinear(layout)],
            force_cpu=True,
        )
        for layer in layers
    ]


class _Reads(ConversionOps):
    # transformers reads this attribute of operations; without it, it would cast the tensors before the conversion.
    hf_quantizer = True

    def __init__(self, layout: Layout):
        self.layout = layout


class _ReadLinear(_Reads):
    """Make the parts of a linear layer's weight, or the weight if the layer is not packed here."""

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_dict: dict[str, Any],
        target_patterns: Sequence[str] = (),
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Return the tensors by their names in the model."""
        path, _, name = full_layer_name.rpartition(".")
        module, layer = model.get_submodule(path), target_patterns[0].removesuffix("weight")
        tensors = {pattern.removeprefix(layer): found[0] for pattern, found in input_dict.items()}
        if not isinstance(module, Packed):
            weight = self.layout.weight_of(tensors, tuple(module.weight.shape))
            return {full_layer_name: weight.to(module.weight.dtype)}
        parts = self.layout.parts_of([tensors], module.sizes[name], module.format)
        return dict(zip((f"{path}.{part}" for part in module.part_shapes(name)), parts, strict=True))


class _ReadStack(_Reads):
    """Make the parts of a stack, or the stack if it is not packed here, one expert after the other."""

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the tensors by their names in the model.

        Raises:
            CheckpointError: an expert lacks a tensor that others have.
        """
        path, _, stack = full_layer_name.rpartition(".")
        experts = model.get_submodule(path)
        matrices: list[dict[str, list[torch.Tensor]]] = [{} for _ in PARTS_OF_STACKS[True][stack]]
        stacked = {}
        for pattern, tensors in input_dict.items():
            part, _, kind = pattern.removeprefix(".experts.*.").partition(".")
            if part in PLACES:
                matrices[PLACES[part][1]][kind] = tensors
            else:
                stacked[pattern.removeprefix(f".experts.{stack}")] = tensors[0]
        if set(stacked) == {""}:
            return {full_layer_name: stacked[""]}
        counts = {pattern: len(tensors) for pattern, tensors in input_dict.items() if "*" in pattern}
        if "" not in stacked and ({*counts.values()} != {experts.num_experts} or not all(matrices)):
            raise CheckpointError(
                f"the checkpoint has so many tensors of each kind: {counts}, where num_local_experts in config.json is "
                f"{experts.num_experts}. Quantize the original checkpoint again."
            )
        if stacked:
            whole = torch.empty(experts.stack_shape(stack), dtype=experts.dtype)
            codes = [stacked[""]] if "" in stacked else [kinds["weight"] for kinds in matrices]
            scales = stacked[self.layout.in_stacks[1]]
            for number, matrix in enumerate(whole):
                parts = [each[number] for each in codes]
                matrix.copy_(self.layout.weight_in_stack(parts, scales[number], experts.is_transposed))
            return {full_layer_name: whole}
        sizes = shape_of_one(experts, stack)
        by_expert = (
            [{kind: tensors[number] for kind, tensors in kinds.items()} for kinds in matrices]
            for number in range(experts.num_experts)
        )
        if not isinstance(experts, Packed):
            whole = torch.empty(experts.stack_shape(stack), dtype=experts.dtype)
            for matrix, layers in zip(whole.mT if experts.is_transposed else whole, by_expert, strict=True):
                matrix.copy_(torch.cat([self.layout.weight_of(tensors, sizes) for tensors in layers]))
            return {full_layer_name: whole}
        wholes = experts.empty_parts(stack, torch.device("cpu"))
        for number, layers in enumerate(by_expert):
            parts = self.layout.parts_of(layers, sizes, experts.formats[stack])
            for whole, part in zip(wholes.values(), parts, strict=True):
                whole[number] = part
        return {f"{path}.{part}": whole for part, whole in wholes.items()}
