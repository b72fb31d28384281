"""Rules for transformers' loader to read folders that store packed linear layers, also for each expert.

The loader collects the tensors of a linear layer, or of the layers of all experts of a stack. An operation converts
them to the parts of a packed module, or, for a plain module, to the plain weight. The folder's layout does it.
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
    """Return the rules for stacks of experts, and for linear layers with these name suffixes."""
    sources = {}
    for stack in STACKS:
        parts = [part for part in PLACES if PLACES[part][0] == stack]
        sources[f".experts.{stack}"] = [
            *(f".experts.*.{part}.{kind}" for part in parts for kind in layout.kinds),
            # The longer name first, for it begins with the shorter.
            *(f".experts.{stack}{suffix}" for suffix in reversed(layout.in_stacks)),
        ]
    # The loader takes the first rule that matches, and names of experts match the patterns of linear layers, too.
    sources |= {f"{layer}.weight": [f"{layer}.{kind}" for kind in layout.kinds] for layer in layers}
    # Convert on the CPU, where files are mapped: otherwise the loader copies all tensors to the GPU first.
    return [
        WeightConverter(names, target, [_Read(layout, target)], force_cpu=True)
        for target, names in sources.items()
    ]


class _Read(ConversionOps):
    """Make the parts of a weight, or the plain weight if it is not packed here, one expert after the other.

    Args:
        layout: of the tensors in files.
        target: the pattern of the weight's name.
    """

    # transformers reads this attribute of operations; without it, it would cast the tensors before the conversion.
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
            tensors = {pattern.removeprefix(layer): found[0] for pattern, found in input_dict.items()}
            if not isinstance(module, Packed):
                weight = self.layout.weight_of(tensors, tuple(module.weight.shape))
                return {full_layer_name: weight.to(module.weight.dtype)}
            sizes, matrices = module.sizes[name], iter([[tensors]])
        elif stacked := {
            suffix: input_dict[self.target + suffix][0]
            for suffix in self.layout.in_stacks
            if self.target + suffix in input_dict
        }:
            return {full_layer_name: self._of_stacks(module, name, input_dict, stacked)}
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

    def _of_stacks(
        self,
        experts: Any,
        name: str,
        input_dict: Mapping[str, list[torch.Tensor]],
        stacked: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return a stack in 16 bits from scales of all experts together; the codes may be those of single experts."""
        if set(stacked) == {""}:
            # Without scales the stack is plain.
            return stacked[""]
        if "" in stacked:
            codes = [[matrix] for matrix in stacked[""]]
        else:
            codes = [
                [kinds["weight"] for kinds in layers] for layers in _by_expert(experts, name, input_dict)
            ]
        # Only layouts whose files have stacks come here.
        layout: Any = self.layout
        scales = stacked[layout.in_stacks[1]]
        whole = torch.empty(experts.stack_shape(name), dtype=experts.dtype)
        for matrix, parts, scale in zip(whole, codes, scales, strict=True):
            matrix.copy_(layout.weight_in_stack(parts, scale, experts.is_transposed))
        return whole


def _by_expert(
    experts: Any, stack: str, input_dict: Mapping[str, list[torch.Tensor]]
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield the tensors of each expert's linear layers by kind, gate before up.

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
