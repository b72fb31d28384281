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
    """Choices of all routers of a model, pass by pass; what `trace_experts` gives.

    A pass is one call of the model: the prompt, then each generated token. Tensors stay on the layers' devices until
    they are read.
    """

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        # Layer to weights and choices, pass by pass.
        self._passes: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []

    def record(self, layer: int, scores: torch.Tensor, experts: torch.Tensor) -> None:
        """Note the choices of a layer. The first layer's begin a pass.

        Args:
            layer: number among the mixture layers.
            scores: `[T, K]`.
            experts: `[T, K]`.
        """
        if layer == 0:
            self._passes.append({})
        # What checkpointing computes again in a backward pass is known already.
        self._passes[-1].setdefault(layer, (scores, experts))

    @property
    def num_passes(self) -> int:
        """Passes that every mixture layer has taken part in; those that failed half-way are left out."""
        return len(self._complete())

    def experts(self, first: int = 0) -> torch.Tensor:
        """The chosen experts, best first, int64 `[L, T, K]` on the CPU.

        T are the rows of the passes one behind the other: of one row in a batch its tokens in their order, of several
        rows `batch * length` of each pass.

        Args:
            first: pass to begin with; -1 is the last one.

        Raises:
            ValueError: nothing was traced.
        """
        return self._join(1, first)

    def scores(self, first: int = 0) -> torch.Tensor:
        """The weights of the chosen experts, as the layers use them, float32 `[L, T, K]` on the CPU; as `experts`."""
        return self._join(0, first).float()

    def _complete(self) -> list[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        return [recorded for recorded in self._passes if len(recorded) == self.num_layers]

    def _join(self, which: int, first: int) -> torch.Tensor:
        passes = self._complete()[first:]
        if not passes:
            raise ValueError("Nothing was traced: run the model inside of the `with` block.")
        return torch.stack(
            [
                torch.cat([recorded[layer][which].cpu() for recorded in passes])
                for layer in range(self.num_layers)
            ]
        )


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

    Raises:
        ValueError: a model without routers.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        raise ValueError(f"{type(model).__name__} has no experts to trace: none of its layers is a mixture.")
    trace = ExpertTrace(len(routers))

    def recorder(layer: int) -> Any:
        return lambda _module, _args, output: trace.record(layer, output[1].detach(), output[2])

    hooks = [router.register_forward_hook(recorder(layer)) for layer, router in enumerate(routers)]
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()
