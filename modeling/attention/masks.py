"""A real mask, which transformers' mask interface makes from what `visibility` says: the function `Rule.sees`.

Shapes: B batch, Q query tokens, K key tokens (cached and new).
"""

from typing import Any

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_bidirectional_mask
from transformers.utils import is_torchdynamo_compiling

from .._compat import CACHE
from .._private_api import mask_implementations
from ..kernels import is_readable
from .mask_inputs import MaskInputs
from .visibility import Rule


def real_mask(inputs: MaskInputs, rule: Rule) -> Any:
    """Make the mask that the attention implementation takes: `[B, 1, Q, K]`, or a BlockMask for flex attention.

    Returns:
        None for an implementation without a mask function (vLLM and others mask by themselves), and where the mask
        function finds plain causal attention.
    """
    if inputs.implementation not in mask_implementations():
        return None
    if not getattr(inputs.config, "is_causal", True) and not rule.is_local:
        return create_bidirectional_mask(
            inputs.config, inputs.inputs_embeds, inputs.attention_mask, **{CACHE: inputs.past_key_values}
        )
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
    if inputs.segments is not None or (inputs.is_static and inputs.query_length == 1):
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
