"""The layout of LoRA factors for stacks of experts, and the exchange of factors that were trained on stock Llama 4.

For a stack, peft has the factors of all experts in two matrices:

* A `[E * r, in]`, where the expert is the slowest index;
* B `[out, r * E]`, where the expert is the fastest index.

Llama 4's stacks are input-first, `[E, in, out]`. llamoe's experts tell peft so; transformers' ("stock") do not, so that
peft puts A on the output side and B on the input side. Factors from stock fit here once A and B are exchanged; the
change of the weight stays the same. The shapes of A and B show which layout they have, unless a stack has as many
inputs as outputs. An adapter whose stacks are all so is refused when it is created.

Shapes: E experts, R = r rank, X inputs of A, Y outputs of B.
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
    """Return a view of A (`dim` 0) as `[E, r, X]`, or of B (`dim` 1) as `[Y, r, E]`."""
    return factor.unflatten(dim, (num_experts, -1) if dim == 0 else (-1, num_experts))


def exchange_factors(
    lora_A: torch.Tensor, lora_B: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert factors between stock's layout and ours: `[E * r, X]`, `[Y, r * E]` to `[E * r, Y]`, `[X, r * E]`.

    Each expert's product B·A becomes its transpose.
    """
    a_ERX, b_YRE = by_expert(lora_A, 0, num_experts), by_expert(lora_B, 1, num_experts)
    return (
        b_YRE.permute(2, 1, 0).flatten(0, 1).contiguous(),
        a_ERX.permute(2, 1, 0).flatten(1, 2).contiguous(),
    )


def _input_first_experts(model: nn.Module) -> dict[str, Experts]:
    """Return the experts with input-first stacks, by names without what peft's wrappers add to them."""
    return {
        name.replace(".base_layer", ""): module
        for name, module in model.named_modules()
        if isinstance(module, Experts) and module.is_transposed
    }


def ambiguous_stack(model: nn.Module, parameters: Collection[str]) -> str | None:
    """Return the name of a stack in `parameters` if all there have as many inputs as outputs; else None."""
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
    """Exchange the factors of experts in an adapter that was trained on stock Llama 4.

    Args:
        model: the model with the adapter's layers.
        tensors: the adapter's tensors by the model's keys; changed in place.
        expected: keys and shapes of the adapter's tensors in the model.
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
        # For all other sizes `loading` raises an error later.
        if sizes in (ours, ours[::-1]):
            pairs[key] = (other, experts[match["module"]].num_experts)
            if ours != ours[::-1]:
                layouts.add("ours" if sizes == ours else "stock")
    if len(layouts) > 1:
        raise ValueError(
            "The adapter's experts do not agree: for some stacks lora_A is on the input side, for others on the output "
            "side. Its tensors come from different models."
        )
    if "stock" in layouts:
        for key, (other, num_experts) in pairs.items():
            tensors[key], tensors[other] = exchange_factors(tensors[key], tensors[other], num_experts)
        logger.info("The adapter's experts were trained on stock Llama 4: lora_A and lora_B were exchanged.")
