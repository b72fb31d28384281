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
        self._of_layers: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(num_layers)]

    @property
    def num_passes(self) -> int:
        """Passes that every mixture layer has taken part in."""
        return min(map(len, self._of_layers))

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

    def _join(self, which: int, first: int) -> torch.Tensor:
        passes = self.num_passes
        if not passes:
            raise ValueError("Nothing was traced: run the model inside of the `with` block.")
        return torch.stack(
            [torch.cat([both[which].cpu() for both in layer[:passes][first:]]) for layer in self._of_layers]
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

    def recorder(of_layer: list) -> Any:
        return lambda _module, _args, output: of_layer.append((output[1].detach(), output[2]))

    hooks = [
        router.register_forward_hook(recorder(of_layer))
        for router, of_layer in zip(routers, trace._of_layers, strict=True)
    ]
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()
