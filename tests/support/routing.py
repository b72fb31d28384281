"""Make both sides of a comparison in bfloat16, float16 or fewer bits choose the same experts.

Rounding can change the experts of a token, differently on each processor; its logits then cannot be compared. With the
same experts on both sides everything but the choice is compared. Other tests compare the choice, on equal inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from llamoe.modeling.moe import Router


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield a list to which each call of a router, stock's or ours, appends its experts, `[T, K]`, best first."""
    chosen = []

    def note(router, inputs, output):
        if torch.is_floating_point(output[-1]):
            # Stock's Llama 4 returns scores and logits of all experts; the scores of experts not chosen are zero.
            chosen.append(output[0].topk(router.top_k, dim=-1).indices)
        else:
            chosen.append(output[-1])

    handles = [
        module.register_forward_hook(note)
        for module in model.modules()
        if type(module).__name__.endswith("Router")
    ]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def routed_to(model: nn.Module, choices: list[torch.Tensor]) -> Iterator[None]:
    """Make our routers choose these experts, one `[T, K]` a mixture, for forwards of T tokens; keep their scores."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router, chosen_TK in zip(routers, choices, strict=True):
        # Bonuses exceed all differences of logits, and fall along K to keep the order.
        bonus_TK = 1e4 - 1e2 * torch.arange(chosen_TK.shape[1]).expand(chosen_TK.shape)
        bias_TE = torch.zeros(len(chosen_TK), router.num_experts)
        router.balancing_bias = bias_TE.scatter(1, chosen_TK, bonus_TK)
    try:
        yield
    finally:
        for router in routers:
            router.balancing_bias = None
