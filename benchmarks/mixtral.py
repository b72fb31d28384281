"""Cases of Mixtral's mixture block: decoding, prefill, training.

Contestants: transformers' `MixtralSparseMoeBlock` with the experts implementation that its models choose, with its loop
and with its gathered weights; and our block with its defaults.
"""

import itertools
from collections.abc import Callable

import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import llamoe

from . import OURS, REFERENCE
from .block import IN_TURN
from .harness import Case, Cases, Contestant, tolerance_of, tolerance_of_gradients
from .shapes import Setting, Shape
from .shared_weights import draw_weights, made_in

CHOSEN = 2
IMPLEMENTATIONS = {
    REFERENCE: "grouped_mm",
    f"{REFERENCE}, eager": "eager",
    f"{REFERENCE}, batched_mm": "batched_mm",
}
COPIES = 4
MOST_GATHERED = 128
"""Up to this many tokens `batched_mm` is measured: it copies an expert's weights for each choice."""


def blocks(setting: Setting, shape: Shape) -> dict[str, nn.Module]:
    """Blocks with the same parameters, by the name of the contestant."""
    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.expert,
        num_local_experts=shape.experts,
        num_experts_per_tok=CHOSEN,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        vocab_size=shape.vocabulary,
        bos_token_id=None,
        eos_token_id=None,
    )
    with made_in(setting):
        first = MixtralSparseMoeBlock(config)
    draw_weights(first, setting)
    parameters = dict(first.named_parameters())
    found: dict[str, nn.Module] = {}
    for name, implementation in IMPLEMENTATIONS.items():
        its_config = MixtralConfig(**config.to_dict(), experts_implementation=implementation)
        with torch.device("meta"):
            found[name] = MixtralSparseMoeBlock(its_config)
    with torch.device("meta"):
        found[OURS] = llamoe.LlamoeMixtralModel(llamoe.from_stock(config)).layers[0].mlp
    for module in found.values():
        module.load_state_dict(parameters, assign=True)
        module.eval()
    return found


def inference(setting: Setting, shape: Shape, tokens: tuple[int, ...]) -> Cases:
    """Forward passes without gradients: so many tokens of a row.

    Few tokens go through equal blocks in turn, as they do in a model of many layers, whose weights are in no cache.
    """
    copies = [blocks(setting, shape) for _ in range(COPIES)]
    modules = copies[0]
    for count in tokens:
        x = setting.randn(1, count, shape.hidden, offset=count + 1)

        def run(name: str, x: torch.Tensor = x, count: int = count) -> Callable[[], torch.Tensor]:
            turn = itertools.cycle([copy[name] for copy in (copies if count <= IN_TURN else copies[:1])])
            return torch.no_grad()(lambda: next(turn)(x))

        yield Case(
            name=f"T = {count}",
            contestants={name: Contestant(run(name)) for name in modules},
            work=None,
            tolerance=tolerance_of(setting.dtype),
            facts={"phase": "forward", "tokens": count, "experts": shape.experts},
            skipped=_too_much_gathered(count),
        )


def training(setting: Setting, shape: Shape, tokens: int) -> Cases:
    """Forward and backward passes; the gradients are compared."""
    modules = blocks(setting, shape)
    x = setting.randn(1, tokens, shape.hidden).requires_grad_()
    upstream = setting.randn(1, tokens, shape.hidden, offset=3)
    parameters = [parameter for _, parameter in sorted(modules[OURS].named_parameters())]

    def forget() -> None:
        for tensor in (x, *parameters):
            tensor.grad = None

    def step(module: nn.Module) -> Callable[[], list[torch.Tensor]]:
        def run() -> list[torch.Tensor]:
            forget()
            module(x).backward(upstream)
            return [tensor.grad for tensor in (x, *parameters)]

        return run

    yield Case(
        name=f"T = {tokens}, training",
        contestants={name: Contestant(step(module), outputs=list) for name, module in modules.items()},
        work=None,
        tolerance=tolerance_of_gradients(setting.dtype),
        facts={"phase": "training", "tokens": tokens, "experts": shape.experts},
        skipped=_too_much_gathered(tokens),
        before=forget,
    )


def everything(setting: Setting, shape: Shape, tokens: tuple[int, ...], trained: int) -> Cases:
    """Both."""
    yield from inference(setting, shape, tokens)
    yield from training(setting, shape, trained)


def _too_much_gathered(tokens: int) -> dict[str, str]:
    if tokens <= MOST_GATHERED:
        return {}
    return {f"{REFERENCE}, batched_mm": "copies an expert's weights for each choice"}
