"""Inputs whose tokens the router sends to chosen experts, the same for all contestants.

A token is noise plus a step along its expert's row of the router's weight. The step is so long that rounding does not
matter: every contestant, in every dtype, chooses the drawn expert.
"""

import torch

STEP = 8.0
"""Length of the step, in standard deviations of the noise; chance gives the best of 128 other experts about three."""

ROW_NORM = 0.25
"""Norm of a router row; chosen logits are then around 2, scores around 0.88."""


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
        skew: "uniform", or "zipf": the k-th most popular expert is drawn in proportion to 1 / k.
        generator: source of random numbers.

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
    """The number of experts hit, and the largest share of tokens that one expert got."""
    counts = torch.bincount(chosen)
    return {"distinct": int((counts > 0).sum()), "largest_share": counts.max().item() / chosen.numel()}
