"""Forms of attention: for each type of layer in a forward a mask, or what takes its place.

| form | which earlier tokens a token sees | used by |
|---|---|---|
| None | all | all implementations |
| lengths, a dict | those of its packed segment, in a window | FlashAttention |
| `[B, K]` | those in a window that are no padding | FlashAttention |
| `EqualRows` | those of its chunk or window, in rows without padding | `sdpa` |
| a mask | those that `Rule.sees` allows | `sdpa` for all other rows, and all other implementations |

Only the memory of a mask grows with the square of the number of tokens.

Shapes: B batch, H heads, Q query tokens, K key tokens (cached and new), D head_dim.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_torchdynamo_exporting
from transformers.utils.generic import is_flash_attention_requested

from .._private_api import mask_implementations
from ..kernels import are_single_queries, attend_to_single_queries, is_transformed, widened
from .cache import keep_exported_tokens, replace_windows
from .equal_rows import EqualRows, attend_in_equal_rows
from .mask_inputs import MaskInputs
from .varlen import flash_form
from .visibility import Rule


def form_of(inputs: MaskInputs, rule: Rule) -> Any:
    """Return the mask of layers with this rule, or what takes its place."""
    if inputs.is_flash:
        return flash_form(inputs, rule)
    first_query = first_of_equal_rows(inputs, rule) if inputs.implementation == "sdpa" else None
    return real_mask(inputs, rule) if first_query is None else equal_rows(inputs, rule, first_query)


def first_of_equal_rows(inputs: MaskInputs, rule: Rule) -> int | None:
    """Return the first query's position (without chunks, its index) if rows are equal, else None; reads values.

    Rows are equal if they have neither padding nor packed segments and, with chunks, all begin at the same position.
    """
    if not inputs.reads_values or inputs.padding_mask is not None:
        return None
    if rule.chunk_size is not None:
        return inputs.first_position
    return inputs.query_offset if inputs.segments is None else None


def equal_rows(inputs: MaskInputs, rule: Rule, first_query: int) -> EqualRows | None:
    """Return the `EqualRows` of a rule; None if that is causal attention over all keys."""
    keys, length = inputs.keys(rule), inputs.query_length
    rows = EqualRows(rule, first_query, first_query - inputs.query_offset + keys.offset, keys.length)
    block, *others = rows.blocks(length)
    is_plain = not others and block.is_plain and block.keys == slice(0, keys.length)
    # Without a mask the module's `is_causal` decides. As in transformers, K equal to the window is always causal.
    return None if is_plain and (length == 1 or keys.length != rule.local_size) else rows


def real_mask(inputs: MaskInputs, rule: Rule) -> Any:
    """Return the mask that the attention implementation takes: `[B, 1, Q, K]`, or a BlockMask for flex attention.

    Returns:
        None for an implementation without a mask function (vLLM and others mask by themselves), and if the mask
        function detects causal attention over all keys.
    """
    if inputs.implementation not in mask_implementations():
        return None
    keys, groups = inputs.keys(rule), inputs.groups(rule)
    return ALL_MASK_ATTENTION_FUNCTIONS[inputs.implementation](
        batch_size=inputs.batch_size,
        q_length=inputs.query_length,
        kv_length=keys.length,
        q_offset=inputs.query_offset,
        kv_offset=keys.offset,
        mask_function=rule.sees(groups, inputs.query_offset, keys),
        attention_mask=inputs.padding_mask if keys.ring is None else inputs.is_real(keys.ring),
        allow_is_causal_skip=_can_be_plain(inputs, rule),
        dtype=inputs.inputs_embeds.dtype,
        config=inputs.config,
        use_vmap=False,
        device=inputs.device,
        local_size=rule.local_size,
    )


def _can_be_plain(inputs: MaskInputs, rule: Rule) -> bool:
    """Return True if the mask function may return None when it detects causal attention over all keys."""
    if inputs.segments is not None or (inputs.is_static and inputs.query_length == 1) or is_transformed():
        return False
    if rule.local_size is not None:
        return inputs.position_ids is None and inputs.keys(rule).ring is None
    return inputs.padding_mask is None or not inputs.reads_values


def attention_masks(inputs: MaskInputs) -> dict[str, Any]:
    """Return the mask, or what takes its place, for each type of layer in a forward.

    Returns:
        the masks by type of layer. A dict from an earlier call (`generate` prepares it for compiled decoding) is
        returned unchanged; a 4-D mask of the caller is used for every type.

    Raises:
        ValueError: positions that contradict the cache, or chunks or windows while processes share a row's tokens.
    """
    mask = inputs.attention_mask
    if isinstance(mask, dict):
        return mask
    rules = inputs.rules
    is_local = any(rule.local_size is not None for rule in rules.values())
    if is_local and is_torchdynamo_exporting():
        keep_exported_tokens(inputs.past_key_values, inputs.position_ids)
    if mask is not None and len(mask.shape) == 4:
        if inputs.implementation == "sdpa" and isinstance(mask, BlockMask):
            mask = create_mask(mask.mask_mod, *mask.shape, device=inputs.device)
        if inputs.implementation == "eager" and mask.dtype is torch.bool:
            # This implementation adds the mask to the scores, so it must be floats.
            dtype = inputs.inputs_embeds.dtype
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return dict.fromkeys(rules, mask)
    if is_local:
        _refuse_split_rows(inputs.implementation)
    if not getattr(inputs.config, "is_causal", True) and not inputs.is_flash:
        return _bidirectional_masks(inputs)
    # Not for FlashAttention: its window counts keys in memory, where `RingLayer` changes their order.
    replace_windows(inputs.past_key_values, with_rings=not inputs.is_flash)
    return {layer_type: form_of(inputs, rule) for layer_type, rule in rules.items()}


def _bidirectional_masks(inputs: MaskInputs) -> dict[str, Any]:
    """Return the masks of bidirectional attention; chunked layers stay causal, as in transformers."""
    config = copy.copy(inputs.config)
    config._attn_implementation = inputs.implementation
    arguments = {
        "config": config,
        "inputs_embeds": inputs.inputs_embeds,
        "attention_mask": inputs.attention_mask,
        "position_ids": inputs.position_ids,
        "cache": inputs.past_key_values,
    }
    return {kind: LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[kind](**arguments) for kind in inputs.rules}


def _refuse_split_rows(implementation: str) -> None:
    """Raise a `ValueError` if DeepSpeed's sequence parallelism has replaced the attention implementation."""
    attend = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if getattr(attend, "__module__", "").startswith("deepspeed.runtime.sequence_parallel"):
        raise ValueError(
            "Processes that share the tokens of a row (sequence parallelism, sp_size) do not see where chunks and "
            "windows begin, so layers with chunked or sliding attention cannot be shared so. Train without it, or a "
            "model whose layers all see the whole row (attention_chunk_size=None, sliding_window=None)."
        )


