"""Rules by which transformers' loader reads folders with packed linear layers, of which each expert may have its own.

The loader collects the tensors of a linear layer, or of the linear layers of all experts of a stack. An operation
(`_Read`) then converts the tensors to the parts of a packed module, or to the weight of a plain module.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from ...configuration.errors import CheckpointError
from ..checkpoints import shape_of_one
from ..formats import Bnb
from ..formats.packed import Layout
from ..moe import PARTS_OF_STACKS, PLACES, STACKS
from .packed import Packed


def reading_rules(layout: Layout | Bnb, layers: Iterable[str] = ("",)) -> list[WeightConverter]:
    """Return the rules for stacks of experts, and for the linear layers whose names end with one of `layers`."""
    sources = {}
    for stack in STACKS:
        parts = [part for part in PLACES if PLACES[part][0] == stack]
        sources[f".experts.{stack}"] = [
            *(f".experts.*.{part}.{kind}" for part in parts for kind in layout.kinds),
            # The loader takes the first name that matches, and the longer name begins with the shorter one.
            *(f".experts.{stack}{suffix}" for suffix in reversed(layout.in_stacks)),
        ]
    # Names of experts also match the patterns of linear layers, so the rules of experts come first.
    sources |= {f"{layer}.weight": [f"{layer}.{kind}" for kind in layout.kinds] for layer in layers}
    # Without `force_cpu` the loader would copy all packed tensors to the GPU before they are converted.
    return [
        WeightConverter(names, target, [_Read(layout, target)], force_cpu=True)
        for target, names in sources.items()
    ]


class _Read(ConversionOps):
    """Converts packed tensors of files to the parts of a packed module, or to the weight of a plain module.

    Args:
        layout: layout of the tensors.
        target: what the names of the weights end with in the model.
    """

    # transformers casts the tensors before the conversion unless an operation has this attribute.
    hf_quantizer = True

    def __init__(self, layout: Layout | Bnb, target: str):
        self.layout, self.target = layout, target

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the tensors by their names in the model.

        Raises:
            CheckpointError: an expert lacks a tensor that others have.
        """
        path, _, name = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        if name not in STACKS:
            layer = self.target.removesuffix("weight")
            tensors = {pattern.removeprefix(layer): values[0] for pattern, values in input_dict.items()}
            if not isinstance(module, Packed):
                weight = self.layout.weight_of(tensors, tuple(module.weight.shape))
                return {full_layer_name: weight.to(module.weight.dtype)}
            sizes, matrices = module.sizes[name], iter([[tensors]])
        elif stacked := {
            suffix: input_dict[self.target + suffix][0]
            for suffix in self.layout.in_stacks
            if self.target + suffix in input_dict
        }:
            if set(stacked) == {""} and stacked[""].dtype.itemsize > 1:
                # The stack is plain. The loader casts no tensor of this rule.
                return {full_layer_name: stacked[""].to(module.dtype)}
            sizes = module.sizes_of(name)
            matrices = _from_stacks(self.layout, module, name, input_dict, stacked)
        else:
            sizes, matrices = shape_of_one(module, name), _by_expert(module, name, input_dict)
        if isinstance(module, Packed):
            parts = (self.layout.parts_of(layers, sizes, module.formats[name]) for layers in matrices)
            filled = module.fill(name, parts, torch.device("cpu"))
            return {f"{path}.{part}": tensor for part, tensor in filled.items()}
        whole = torch.empty(module.stack_shape(name), dtype=module.dtype)
        for matrix, layers in zip(whole.mT if module.is_transposed else whole, matrices, strict=True):
            matrix.copy_(torch.cat([self.layout.weight_of(tensors, sizes) for tensors in layers]))
        return {full_layer_name: whole}


def _from_stacks(
    layout: Any,
    experts: Any,
    name: str,
    found: Mapping[str, list[torch.Tensor]],
    stacked: Mapping[str, torch.Tensor],
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield each expert's tensors by kind, from stacks; codes may also be stored for each expert alone."""
    kinds = dict(zip(layout.in_stacks, layout.kinds, strict=True))
    singles = None if "" in stacked else _by_expert(experts, name, found)
    for number in range(experts.num_experts):
        tensors = {kinds[suffix]: tensor[number] for suffix, tensor in stacked.items()}
        if experts.is_transposed:
            tensors = {kind: tensor.T for kind, tensor in tensors.items()}
        if singles:
            codes = [linear["weight"] for linear in next(singles)]
            # torch joins no float8.
            tensors["weight"] = torch.cat([part.view(torch.uint8) for part in codes]).view(codes[0].dtype)
        yield [tensors]


def _by_expert(
    experts: Any, stack: str, input_dict: Mapping[str, list[torch.Tensor]]
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield for each expert the tensors of its linear layers, gate before up, each as tensors by kind.

    Raises:
        CheckpointError: an expert lacks a tensor that others have.
    """
    layers: list[dict[str, list[torch.Tensor]]] = [{} for _ in PARTS_OF_STACKS[True][stack]]
    counts = {}
    for pattern, tensors in input_dict.items():
        if pattern.startswith(".experts.*."):
            part, _, kind = pattern.removeprefix(".experts.*.").partition(".")
            layers[PLACES[part][1]][kind], counts[pattern] = tensors, len(tensors)
    if {*counts.values()} != {experts.num_experts} or not all(layers):
        raise CheckpointError(
            f"the checkpoint has these numbers of tensors, by pattern: {counts}; num_local_experts in config.json is "
            f"{experts.num_experts}. Quantize the original checkpoint again."
        )
    for number in range(experts.num_experts):
        yield [{kind: tensors[number] for kind, tensors in kinds.items()} for kinds in layers]
