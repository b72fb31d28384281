"""Make experts and rows for them, and compute their outputs in float64, written out as the reference."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from support.models import make_asymmetric, stock_mixtral_config, stock_text_config
from torch.nn import functional as F

import llamoe
from llamoe.modeling.moe import Experts, OutputFirstExperts

# torch's grouped product refuses the odd sizes, which are no multiples of 16 bytes.
SIZES = {
    "odd": dict(hidden_size=70, intermediate_size=51),
    "aligned": dict(hidden_size=64, intermediate_size=48),
}


def make_experts(sizes="odd", dtype=torch.float32, num_experts=5, is_output_first=False):
    """Make experts with stacks `[E, in, out]` or, if output-first, `[E, out, in]`.

    `sizes` is a key of `SIZES`, or a dictionary as its values.
    """
    sizes = SIZES[sizes] if isinstance(sizes, str) else sizes
    stock = stock_mixtral_config if is_output_first else stock_text_config
    config = llamoe.from_stock(stock(num_local_experts=num_experts, **sizes))
    return make_asymmetric((OutputFirstExperts if is_output_first else Experts)(config)).to(dtype)


def make_rows(experts, num_tokens, top_k, dtype=torch.float32, past_the_end=False):
    """Draw tokens `[T, H]`, expert ids `[T, k]`, some beyond the last expert if asked, and weights `[T, k]`."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_size, _ = experts.sizes_of("down_proj")
    x = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    ids = torch.randint(0, experts.num_experts + 2 * past_the_end, (num_tokens, top_k), generator=generator)
    weights = torch.rand(num_tokens, top_k, generator=generator).to(dtype)
    return x, ids, weights


def by_hand(experts, x, ids, weights):
    """Compute the experts' weighted outputs `[T, H]` in float64, one token and expert at a time."""
    gate_up, down = (
        [m.double() for m in experts.stack(name).matrices()] for name in ("gate_up_proj", "down_proj")
    )
    out = []
    for row, chosen, factors in zip(x.double(), ids.tolist(), weights.double(), strict=True):
        terms = [torch.zeros_like(row)]
        for expert, factor in zip(chosen, factors, strict=True):
            if expert < experts.num_experts:
                gate, up = (row @ gate_up[expert]).chunk(2)
                terms.append(factor * ((F.silu(gate) * up) @ down[expert]))
        out.append(torch.stack(terms).sum(0))
    return torch.stack(out) if out else x.double()


@contextmanager
def forced(way):
    """Let all experts multiply by `way` (see `Experts.way`), whatever their sizes and device."""
    with patch.object(Experts, "way", lambda *_: way):
        yield
