"""The same experts on both sides of a comparison in 16 bits or fewer.

There rounding alone sends some tokens to other experts, on each processor others, and those tokens' logits have nothing
in common. What is compared is everything else: the choice itself is compared on equal inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from llamoe.modeling.moe import Router


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield a list to which each router's pass, of stock's classes or ours, adds its experts, `[T, K]`, best first."""
    chosen = []

    def note(router, inputs, output):
        if torch.is_floating_point(output[-1]):
            # Stock's Llama 4 returns the scores of all experts, zeros for those that were not chosen, and the logits.
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
    """Let the routers of ours choose these experts, `[T, K]` a mixture; scores stay the router's own.

    For passes of T tokens, more than a compiled kernel takes: it would choose by itself.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router, chosen_TK in zip(routers, choices, strict=True):
        # Far more than logits differ by, and less for each next one, so that the order is kept, too.
        bonus_TK = 1e4 - 1e2 * torch.arange(chosen_TK.shape[1]).expand(chosen_TK.shape)
        bias_TE = torch.zeros(len(chosen_TK), router.num_experts)
        router.balancing_bias = bias_TE.scatter(1, chosen_TK, bonus_TK)
    try:
        yield
    finally:
        for router in routers:
            router.balancing_bias = None
