"""Checks of inputs that would otherwise give silently wrong results, or a failed assertion in a GPU kernel.

Values (of token ids, say) are read on the CPU only, since reading them would synchronise with a GPU.

Shapes: B batch, T tokens.
"""

from typing import Any

import torch
from torch import nn
from transformers import Cache

from .attention import cached_length
from .kernels import is_readable


def embed(embedding: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Return `embedding(input_ids)`, `[B, T, hidden_size]`.

    Raises:
        ValueError: an id that is not a token (on the CPU).
    """
    try:
        return embedding(input_ids)
    except IndexError as error:
        if not is_readable(input_ids):
            raise
        lowest, highest = input_ids.min().item(), input_ids.max().item()
        raise ValueError(
            f"input_ids contain {lowest if lowest < 0 else highest} where the model has vocab_size = "
            f"{len(embedding.weight)}: use the tokenizer of this checkpoint."
        ) from error


def check_mask(
    attention_mask: Any, batch_size: int, num_tokens: int, past_key_values: Cache | None = None
) -> None:
    """Raise a `ValueError` for a mask of a wrong shape or dtype, which would hide the wrong tokens.

    Args:
        attention_mask: a tensor of at most three axes must be `[B, cached + T]`, one with four axes bool or floating.
        batch_size: B.
        num_tokens: T, the number of new tokens.
        past_key_values: the cache. A mask for a static one may be longer than what is written so far.
    """
    if not isinstance(attention_mask, torch.Tensor):
        return
    dtype, shape = attention_mask.dtype, tuple(attention_mask.shape)
    if len(shape) == 4:
        if dtype in (torch.int32, torch.int64):
            raise ValueError(
                f"attention_mask is {dtype} of shape {list(shape)}; expected: a 4-D mask of bool, true where seen, or "
                "floats added to the scores."
            )
        return
    is_static = getattr(past_key_values, "is_compileable", False)
    cached = 0 if is_static else cached_length(past_key_values)
    fits = len(shape) == 2 and shape[0] == batch_size
    if not (fits and (shape[1] == cached + num_tokens or (is_static and shape[1] >= num_tokens))):
        raise ValueError(
            f"attention_mask is of shape {list(shape)}; expected: {[batch_size, cached + num_tokens]}, batch, and "
            f"{cached} cached + {num_tokens} new tokens (or a 4-D mask)."
        )


def check_labels(labels: torch.Tensor, tokens: torch.Tensor) -> None:
    """Raise a `ValueError` for labels that are not one for each token, which a loss would pair with other logits.

    `tokens` are the `input_ids` `[B, T]` or `inputs_embeds` `[B, T, hidden_size]` of the labels.
    """
    if labels.shape != tokens.shape[:2]:
        raise ValueError(
            f"labels are of shape {list(labels.shape)}; expected: {list(tokens.shape[:2])}, one for each token."
        )


def check_classes(labels: torch.Tensor, num_classes: int, ignored: int = -100) -> None:
    """Raise a `ValueError` for a label that is negative, or not below `num_classes` (on the CPU).

    `labels` have any shape; `ignored` stands where no loss is wanted.
    """
    if not is_readable(labels):
        return
    wrong = labels[(labels != ignored) & ((labels < 0) | (labels >= num_classes))]
    if wrong.numel():
        raise ValueError(
            f"labels contain {wrong[0].item()}; expected: 0 to {num_classes - 1}, or {ignored} where no loss is wanted."
        )
