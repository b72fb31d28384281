"""The forms of attention: which one a layer takes in a pass, what makes it, and what attends in it.

Plain causal attention has the form None. FlashAttention takes variable-length sequences in place of masks. torch's
`scaled_dot_product_attention` (`sdpa`) takes rows without padding as equal chunks or in blocks of a window, known from
sizes alone, and other rows as a folded batch once a mask would be large. So no mask grows with the square of the
tokens. All other implementations take masks, which transformers' mask interface makes of the function `Rule.sees`.

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
from transformers.utils import is_torchdynamo_compiling, is_torchdynamo_exporting
from transformers.utils.generic import is_flash_attention_requested

from .._compat import CACHE
from .._private_api import mask_implementations
from ..kernels import is_readable, is_tracing, is_transformed, widened
from .by_sdpa import attend_by_sdpa
from .cache import keep_exported_tokens, make_rings
from .chunked_sdpa import Fold, attend_in_equal_rows, attend_in_fold, folded_batch
from .mask_inputs import MaskInputs
from .varlen import Sequences, attend_in_sequences, equal_sequences, sequences
from .visibility import EqualRows, Rule

# Elements per row of the largest mask that full layers take under `sdpa`; above it, tokens are gathered into sequences.
# Gathering is faster from some 300 tokens on, but waits for lengths on a GPU, which small passes do not repay.
LARGEST_FULL_MASK = 2**18


def brings_lengths(inputs: MaskInputs, rule: Rule) -> bool:
    """Whether the implementation gets the lengths of packed sequences from the caller, which full layers need alone."""
    return inputs.has_lengths and rule.chunk_size is None


def sizes_decide(inputs: MaskInputs, rule: Rule) -> bool:
    """Whether no row is padded or packed, and positions do not matter or are indices."""
    if isinstance(inputs.query_offset, torch.Tensor) or inputs.padding_mask is not None:
        return False
    if inputs.position_ids is None:
        return True
    return inputs.segments is None if rule.chunk_size is None else inputs.first_position is not None


def rows_are_equal(inputs: MaskInputs, rule: Rule) -> bool:
    """Whether no row is padded or packed, and all begin at one position; reads values."""
    if rule.window is not None:
        # Blocks of a window are laid out anew for every length, which a graph is not. Positions do not matter.
        return inputs.reads_values and inputs.padding_mask is None and inputs.segments is None
    if inputs.query_length == 1 and not rule.is_local:
        # It sees all keys, wherever it stands.
        return inputs.reads_values and inputs.padding_mask is None
    return inputs.first_position is not None


def mask_is_large(inputs: MaskInputs, rule: Rule) -> bool:
    """Whether a mask costs more than sequences, which need groups that are not interrupted."""
    if inputs.query_length == 1 or is_tracing(inputs.inputs_embeds):
        return False
    size = inputs.query_length * inputs.keys(rule).length
    if rule.chunk_size is None:
        # Sequences leave padding out, which a window counts where it is interrupted by it.
        return size > LARGEST_FULL_MASK and (rule.window is None or not inputs.padding_interrupts)
    return size > rule.chunk_size**2 and (inputs.segments is not None or not inputs.positions_fall)


def always(inputs: MaskInputs, rule: Rule) -> bool:
    """True."""
    return True


def plain(inputs: MaskInputs, rule: Rule) -> None:
    """None, which is plain causal attention."""


def equal_rows(inputs: MaskInputs, rule: Rule) -> EqualRows | None:
    """Rows cut from sizes alone; None where causal attention is right that aligns the first query and key."""
    rows, length = inputs.equal_rows(rule), inputs.query_length
    # A module's `is_causal` counts where stock makes no mask. It makes one for as many tokens as a window has.
    is_free = length == 1 or (rows.begun == 0 and rows.key_length != rule.local_size)
    return None if is_free and rows.is_plain(length) else rows


def real_mask(inputs: MaskInputs, rule: Rule) -> Any:
    """Make the mask that the attention implementation takes: `[B, 1, Q, K]`, or a BlockMask for flex attention.

    Returns:
        None for an implementation without a mask function (vLLM and others mask by themselves), and where the mask
        function finds plain causal attention.
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
        **({"local_size": rule.local_size} if rule.is_local else {}),
    )


def _can_be_plain(inputs: MaskInputs, rule: Rule) -> bool:
    """Whether the mask function may look for plain causal attention, which needs no mask."""
    if inputs.segments is not None or (inputs.is_static and inputs.query_length == 1) or is_transformed():
        return False
    if not rule.is_local:
        return inputs.padding_mask is None or not inputs.reads_values
    if inputs.keys(rule).ring is not None:
        return False
    positions = inputs.position_ids
    if is_torchdynamo_compiling():
        return positions is None
    if inputs.implementation == "sdpa":
        # Its plain rows are `EqualRows`.
        return False
    # Rows that begin late reach their first chunk border early. A GPU is not waited for to save a mask.
    return positions is None or (
        is_readable(positions) and not bool((positions[:, 0] > inputs.query_offset).any())
    )


