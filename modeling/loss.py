"""The loss of a language model head by pieces of its tokens, which never holds the logits of all of them.

The logits of 4,096 tokens over a vocabulary of 202,048 take 3.3 GB in float32, and the plain loss and its gradient hold
several tensors of that size. Here the head is called for some tokens at a time, and again in backward. This costs one
more product with the head's weight: four in place of three.

The head is called as a module, so that adapters, packed weights, hooks and parallel plans serve as they do for logits.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import is_torchdynamo_compiling, logging

from .kernels import is_transformed

logger = logging.get_logger(__name__)

PIECE_LOGITS = 1 << 25
"""Logits of a piece: 128 MiB in float32, of which backward holds about four."""


def must_skip_logits(
    wanted: bool | None,
    by_config: bool | str,
    is_training: bool,
    labels: torch.Tensor | None,
    loss_function: Callable,
    logits_to_keep: int | torch.Tensor,
) -> bool:
    """Return whether a forward computes the loss alone.

    Args:
        wanted: the argument `skip_logits`; None leaves it to the config.
        by_config: `config.skip_logits`.
        is_training: whether the model is in `train()`.
        labels: the labels; without them there is no loss.
        loss_function: the model's loss; only the usual one can be computed by pieces.
        logits_to_keep: if it is not 0, the caller needs logits.

    Raises:
        ValueError: `wanted` is True, but the model has another loss, which reads the logits.
    """
    is_usual = loss_function is ForCausalLMLoss
    if wanted is not None:
        if wanted and not is_usual:
            name = getattr(loss_function, "__name__", type(loss_function).__name__)
            raise ValueError(
                f"skip_logits=True, but the model's loss_function is {name}, which reads the logits. Leave it out, or "
                "set model.loss_function back to transformers' ForCausalLMLoss."
            )
        return wanted and labels is not None
    keeps_all = isinstance(logits_to_keep, int) and not logits_to_keep
    if labels is None or not is_usual or not keeps_all:
        return False
    if by_config == "always" and not is_training and not is_torchdynamo_compiling():
        logger.warning_once(
            "config.skip_logits = 'always': evaluation with labels computes the loss alone, too, and output.logits "
            "is None. For compute_metrics, or whatever else reads logits, set it to True, which means training."
        )
    return by_config == "always" or (bool(by_config) and is_training)


def loss_without_logits(
    head: nn.Module,
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Compute transformers' `ForCausalLMLoss` of `head(hidden_states)` by pieces; equal except for rounding.

    Args:
        head: maps `[B, t, hidden_size]` to `[B, t, V]`; called for some tokens of all rows at a time.
        hidden_states: `[B, T, hidden_size]`.
        labels: `[B, T]`; each is compared with what the token before it predicts.
        vocab_size: V, by which the size of pieces is chosen.
        num_items_in_batch: what the sum of losses is divided by; None: the number of labels that count.
        ignore_index: label without a loss.
        shift_labels: `[B, T]`, labels that are shifted already, instead of `labels`.

    Returns:
        scalar, float32.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    batch_size, num_tokens = hidden_states.shape[:2]
    labels = shift_labels.reshape(batch_size, num_tokens)

    def sum_of(some: torch.Tensor, their_labels: torch.Tensor) -> torch.Tensor:
        logits = head(some).float().flatten(0, 1)
        targets = their_labels.reshape(-1).to(logits.device)
        return nn.functional.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")

    step = max(PIECE_LOGITS // max(batch_size * vocab_size, 1), 1)
    pieces = zip(hidden_states.split(step, 1), labels.split(step, 1), strict=True)
    # Transforms of torch.func do not support checkpointing, which needs hooks of saved tensors.
    if torch.is_grad_enabled() and not is_transformed():
        sums = [checkpoint(sum_of, *piece, use_reentrant=False) for piece in pieces]
    else:
        sums = [sum_of(*piece) for piece in pieces]
    total = torch.stack(sums).sum()
    count = (labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)
