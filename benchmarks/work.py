"""The least that a case has to read and to compute: what the roofline is made of.

Every weight that is needed is read once, inputs and outputs move once; of a mixture only the experts that were hit.
Products alone are counted, two operations for each multiplication and addition.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .shapes import Shape


@dataclass(frozen=True)
class Work:
    """What has to be moved and computed."""

    nbytes: float
    flops: float


def of_block(shape: Shape, tokens: int, hit: int, itemsize: int) -> Work:
    """A mixture block's forward pass.

    Args:
        shape: its sizes.
        tokens: number of tokens.
        hit: number of distinct experts that they are sent to.
        itemsize: bytes of a number.
    """
    expert = 3 * shape.hidden * shape.expert
    router = shape.experts * shape.hidden
    numbers = (hit + 1) * expert + router + 2 * tokens * shape.hidden
    return Work(numbers * itemsize, 2 * tokens * (2 * expert + router))


def of_training(forward: Work, frozen_share: float = 0.0) -> Work:
    """A forward and a backward pass: two more products for each one, one more where weights are frozen.

    Args:
        forward: of the forward pass.
        frozen_share: of the products, those with weights that get no gradient.
    """
    passes = 3 - frozen_share
    return Work(passes * forward.nbytes, passes * forward.flops)


def of_decoder(model: nn.Module, batch: int, tokens: int, past: int, hit: list[int], chosen: int = 1) -> Work:
    """A decoder's forward pass with a head over all positions.

    Args:
        model: the decoder; stock or ours.
        batch: number of rows.
        tokens: new tokens a row.
        past: cached tokens a row.
        hit: for each mixture layer the number of distinct experts that were chosen.
        chosen: experts a token.
    """
    config = model.config
    stacks = [module for module in model.modules() if getattr(module, "down_proj", None) is not None]
    stacks = [module for module in stacks if isinstance(module.down_proj, nn.Parameter)]
    inside = {id(parameter) for module in stacks for parameter in module.parameters()}
    inside.add(id(model.get_input_embeddings().weight))  # looked up, not multiplied
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