# The forms that an implementation takes, as (where it fits, what makes it). Of those that fit, the first is made.
FORMS = {
    "flash": (
        (brings_lengths, plain),
        (sizes_decide, equal_sequences),
        (always, sequences),
    ),
    "sdpa": (
        (rows_are_equal, equal_rows),
        (mask_is_large, folded_batch),
        (always, real_mask),
    ),
    "another": ((always, real_mask),),
}

# What attends in a form; in plain causal attention or with a mask, the implementation itself does.
ATTEND = {
    EqualRows: attend_in_equal_rows,
    Sequences: attend_in_sequences,
    Fold: attend_in_fold,
}


def attention_masks(inputs: MaskInputs) -> dict[str, Any]:
    """Build the form, a mask among others, that each type of layer takes in a pass.

    Returns:
        the forms by type of layer. A dict that an earlier call made (`generate` prepares it for compiled decoding) is
        returned as it is, and a ready 4-D mask for every type.

    Raises:
        ValueError: a 4-D mask for flash attention, an unknown type of layer, positions that contradict the cache, or
            local layers where processes share the tokens of a row.
    """
    mask = inputs.attention_mask
    if isinstance(mask, dict):
        return mask
    rules = inputs.rules
    is_local = any(rule.is_local for rule in rules.values())
    if is_local and is_torchdynamo_exporting():
        keep_exported_tokens(inputs.past_key_values, inputs.position_ids)
    is_flash = is_flash_attention_requested(requested_attention_implementation=inputs.implementation)
    if mask is not None and len(mask.shape) == 4:
        if is_flash:
            raise ValueError(
                f"{inputs.implementation} takes an attention_mask of two axes, [batch, tokens] with zeros on padding; "
                f"got {list(mask.shape)}. For a mask of four axes set another implementation: "
                'model.set_attn_implementation("sdpa").'
            )
        if inputs.implementation == "sdpa" and isinstance(mask, BlockMask):
            mask = create_mask(mask.mask_mod, *mask.shape, device=inputs.device)
        if inputs.implementation == "eager" and mask.dtype is torch.bool:
            # It adds masks to the scores.
            dtype = inputs.inputs_embeds.dtype
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return dict.fromkeys(rules, mask)
    if is_local:
        _refuse_split_rows(inputs.implementation)
    if not getattr(inputs.config, "is_causal", True) and not is_flash:
        return _bidirectional_masks(inputs)
    if is_local:
        make_rings(inputs.past_key_values)
    forms = FORMS["flash" if is_flash else "sdpa" if inputs.implementation == "sdpa" else "another"]
    return {
        layer_type: next(make(inputs, rule) for fits, make in forms if fits(inputs, rule))
        for layer_type, rule in rules.items()
    }


def _bidirectional_masks(inputs: MaskInputs) -> dict[str, Any]:
    """The masks of a pass in which tokens see later ones, too: all but those of chunks, which stay causal in stock."""
    config = inputs.config
    if config._attn_implementation != inputs.implementation:
        config = copy.copy(config)
        config._attn_implementation = inputs.implementation
    given = {
        "config": config,
        "inputs_embeds": inputs.inputs_embeds,
        "attention_mask": inputs.attention_mask,
        "position_ids": inputs.position_ids,
        CACHE: inputs.past_key_values,
    }
    return {kind: LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[kind](**given) for kind in inputs.rules}


def _refuse_split_rows(implementation: str) -> None:
    """Refuse local layers if DeepSpeed's sequence parallelism has replaced the attention implementation."""
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
    """Run `attend`, of transformers' attention interface, on tokens that see each other as `form` says.

    `query` is `[B, H, Q, D]`; `key` and `value` are `[B, H / groups, K, D]`; `kwargs` are for `attend`. Returns the
    output `[B, Q, H, D]`, and the attention weights where `attend` returns them, else None.

    Raises:
        ValueError: the cache returned another number of keys than it had announced.
    """
    if attend is sdpa_attention_forward:
        attend = attend_by_sdpa
    attend_in = ATTEND.get(type(form))
    if attend_in is not None:
        if not isinstance(form, Sequences):
            # These stand for causal masks, which decide alone, whatever a module or an argument says.
            kwargs["is_causal"] = True
        attend = partial(widened(attend, query), module, position_ids=None, **kwargs)
        return attend_in(attend, query, key, value, form), None
    config: Any = module.config
    implementation = config._attn_implementation
    if is_flash_attention_requested(requested_attention_implementation=implementation):
        # flash attention would look for packed rows in every layer; `MaskInputs` has found them already.
        position_ids = None
    attend = widened(attend, query)
    output, weights = attend(module, query, key, value, form, position_ids=position_ids, **kwargs)
    # On a GPU flex attention returns log-sum-exp values, not weights.
    return output, None if implementation == "flex_attention" else weights
