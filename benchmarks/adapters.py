"""Cases of LoRA on the experts' stacks: training steps of a mixture block whose own weights are frozen, and decoding.

The reference is peft's own way, which adds the update to the weights of all experts; ours adds it to their products.
Both are around our block or decoder, with the same weights and factors. "frozen" is that without adapters.
"""

import copy
from collections.abc import Callable

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import Llama4ForCausalLM

import llamoe
from llamoe.modeling.adapters.expert_lora import ParamWrapper
from llamoe.modeling.moe import Experts

from . import OURS, REFERENCE
from .block import tokens_for
from .harness import Case, Cases, Contestant, tolerance_of, tolerance_of_gradients
from .models import PAST, decode_step
from .shapes import Setting, Shape
from .shared_weights import block_pair, model_pair, text_config

FROZEN = "frozen"
"""A step that trains nothing of the block: what is left if an adapter costs nothing."""
RANK = 16


def training(setting: Setting, shape: Shape, counts: tuple[int, ...]) -> Cases:
    """Forward and backward passes for rows of so many tokens; gradients of inputs and factors are compared."""
    stock, ours = block_pair(setting, shape, ())
    block = ours[OURS].requires_grad_(False)
    blocks = {name: _with_adapters(block, name == OURS, setting) for name in (REFERENCE, OURS)}
    for tokens in counts:
        x, routing = tokens_for(setting, shape, stock, tokens, "uniform")
        x = x[None].requires_grad_()
        upstream = setting.randn(*x.shape, offset=3)
        contestants = {name: Contestant(_step(each, x, upstream), list) for name, each in blocks.items()}
        contestants[FROZEN] = Contestant(_step(block, x, upstream), outputs=None)
        yield Case(
            name=f"T = {tokens}",
            contestants=contestants,
            work=None,
            tolerance=tolerance_of_gradients(setting.dtype),
            facts={"phase": "lora", "tokens": tokens, "experts": shape.experts, "rank": RANK, **routing},
            before=lambda x=x: _forget_gradients(x, *blocks.values()),
        )


def decoding(setting: Setting, shape: Shape, layers: int, batches: tuple[int, ...]) -> Cases:
    """One step of a decoder behind a short prompt, for batches of these sizes."""
    config = text_config(shape, layers)
    _, model = model_pair(setting, Llama4ForCausalLM, llamoe.LlamoeForCausalLM, config)
    decoders = {name: _with_adapters(model, name == OURS, setting) for name in (REFERENCE, OURS)}
    for batch in batches:
        prompt, ids = (setting.tokens(batch, count, model.vocab_size, offset=count) for count in (PAST, 1))
        contestants = {
            name: Contestant(torch.no_grad()(decode_step(each, prompt, ids)))
            for name, each in decoders.items()
        }
        contestants[FROZEN] = Contestant(torch.no_grad()(decode_step(model, prompt, ids)), outputs=None)
        yield Case(
            name=f"decode, B = {batch}",
            contestants=contestants,
            work=None,
            tolerance=tolerance_of(setting.dtype, layers),
            facts={"phase": "lora decode", "tokens": batch, "experts": shape.experts, "rank": RANK},
        )


def _with_adapters(block: nn.Module, in_products: bool, setting: Setting) -> nn.Module:
    """A copy of a block or decoder around the same weights, with random factors on the experts' stacks."""
    shared = {id(weight): weight for weight in block.parameters()}
    config = LoraConfig(
        r=RANK, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    # A choice of classes is left as it is; else ours would be taken for all our models.
    config._register_custom_module({Experts: ParamWrapper} if in_products else {nn.Identity: nn.Identity})
    adapted = inject_adapter_in_model(config, copy.deepcopy(block, shared))
    with torch.no_grad():
        for number, factor in enumerate(_factors(adapted)):
            factor.copy_(0.02 * setting.randn(*factor.shape, offset=10 + number))
    return adapted


def _factors(block: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in block.parameters() if weight.requires_grad]


def _step(block: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    def run():
        _forget_gradients(x, block)
        output = block(x)
        (output[0] if isinstance(output, tuple) else output).view_as(x).backward(upstream)
        return [x.grad, *(factor.grad for factor in _factors(block))]

    return run


def _forget_gradients(x: torch.Tensor, *blocks: nn.Module) -> None:
    x.grad = None
    for block in blocks:
        block.zero_grad(set_to_none=True)
