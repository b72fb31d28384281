"""Inputs that are sent to chosen experts, by the same router on both sides.

A token is noise plus a step in the direction of its expert's row of the router's weight. The step is so long that no
rounding decides: every contestant, in every dtype, chooses what was drawn here.
"""

import torch

STEP = 8.0
"""Length of the step, in deviations of the noise; the best of 128 other experts gains about three by chance."""

ROW_NORM = 0.25
"""Norm of a row of the router: chosen logits lie around 2, scores around 0.88."""


def set_router(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Draw a router `[experts, hidden]` with rows of `ROW_NORM`."""
    rows = torch.randn(weight.shape, generator=generator, device=weight.device)
    with torch.no_grad():
        weight.copy_(ROW_NORM * rows / rows.norm(dim=-1, keepdim=True))


def draw_experts(count: int, experts: int, skew: str, generator: torch.Generator) -> torch.Tensor:
    """Draw an expert for each token.

    Args:
        count: number of tokens.
        experts: number of experts.
        skew: "uniform", or "zipf": the k-th most wanted expert is drawn in proportion to 1 / k.
        generator: of the random numbers.

    Returns:
        `[count]` int64.
    """
    device = generator.device
    if skew == "uniform":
        return torch.randint(0, experts, (count,), generator=generator, device=device)
    weights = 1 / torch.arange(1, experts + 1, device=device)
    ranks = torch.multinomial(weights, count, replacement=True, generator=generator)
    return torch.randperm(experts, generator=generator, device=device)[ranks]


def steer(x: torch.Tensor, router: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Move each row of `x` `[tokens, hidden]` towards its expert in `chosen` `[tokens]`."""
    directions = router.detach().float() / router.detach().float().norm(dim=-1, keepdim=True)
    return (x.float() + STEP * directions[chosen]).to(x.dtype)


def shares(chosen: torch.Tensor) -> dict[str, float]:
    """How many experts were hit, and the largest share of the tokens that one got."""
    counts = torch.bincount(chosen)
    return {"distinct": int((counts > 0).sum()), "largest_share": counts.max().item() / chosen.numel()}
