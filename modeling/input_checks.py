"""Checks that refuse a model's invalid inputs before anything is computed.

Each error says what was given and what was expected. Where reading values (of token ids, say) would synchronise with
a GPU, only tensors on the CPU are checked.
"""

from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig
from transformers.utils import is_torchdynamo_compiling, logging

from ..configuration.checks import fail
from .attention import cached_length, check_cache, without_padding_positions
from .kernels import is_readable

logger = logging.get_logger("llamoe")

_INTEGERS = (torch.int32, torch.int64)


def check_padding_id(config: PreTrainedConfig) -> None:
    """Raise a `ConfigurationError` for a padding token for which torch's embedding has no row; -1 is the last one."""
    padding, size = config.pad_token_id, config.vocab_size
    if padding is not None and not -size <= padding < size:
        problem = f"is not a token of a vocabulary of {size}"
        fail(config, "pad_token_id", padding, problem, f"below {size}, or None")


def check_tensors(**inputs: Any) -> None:
    """Raise a `ValueError` for an input that is neither a tensor nor None: a list, say, or an array of NumPy."""
    for name, value in inputs.items():
        if value is None or isinstance(value, torch.Tensor):
            continue
        remedy = 'torch.tensor(...), or return_tensors="pt" of the tokenizer or processor'
        if isinstance(value, Mapping):
            remedy = "its entries by name, as in generate(**inputs)"
        raise ValueError(f"{name} is a {type(value).__name__}; expected: a tensor. Give {remedy}.")


def check_tokens(
    config: PreTrainedConfig, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
) -> torch.Tensor:
    """Check token ids, or the embeddings given instead.

    Args:
        input_ids: must be `[B, T]` integers.
        inputs_embeds: must be `[B, T, hidden_size]`, floating.

    Returns:
        the one that is given.

    Raises:
        ValueError: both or none are given, or one is not a tensor, or has the wrong shape or dtype.
    """
    check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds)
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither" if input_ids is None else "both"
        raise ValueError(f"Give exactly one of input_ids and inputs_embeds; got {given}.")
    sizes = "with one row and one token or more"
    if inputs_embeds is not None:
        is_floating = inputs_embeds.is_floating_point()
        fits = inputs_embeds.ndim == 3 and inputs_embeds.shape[-1] == config.hidden_size
        if not (fits and is_floating) or 0 in inputs_embeds.shape:
            wanted = f"floating of shape [batch, tokens, {config.hidden_size}], {sizes}"
            _fail("inputs_embeds", inputs_embeds, wanted)
        return inputs_embeds
    if input_ids.ndim != 2 or 0 in input_ids.shape or input_ids.dtype not in _INTEGERS:
        _fail("input_ids", input_ids, f"int64 or int32 of shape [batch, tokens], {sizes}")
    return cast(torch.Tensor, input_ids)


