"""Checks of inputs that would otherwise give wrong results in silence, or a failed assertion in a GPU kernel.

Values, such as token ids, are checked on the CPU alone: to read them from a GPU would make the CPU wait for it.

Shapes: B batch, T new tokens.
"""

from typing import Any

import torch
from torch import nn
from transformers import Cache

from .attention import cached_length
from .kernels import is_readable


def embed(embedding: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of `input_ids` `[B, T]`, `[B, T, hidden_size]`.

    Raises:
        ValueError: an id is not in the vocabulary (checked on the CPU).
    """
    try:
        return embedding(input_ids)
    except IndexError as error:
        lowest, highest = input_ids.min().item(), input_ids.max().item()
        raise ValueError(
            f"input_ids contain {lowest if lowest < 0 else highest}, but the model has vocab_size = "
            f"{len(embedding.weight)}: use the tokenizer of this checkpoint."
        ) from error


def check_mask(
    attention_mask: Any, batch_size: int, num_tokens: int, past_key_values: Cache | None = None
) -> None:
    """Raise a `ValueError` for a mask of a wrong shape or dtype, which would hide the wrong tokens.

    Args:
        attention_mask: `[B, cached tokens + T]`, or a bool or floating tensor with four axes. Dicts are not checked.
        batch_size: B.
        num_tokens: T.
        past_key_values: the cache. For a static one, any length of a 2-D mask from T on is valid.
    """
    if not isinstance(attention_mask, torch.Tensor):
        return
    dtype, shape = attention_mask.dtype, tuple(attention_mask.shape)
    if len(shape) == 4 and dtype not in (torch.int32, torch.int64):
        return
    is_static = getattr(past_key_values, "is_compileable", False)
    cached = 0 if is_static else cached_length(past_key_values)
    length = shape[1] if is_static and len(shape) == 2 else cached + num_tokens
    if shape != (batch_size, length) or length < num_tokens:
        raise ValueError(
            f"attention_mask is {dtype} of shape {list(shape)}; expected: {[batch_size, cached + num_tokens]}, batch, "
            f"and {cached} cached + {num_tokens} new tokens; or a 4-D mask of bool, true where tokens are seen, or of "
            "floats that are added to the scores."
        )


def check_labels(labels: torch.Tensor, tokens: torch.Tensor) -> None:
    """Raise a `ValueError` unless `labels` are `[B, T]`, one for each token: a loss would pair them with wrong logits.

    `tokens` are `input_ids` `[B, T]`, or `inputs_embeds` `[B, T, hidden_size]`.
    """
    if labels.shape != tokens.shape[:2]:
        raise ValueError(
            f"labels are of shape {list(labels.shape)}; expected: {list(tokens.shape[:2])}, one for each token."
        )


def check_classes(labels: torch.Tensor, num_classes: int, ignored: int = -100) -> None:
    """Raise a `ValueError` for a label that is negative or not below `num_classes` (checked on the CPU).

    `labels` have any shape; the label `ignored` is allowed.
    """
    if not is_readable(labels):
        return
    wrong = labels[(labels != ignored) & ((labels < 0) | (labels >= num_classes))]
    if wrong.numel():
        raise ValueError(
            f"labels contain {wrong[0].item()}; expected: 0 to {num_classes - 1}, or {ignored} where no loss is wanted."
        )