def attend_in_form(
    attend: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    form: Any,
    position_ids: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `attend`, an attention function of transformers' interface, with what `form_of` returns.

    `query` is `[B, H, Q, D]`; `key` and `value` are `[B, H / groups, K, D]`; `kwargs` are for `attend`. Returns the
    output `[B, Q, H, D]`, and the attention weights if `attend` returns them, else None.

    Raises:
        ValueError: the cache returned another number of keys than its `get_mask_sizes` did.
    """
    if attend is sdpa_attention_forward:
        attend = _attend_by_sdpa
    attend = widened(attend, query)
    if isinstance(form, dict):
        form, kwargs = None, {**kwargs, **form}
    if isinstance(form, EqualRows):
        # `EqualRows` are always causal, whatever `is_causal` of the module or of the arguments says.
        attend = partial(attend, module, position_ids=None, **{**kwargs, "is_causal": True})
        return attend_in_equal_rows(attend, query, key, value, form), None
    config: Any = module.config
    implementation = config._attn_implementation
    if is_flash_attention_requested(requested_attention_implementation=implementation):
        # With positions the function would search for packed rows in every layer; `MaskInputs` has found them already.
        position_ids = None
    output, weights = attend(module, query, key, value, form, position_ids=position_ids, **kwargs)
    # On a GPU flex attention returns log-sum-exp values, not weights.
    return output, None if implementation == "flex_attention" else weights


def _attend_by_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute transformers' `sdpa`; for one query per row, without a copy of keys for each head that shares them."""
    if are_single_queries(query, attention_mask, dropout, **kwargs):
        return attend_to_single_queries(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
