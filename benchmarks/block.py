"""Cases of the mixture block: prefill, decoding, uneven routing, training.

Contestants: transformers' `Llama4TextMoe`; our block with its defaults; and, as peers, our block with transformers' own
experts implementations. On a device each also runs under `torch.compile`.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from . import REFERENCE, is_of, roofline
from .harness import ROUNDS, Case, Cases, Contestant, tolerance_of, tolerance_of_gradients
from .memory import available_bytes
from .routing import draw_experts, shares, steer
from .shapes import Setting, Shape
from .shared_weights import block_pair

PEERS = ("grouped_mm", "batched_mm")
MANY = 8192
FEW_ROUNDS = 2
"""Least number of rounds for `MANY` tokens or more, which take long on a CPU."""
IN_TURN = 16
"""Up to this many tokens, a pass reads too little to push the weights that it used out of the caches."""
GATHERED = 2**28
"""`batched_mm` copies an expert's weights for each token; a CPU skips it if the copies would exceed this."""


def inference(
    setting: Setting,
    shape: Shape,
    decode: tuple[int, ...],
    prefill: tuple[int, ...],
    skewed: tuple[int, ...],
    copies: int = 1,
) -> Cases:
    """Forward passes without gradients.

    Args:
        setting: device and dtype.
        shape: sizes.
        decode: batch sizes of decoding, one token a row.
        prefill: lengths of one row.
        skewed: numbers of tokens that are also measured with Zipf's routing.
        copies: number of blocks with equal weights at different addresses, which few tokens go through in turn. As in a
            model of many layers, the code is then in the caches and the weights are not.
    """
    pairs = [block_pair(setting, shape, PEERS) for _ in range(copies)]
    stock, ours = pairs[0]
    for tokens, skew, used in _variants(pairs, decode, prefill, skewed):
        x, routing = tokens_for(setting, shape, stock, tokens, skew)
        phase = "decode" if tokens in decode else "prefill"
        x = x.view(tokens, 1, -1) if phase == "decode" else x[None]
        is_repeated = tokens <= IN_TURN and len(used) < len(pairs)
        contestants = {REFERENCE: Contestant(_forward([theirs for theirs, _ in used], x))}
        contestants |= {name: Contestant(_forward([own[name] for _, own in used], x)) for name in ours}
        if tokens in setting.compiled_tokens and skew == "uniform":
            contestants |= _compiled(setting, {REFERENCE: stock, **ours}, x)
        yield Case(
            name=f"{'B' if phase == 'decode' else 'T'} = {tokens}"
            + (", Zipf" if skew == "zipf" else "")
            + (", one layer again and again" if is_repeated else ""),
            contestants=contestants,
            work=roofline.of_block(shape, tokens, routing["distinct"], setting.dtype.itemsize),
            tolerance=tolerance_of(setting.dtype),
            facts={
                "phase": phase,
                "tokens": tokens,
                "experts": shape.experts,
                "routing": skew,
                "repeated": is_repeated,
                **routing,
            },
            skipped=_too_much_gathered(setting, shape, tokens, contestants),
            least=FEW_ROUNDS if setting.device.type == "cpu" and tokens >= MANY else ROUNDS,
        )
        del contestants
        torch.compiler.reset()


def _variants(
    pairs: list, decode: tuple[int, ...], prefill: tuple[int, ...], skewed: tuple[int, ...]
) -> Iterator[tuple[int, str, list]]:
    """Number of tokens, routing, and the pairs of blocks that take turns, for each variant."""
    for tokens in sorted({*decode, *prefill}):
        yield tokens, "uniform", pairs if tokens <= IN_TURN else pairs[:1]
        if tokens == 1 and len(pairs) > 1:
            yield tokens, "uniform", pairs[:1]
    for tokens in skewed:
        yield tokens, "zipf", pairs[:1]


def training(setting: Setting, shape: Shape, tokens: int) -> Cases:
    """Forward and backward passes; the gradients are compared."""
    stock, ours = block_pair(setting, shape, PEERS)
    x, routing = tokens_for(setting, shape, stock, tokens, "uniform")
    x = x[None].requires_grad_()
    upstream = setting.randn(*x.shape, offset=3)

    def step(module: nn.Module) -> Callable[[], list[torch.Tensor]]:
        def run():
            _forget_gradients(stock, x)
            output = module(x)
            (output[0] if isinstance(output, tuple) else output).view_as(x).backward(upstream)
            return [x.grad, *(p.grad for p in stock.parameters() if p.grad is not None)]

        return run

    tolerance = tolerance_of_gradients(setting.dtype)
    forward = roofline.of_block(shape, tokens, routing["distinct"], setting.dtype.itemsize)
    for frozen in (False, True):
        stock.experts.requires_grad_(not frozen)
        contestants = {
            name: Contestant(step(module), outputs=list)
            for name, module in {REFERENCE: stock, **ours}.items()
        }
        yield Case(
            name=f"T = {tokens}, {'experts frozen' if frozen else 'all weights'}",
            contestants=contestants,
            work=roofline.of_training(forward, 0.5 if frozen else 0.0),
            tolerance=tolerance,
            facts={
                "phase": "training",
                "frozen": frozen,
                "tokens": tokens,
                "experts": shape.experts,
                "routing": "uniform",
                **routing,
            },
            skipped=_too_much_gathered(setting, shape, tokens, contestants),
            before=lambda: _forget_gradients(stock, x),
        )
    stock.requires_grad_(True)


def tokens_for(
    setting: Setting, shape: Shape, block: nn.Module, tokens: int, skew: str
) -> tuple[torch.Tensor, dict[str, float]]:
    """Inputs `[tokens, hidden]`, and statistics of their routing."""
    chosen = draw_experts(tokens, shape.experts, skew, setting.generator(tokens))
    noise = setting.randn(tokens, shape.hidden, offset=tokens + 1)
    return steer(noise, block.router.weight, chosen), shares(chosen)


def _forward(modules: list[nn.Module], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    turn = itertools.cycle(modules)

    @torch.no_grad()
    def run() -> torch.Tensor:
        output = next(turn)(x)
        return output[0].view_as(x) if isinstance(output, tuple) else output

    return run


def _forget_gradients(module: nn.Module, x: torch.Tensor) -> None:
    x.grad = None
    module.zero_grad(set_to_none=True)


def _compiled(setting: Setting, modules: dict[str, nn.Module], x: torch.Tensor) -> dict[str, Contestant]:
    contestants = {}
    for mode in setting.compile_modes:
        for name, module in modules.items():
            compiled = torch.compile(module.forward, mode=mode, dynamic=False)

            def run(compiled=compiled) -> torch.Tensor:
                torch.compiler.cudagraph_mark_step_begin()
                output = compiled(x)
                return output[0].view_as(x) if isinstance(output, tuple) else output

            contestants[f"{name}, {mode}"] = Contestant(torch.no_grad()(run), warm_up=3, has_own_pool=True)
    return contestants


def _too_much_gathered(
    setting: Setting, shape: Shape, tokens: int, contestants: dict[str, Contestant]
) -> dict[str, str]:
    expert = 3 * shape.hidden * shape.expert * setting.dtype.itemsize
    if setting.device.type == "cuda":
        limit = available_bytes(setting.device)
    else:
        limit = GATHERED
    if tokens * expert <= limit:
        return {}
    reason = f"copies {tokens * expert / 1e9:.1f} GB of weights, an expert's for each token"
    return {name: reason for name in contestants if is_of(name, "batched_mm")}
