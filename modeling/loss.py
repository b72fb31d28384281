"""The loss of a language model head, computed for a piece of the tokens at a time to save memory.

The logits of 4,096 tokens over a vocabulary of 202,048 take 3.3 GB in float32, and the plain loss and its gradient hold
several tensors of that size. Here the head computes the logits of one piece after the other, and computes them again in
backward. So its weight is multiplied four times in place of three.

The head is called as a module, so that adapters, packed weights, hooks and parallel plans work as for all logits.

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
"""Number of logits in a piece: 128 MiB in float32. Backward holds about four tensors of this size."""


def must_skip_logits(
    wanted: bool | None,
    by_config: bool | str,
    is_training: bool,
    labels: torch.Tensor | None,
    loss_function: Callable,
    logits_to_keep: int | torch.Tensor,
) -> bool:
    """Return True if a forward should compute the loss, but return no logits.

    Args:
        wanted: the argument `skip_logits`; None leaves the choice to the config.
        by_config: `config.skip_logits`: True means in training, "always" also in evaluation.
        is_training: the model is in training mode.
        labels: the labels; without labels there is no loss.
        loss_function: the model's loss; only transformers' `ForCausalLMLoss` can be computed by pieces.
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
            "config.skip_logits = 'always': in evaluation with labels, too, only the loss is computed, and "
            "output.logits is None. If compute_metrics or other code reads logits, set it to True: in training only."
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
    """Compute transformers' `ForCausalLMLoss` of `head(hidden_states)` by pieces; the result differs by rounding only.

    Args:
        head: maps `[B, t, hidden_size]` to `[B, t, V]`, for t tokens of all rows at a time.
        hidden_states: `[B, T, hidden_size]`.
        labels: `[B, T]`; each label is compared with what the token before it predicts.
        vocab_size: V, from which the size of pieces follows.
        num_items_in_batch: the number by which the sum of losses is divided; None: the number of labels with a loss.
        ignore_index: label of tokens without a loss.
        shift_labels: `[B, T]`, labels that are shifted already, in place of `labels`.

    Returns:
        scalar, float32.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    batch_size, num_tokens = hidden_states.shape[:2]
    labels = shift_labels.reshape(batch_size, num_tokens)

    def sum_of_losses(states_piece: torch.Tensor, labels_piece: torch.Tensor) -> torch.Tensor:
        logits = head(states_piece).float().flatten(0, 1)
        targets = labels_piece.reshape(-1).to(logits.device)
        return nn.functional.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")

    step = max(PIECE_LOGITS // max(batch_size * vocab_size, 1), 1)
    pieces = zip(hidden_states.split(step, 1), labels.split(step, 1), strict=True)
    # Under transforms of torch.func there is no checkpointing: they do not support its hooks on saved tensors.
    if torch.is_grad_enabled() and not is_transformed():
        sums = [checkpoint(sum_of_losses, *piece, use_reentrant=False) for piece in pieces]
    else:
        sums = [sum_of_losses(*piece) for piece in pieces]
    total = torch.stack(sums).sum()
    count = (labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)
