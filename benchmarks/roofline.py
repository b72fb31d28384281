"""The least that a case must read and compute, for the roofline.

Every needed weight is read once, inputs and outputs are moved once; of a mixture, only experts that were hit. Only
products are counted, two operations for each multiplication and addition.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .shapes import Shape


@dataclass(frozen=True)
class Work:
    """Bytes to move and operations to compute."""

    nbytes: float
    flops: float


def of_block(shape: Shape, tokens: int, hit: int, itemsize: int) -> Work:
    """The work of a mixture block's forward pass.

    Args:
        shape: its sizes.
        tokens: number of tokens.
        hit: number of distinct experts that the tokens are sent to.
        itemsize: bytes of an element.
    """
    expert = 3 * shape.hidden * shape.expert
    router = shape.experts * shape.hidden
    numbers = (hit + 1) * expert + router + 2 * tokens * shape.hidden
    return Work(numbers * itemsize, 2 * tokens * (2 * expert + router))


def of_training(forward: Work, frozen_share: float = 0.0) -> Work:
    """The work of a forward and a backward pass: two more products for each, one more where weights are frozen.

    Args:
        forward: work of the forward pass.
        frozen_share: fraction of the products whose weights get no gradient.
    """
    passes = 3 - frozen_share
    return Work(passes * forward.nbytes, passes * forward.flops)


def of_decoder(model: nn.Module, batch: int, tokens: int, past: int, hit: list[int], chosen: int = 1) -> Work:
    """The work of a decoder's forward pass with a head over all positions.

    Args:
        model: the decoder, stock or ours.
        batch: number of rows.
        tokens: new tokens in a row.
        past: cached tokens in a row.
        hit: for each mixture layer, the number of distinct experts that were chosen.
        chosen: number of experts that a token is sent to.
    """
    config = model.config
    stacks = [module for module in model.modules() if getattr(module, "down_proj", None) is not None]
    stacks = [module for module in stacks if isinstance(module.down_proj, nn.Parameter)]
    inside = {id(parameter) for module in stacks for parameter in module.parameters()}
    # The embedding is looked up, not multiplied.
    inside.add(id(model.get_input_embeddings().weight))
    others = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    experts = [sum(p.numel() for p in module.parameters()) // module.num_experts for module in stacks]
    rows = batch * tokens
    itemsize = next(model.parameters()).element_size()
    seen = batch * sum(past + position + 1 for position in range(tokens))
    layers = config.num_hidden_layers
    attended = 4 * layers * seen * config.num_attention_heads * config.head_dim
    cached = 2 * layers * batch * (past + tokens) * config.num_key_value_heads * config.head_dim
    read = others + sum(count * size for count, size in zip(hit, experts, strict=True))
    multiplied = others + chosen * sum(experts)
    moved = rows * (config.hidden_size + config.vocab_size)
    return Work((read + cached + moved) * itemsize, 2 * rows * multiplied + attended)


@torch.no_grad()
def experts_hit(model: nn.Module, **inputs) -> list[int]:
    """For each mixture layer of a decoder of ours, the number of distinct experts that a pass chooses."""
    logits = model(**inputs, output_router_logits=True).router_logits or ()
    top_k = model.config.num_experts_per_tok
    return [layer.topk(top_k, dim=-1).indices.unique().numel() for layer in logits]
