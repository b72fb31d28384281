"""A record of which experts compute which tokens while a model runs or generates.

Shapes: L mixture layers, T tokens, K experts a token, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .layer import Router


class ExpertTrace:
    """The choices of all routers of a model in each forward pass, as recorded by `trace_experts`.

    `generate` runs a forward pass for the prompt, then one for each new token. Tensors stay on the layers' devices
    until they are read.
    """

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        # For each forward pass, by the number of a mixture layer, scores and choices.
        self._passes: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []

    def record(self, layer: int, scores_TK: torch.Tensor, experts_TK: torch.Tensor) -> None:
        """Record the choices of a mixture layer; the first layer begins a new forward pass."""
        if layer == 0:
            self._passes.append({})
        # Gradient checkpointing computes layers again, from the last to the first. So its first layer comes last, and
        # begins a pass without other layers, which `complete` leaves out.
        self._passes[-1].setdefault(layer, (scores_TK, experts_TK))

    def complete(self) -> list[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Return scores and choices by layer, for each forward pass through all mixture layers."""
        return [choices for choices in self._passes if len(choices) == self.num_layers]

    def experts(self) -> torch.Tensor:
        """Return the chosen experts, best first, int64 `[L, T, K]` on the CPU.

        T concatenates the `batch * length` tokens of all forward passes: for a batch of one row, its tokens in order.
        """
        return self._join(1)

    def scores(self) -> torch.Tensor:
        """Return the factors by which layers multiply the chosen experts, float32 `[L, T, K]` on the CPU."""
        return self._join(0).float()

    def _join(self, which: int) -> torch.Tensor:
        passes, layers = self.complete(), range(self.num_layers)
        return torch.stack([torch.cat([it[layer][which].cpu() for it in passes]) for layer in layers])


@contextmanager
def trace_experts(model: nn.Module) -> Iterator[ExpertTrace]:
    """Record the experts of every token while the block runs.

        with llamoe.trace_experts(model) as trace:
            model.generate(**inputs)
        trace.experts()  # [mixture layers, tokens, experts a token]

    The last token of an answer is generated, but no model computes it, so it has no experts. Compiled models are not
    traced: call the model that was compiled.

    Args:
        model: a llamoe mixture, possibly wrapped by peft or accelerate.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    trace = ExpertTrace(len(routers))

    def recorder(layer: int) -> Any:
        return lambda _module, _args, output: trace.record(layer, output[1].detach(), output[2])

    hooks = [router.register_forward_hook(recorder(layer)) for layer, router in enumerate(routers)]
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()