def embed(embedding: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """`embedding(input_ids)`, `[B, T, hidden_size]`.

    Raises:
        ValueError: a token for which there is no row (on the CPU; a GPU ends in an assertion of its kernel).
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


def check_inputs(
    config: PreTrainedConfig,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: Any,
    position_ids: torch.Tensor | None,
    past_key_values: Cache | None,
) -> None:
    """Check tokens or embeddings, as `check_tokens` does, and what accompanies them.

    Args:
        config, input_ids, inputs_embeds: as in `check_tokens`.
        attention_mask: must be `[B, cached + T]`, or 4-D, or a dict that the library made.
        position_ids: must be `[B or 1, T]`, not negative for real tokens.

    Raises:
        ValueError: both or none of tokens and embeddings, another shape or dtype, a negative position, or a cache that
            forgets tokens which a layer needs.
    """
    batch_size, num_tokens = check_tokens(config, input_ids, inputs_embeds).shape[:2]
    check_cache(config, num_tokens, past_key_values)
    if isinstance(attention_mask, (list, tuple)):
        check_tensors(attention_mask=attention_mask)
    is_tensor = isinstance(attention_mask, torch.Tensor)
    if is_tensor and attention_mask.ndim == 4 and attention_mask.dtype in _INTEGERS:
        _fail(
            "attention_mask",
            attention_mask,
            "a 4-D mask of bool, true where seen, or floats added to the scores",
        )
    if is_tensor and attention_mask.ndim != 4:
        has_fixed_length = getattr(past_key_values, "is_compileable", False)
        cached = 0 if has_fixed_length else cached_length(past_key_values)
        expected = (batch_size, cached + num_tokens)
        shape = tuple(attention_mask.shape)
        # A mask for a static cache may be longer than what is written so far.
        fits = shape == expected or (has_fixed_length and len(shape) == 2 and shape[0] == batch_size)
        if not fits or shape[1] < num_tokens:
            _fail(
                "attention_mask",
                attention_mask,
                f"of shape {list(expected)}: batch, and {cached} cached + {num_tokens} new tokens (or a 4-D mask)",
            )
    if position_ids is None:
        return
    # Only where it is shown: a text of sizes makes them constants of a compiled graph.
    wanted = "shape [{} or 1, {}]".format
    if not isinstance(position_ids, torch.Tensor):
        raise ValueError(
            f"position_ids is a {type(position_ids).__name__}; expected: integers in a tensor of "
            f"{wanted(batch_size, num_tokens)}."
        )
    shapes = ((1, num_tokens), (batch_size, num_tokens))
    if position_ids.dtype not in _INTEGERS or tuple(position_ids.shape) not in shapes:
        _fail("position_ids", position_ids, f"int64 or int32 of {wanted(batch_size, num_tokens)}")
    if position_ids.numel() and is_readable(position_ids) and int(position_ids.min()) < 0:
        _check_negative_positions(attention_mask, position_ids, past_key_values)


def _check_negative_positions(
    attention_mask: Any, position_ids: torch.Tensor, past_key_values: Cache | None
) -> None:
    """Refuse negative positions unless a 2-D mask hides them; other masks are not read."""
    past_length = cached_length(past_key_values)
    for known in (attention_mask, past_length):
        is_known = known is None or isinstance(known, int)
        if not is_known and not (isinstance(known, torch.Tensor) and is_readable(known)):
            return
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            return
        position_ids = without_padding_positions(position_ids, attention_mask, past_length)
    negative = (position_ids < 0).nonzero()
    if len(negative):
        row, column = negative[0].tolist()
        raise ValueError(
            f"position_ids is {position_ids[row, column].item()} at row {row}, token {column}, which no "
            "attention_mask hides; expected: 0 or more. Number each row's real tokens from 0, and give padding "
            "zeros in attention_mask."
        )


def check_labels(labels: torch.Tensor | None, tokens: torch.Tensor, num_labels: int | None = None) -> None:
    """Raise a `ValueError` for labels not of shape `[B, T]`, or a class beyond `num_labels` (None: no classes).

    `tokens` are the labels' `input_ids` `[B, T]` or `inputs_embeds` `[B, T, hidden_size]`.
    """
    if labels is None:
        return
    check_tensors(labels=labels)
    if labels.shape != tokens.shape[:2]:
        _fail("labels", labels, f"of shape {list(tokens.shape[:2])}, one for each token")
    if num_labels is not None:
        _check_classes(labels, num_labels)


def check_next_tokens(config: PreTrainedConfig, labels: torch.Tensor, ignored: int = -100) -> None:
    """Check that each label of `[..., T]` that counts is a token; where it is `ignored`, no loss is wanted.

    The first label of each row is no next token of any other and may be anything.

    Raises:
        ValueError: there is no such token (on the CPU; a loss on a GPU ends in an assertion of its kernel).
    """
    if not is_readable(labels):
        return
    wrong = labels[..., 1:]
    wrong = wrong[(wrong != ignored) & ((wrong < 0) | (wrong >= config.vocab_size))]
    if wrong.numel():
        raise ValueError(
            f"labels contain {wrong[0].item()}, which is not a token of a vocabulary of {config.vocab_size}; expected: "
            f"0 to {config.vocab_size - 1}, or {ignored} where no loss is wanted."
        )


def check_padding_token(config: PreTrainedConfig, batch_size: int) -> None:
    """Raise a `ValueError` for several sequences without a padding token, which marks a sequence's end."""
    if config.pad_token_id is None and batch_size != 1:
        raise ValueError(
            "Cannot handle batch sizes > 1 if no padding token is defined: the class of a sequence is read at its last "
            f"token that is not config.pad_token_id, which is None, and there are {batch_size} sequences. Set "
            "model.config.pad_token_id = tokenizer.pad_token_id (where the tokenizer has none: tokenizer.pad_token = "
            "tokenizer.eos_token first), or give one sequence at a time."
        )


def check_class_labels(config: PreTrainedConfig, labels: torch.Tensor | None, batch_size: int) -> None:
    """Check the labels of whole sequences.

    Args:
        config: with `num_labels` and `problem_type`; if that is None, transformers infers it from the labels.
        labels: must be `[B]` or `[B, 1]`; for several labels at once or several numbers `[B, num_labels]`.

    Raises:
        ValueError: another shape or dtype, or a class that does not exist.
    """
    if labels is None:
        return
    check_tensors(labels=labels)
    num_labels, problem = config.num_labels, config.problem_type
    is_integer, is_one_each = labels.dtype in _INTEGERS, labels.shape in ((batch_size,), (batch_size, 1))
    if problem is None and num_labels > 1:
        problem = "single_label_classification" if is_integer else "multi_label_classification"
    if problem == "single_label_classification":
        if not (is_one_each and is_integer):
            _fail("labels", labels, f"int64 of shape [{batch_size}], one class for each sequence")
        _check_classes(labels, num_labels)
    elif num_labels == 1:
        if not is_one_each:
            _fail("labels", labels, f"floating of shape [{batch_size}], one number for each sequence")
    elif labels.shape != (batch_size, num_labels) or not labels.is_floating_point():
        wanted = f"floating of shape [{batch_size}, {num_labels}] for problem_type {problem!r}"
        _fail("labels", labels, wanted)


def check_answers(start: torch.Tensor | None, end: torch.Tensor | None, batch_size: int) -> None:
    """Raise a `ValueError` for only one of an answer's two positions, or one not of shape `[B]` or `[B, 1]`."""
    if (start is None) != (end is None):
        missing = "start_positions" if start is None else "end_positions"
        raise ValueError(f"Give start_positions and end_positions, or neither; got no {missing}.")
    check_tensors(start_positions=start, end_positions=end)
    for name, positions in (("start_positions", start), ("end_positions", end)):
        if positions is not None and positions.shape not in ((batch_size,), (batch_size, 1)):
            _fail(name, positions, f"of shape [{batch_size}], one for each row")


def _check_classes(labels: torch.Tensor, num_labels: int) -> None:
    if not labels.numel() or not is_readable(labels):
        return
    wrong = labels[(labels != -100) & ((labels < 0) | (labels >= num_labels))]
    if wrong.numel():
        raise ValueError(
            f"labels contain {wrong[0].item()}, but the model has num_labels = {num_labels}: load it with "
            "num_labels=, or number the classes from 0 (-100: no loss)."
        )


def leave_out_attentions(config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """Warn once, as transformers does, that an implementation returns no attention weights; their tuple stays empty.

    The option is removed from `kwargs`, a forward pass's: the implementation's function would warn again.
    """
    wanted = kwargs["output_attentions"] if "output_attentions" in kwargs else config.output_attentions
    implementation = config._attn_implementation or "eager"
    if wanted and (implementation in ("sdpa", "flex_attention") or "flash" in implementation):
        kwargs.pop("output_attentions", None)
        if not is_torchdynamo_compiling():
            logger.warning_once(
                f"output_attentions=True: {implementation} attention forms no weights, so that attentions are empty. "
                'Use eager: model.set_attn_implementation("eager"), or attn_implementation="eager" when loading.'
            )


def _fail(name: str, tensor: torch.Tensor, expected: str) -> NoReturn:
    raise ValueError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; expected: {expected}.")
