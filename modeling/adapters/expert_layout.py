"""The layout of LoRA factors for stacks of experts, and its conversion from that of stock models.

Stock Llama 4 does not declare that its experts are stored input-first: peft takes `[E, in, out]` for `[E, out, in]`,
and learns A on the output side and B on the input side. The change of the weight is the same matrix product. Our
experts declare their layout, so such a pair fits them once its factors are exchanged:

* A `[E * r, in]`, where the expert is the slowest index;
* B `[out, r * E]`, where the expert is the fastest index.

The sizes of the two sides tell the layout. If every adapted stack has as many inputs as outputs, they do not, so such
an adapter is refused when it is created.

Shapes: E experts, R = r rank, X and Y the sizes of the two sides.
"""

import logging
import re
from collections.abc import Collection, Mapping

import torch
from torch import nn

from ..moe import STACKS, Experts

logger = logging.getLogger("llamoe")

_FACTOR = re.compile(r"^(?P<module>.+?)(?P<nested>(\.base_layer)*)\.lora_A(?P<rest>\..+)$")


def by_expert(factor: torch.Tensor, dim: int, num_experts: int) -> torch.Tensor:
    """Return a view of A (dim 0) as `[E, r, X]`, or of B (dim 1) as `[Y, r, E]`: the second axis is the rank."""
    return factor.unflatten(dim, (num_experts, -1) if dim == 0 else (-1, num_experts))


def exchange_factors(
    lora_A: torch.Tensor, lora_B: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert a pair `[E * r, X]`, `[Y, r * E]` from stock's layout to ours or back: `[E * r, Y]` and `[X, r * E]`.

    Each expert's product is the transpose of what it was.
    """
    a_ERX, b_YRE = by_expert(lora_A, 0, num_experts), by_expert(lora_B, 1, num_experts)
    return (
        b_YRE.permute(2, 1, 0).flatten(0, 1).contiguous(),
        a_ERX.permute(2, 1, 0).flatten(1, 2).contiguous(),
    )


def _input_first_experts(model: nn.Module) -> dict[str, Experts]:
    """Return the input-first experts by name, without adapters' parts. Stock does not declare this layout to peft."""
    return {
        name.replace(".base_layer", ""): module
        for name, module in model.named_modules()
        if isinstance(module, Experts) and module.is_transposed
    }


def ambiguous_stack(model: nn.Module, parameters: Collection[str]) -> str | None:
    """Return one of these parameters if all are square, since a file would not tell their layout; else None."""
    shapes = {
        key: experts.stack_shape(stack)[1:]
        for name, experts in _input_first_experts(model).items()
        for stack in STACKS
        if (key := f"{name}.{stack}") in parameters
    }
    is_square = all(size_in == size_out for size_in, size_out in shapes.values())
    return next(iter(shapes), None) if is_square else None


def orient_experts(
    model: nn.Module, tensors: dict[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Exchange the experts' factors in `tensors`, by the model's keys, if they were trained on stock.

    `expected` has the keys and shapes that the adapter must have on this model.
    """
    experts = _input_first_experts(model)
    pairs, layouts = {}, set()
    for key in tensors:
        match = _FACTOR.match(key)
        if match is None or match["module"] not in experts or key not in expected:
            continue
        other = f"{match['module']}{match['nested']}.lora_B{match['rest']}"
        if other not in tensors or other not in expected:
            continue
        ours = expected[key][1], expected[other][0]
        sizes = tensors[key].shape[-1], tensors[other].shape[0]
        # Other shapes and ranks are reported later.
        if sizes in (ours, ours[::-1]):
            pairs[key] = (other, experts[match["module"]].num_experts)
            if ours != ours[::-1]:
                layouts.add("ours" if sizes == ours else "stock")
    if len(layouts) > 1:
        raise ValueError(
            "The adapter's experts do not agree: some pairs lora_A, lora_B have A on the input side, some on the "
            "output side. It was not trained on one model."
        )
    if "stock" in layouts:
        for key, (other, num_experts) in pairs.items():
            tensors[key], tensors[other] = exchange_factors(tensors[key], tensors[other], num_experts)
        logger.info("The adapter's experts were trained on stock Llama 4: lora_A and lora_B are exchanged.")
