"""Records which experts compute which tokens, while a model runs or generates.

Shapes: L mixture layers, T tokens, K experts a token, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .layer import Router


class ExpertTrace:
    """Choices of all routers of a model, call by call; what `trace_experts` gives.

    Generating calls the model for the prompt, then for each new token. Tensors stay on the layers' devices until they
    are read.
    """

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        # Layer to scores and choices, of each call.
        self._calls: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []

    def record(self, layer: int, scores_TK: torch.Tensor, experts_TK: torch.Tensor) -> None:
        """Note the choices of a mixture layer, of which the first begins a call."""
        if layer == 0:
            self._calls.append({})
        # Checkpointing computes layers again, the first one last: its call is one that stays incomplete.
        self._calls[-1].setdefault(layer, (scores_TK, experts_TK))

    def complete(self) -> list[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Return scores and choices by layer, of each call in which every mixture layer took part."""
        return [call for call in self._calls if len(call) == self.num_layers]

    def experts(self) -> torch.Tensor:
        """Return the chosen experts, best first, int64 `[L, T, K]` on the CPU.

        T are the rows of the calls one behind the other: of one row in a batch its tokens in their order, of several
        rows `batch * length` of each call.
        """
        return self._join(1)

    def scores(self) -> torch.Tensor:
        """Return the weights of the chosen experts, as the layers use them, float32 `[L, T, K]`; as `experts`."""
        return self._join(0).float()

    def _join(self, which: int) -> torch.Tensor:
        calls, layers = self.complete(), range(self.num_layers)
        return torch.stack([torch.cat([call[layer][which].cpu() for call in calls]) for layer in layers])


@contextmanager
def trace_experts(model: nn.Module) -> Iterator[ExpertTrace]:
    """Record the experts of every token while the block runs.

        with llamoe.trace_experts(model) as trace:
            model.generate(**inputs)
        trace.experts()  # [mixture layers, tokens, experts a token]

    The last token of an answer is chosen, but not computed, so it has no experts. Compiled models are not traced: call
    the model itself.

    Args:
        model: one of ours with a mixture, or what peft or accelerate made of it.
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
