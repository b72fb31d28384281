"""Lengths, padding, positions, packed segments and chunks of a forward, each computed at most once.

The same tokens must give the same logits left-padded, packed or alone. So rotation, temperature and chunks depend on
positions, which count a row's real tokens, and never on the index in a cache.

Properties that read tensor values make the host wait for a GPU; their docstrings say "reads values".

Shapes: B batch, Q query tokens, K key tokens (cached and new), T some tokens, W width of the padding mask, S sequences.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.utils.generic import is_flash_attention_requested

from ..kernels import is_readable, is_tracing
from .cache import Keys, cached_length, keys_of
from .implementation import implementation_on
from .visibility import Rule, rules_of


class fact:
    """A property that is computed once. `functools.cached_property` takes a lock, which torch cannot compile."""

    def __init__(self, work_out: Callable[[Any], Any]):
        self.work_out = work_out
        self.__doc__ = work_out.__doc__

    def __get__(self, owner: Any, _: Any = None) -> Any:
        value = owner.__dict__[self.work_out.__name__] = self.work_out(owner)
        return value


class MaskInputs:
    """The inputs of a forward that decide which tokens see each other, and what follows from them.

    Args:
        config: a decoder's config, with `_attn_implementation` set.
        inputs_embeds: `[B, Q, ...]`; only sizes, dtype and device are read.
        attention_mask: None, `[B, W]` with zeros on padding, a 4-D mask, or a dict of masks by type of layer.
        past_key_values: the cache, before the new tokens are written to it.
        position_ids: `[B or 1, Q]` as the caller gave them; None: they follow from the padding. If positions restart
            within a row, the row is packed, unless there is a mask or a cached token.
        cu_seq_lens: `[S + 1]`, the index at which each packed sequence begins, and the end; only if the attention
            implementation gets it, too.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens: torch.Tensor | None = None,
    ):
        self.config = config
        self.inputs_embeds, self.device = inputs_embeds, inputs_embeds.device
        self.implementation = implementation_on(self.device, config)
        self.is_flash = is_flash_attention_requested(requested_attention_implementation=self.implementation)
        self.batch_size, self.query_length = inputs_embeds.shape[:2]
        self.attention_mask, self.past_key_values = attention_mask, past_key_values
        self.is_static = getattr(past_key_values, "is_compileable", False)
        self.has_lengths = cu_seq_lens is not None
        if position_ids is None and cu_seq_lens is not None:
            index = torch.arange(self.query_length, device=cu_seq_lens.device)
            sequence = torch.searchsorted(cu_seq_lens, index.to(cu_seq_lens.dtype), right=True) - 1
            position_ids = (index - cu_seq_lens[sequence])[None]
        self.position_ids = None if position_ids is None else position_ids.to(self.device)
        self._keys: dict[bool, Keys] = {}

    @fact
    def rules(self) -> dict[str, Rule]:
        """Return the rule of each type of the config's layers."""
        return rules_of(self.config)

    @fact
    def query_offset(self) -> int | torch.Tensor:
        """Return the first query's index along the row, the number of cached tokens; a tensor for static caches."""
        length = cached_length(self.past_key_values)
        # Copy the number: the cache changes it in place before flex attention reads it.
        return length.clone().to(self.device) if isinstance(length, torch.Tensor) else length

    @fact
    def query_index(self) -> torch.Tensor:
        """Return the index along the row of each query, `[Q]`."""
        return torch.arange(self.query_length, device=self.device) + self.query_offset

    def keys(self, rule: Rule) -> Keys:
        """Describe the keys that layers with this rule get from the cache."""
        is_local = rule.local_size is not None
        if is_local not in self._keys:
            self._keys[is_local] = keys_of(self.past_key_values, is_local, self.query_length, self.device)
        return self._keys[is_local]

    @fact
    def reads_values(self) -> bool:
        """Return True if values of masks and positions may be read, to find out if a mask is needed.

        False in a traced graph, which must be right for other values, too, and in steps with a static cache, whose
        masks must keep one shape.
        """
        if not self.is_flash and self.implementation != "sdpa":
            return False
        if isinstance(self.query_offset, torch.Tensor):
            return False
        if self.is_static and (self.query_length == 1 or self.query_offset > 0):
            return False
        # `is_tracing` is slow, since it also queries CUDA; on the CPU `is_readable` is enough.
        return is_readable(self.inputs_embeds) or not is_tracing(self.inputs_embeds)

    @fact
    def padding_mask(self) -> torch.Tensor | None:
        """Return the mask `[B, W]`, False on padding; None without a 2-D mask, or if it was read and has no padding."""
        mask = self.attention_mask
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            return None
        if self.reads_values and bool(mask[:, : self.query_offset + self.query_length].all()):
            return None
        return mask.to(device=self.device, dtype=torch.bool)

    def is_real(self, index: torch.Tensor) -> torch.Tensor:
        """Return True for each index `[T]` along the rows at which there is a token, no padding: `[B, T]` bool."""
        if self.padding_mask is None:
            return (index >= 0).expand(self.batch_size, -1)
        width = self.padding_mask.shape[1]
        return self.padding_mask[:, index.clamp(0, width - 1)] & (index >= 0) & (index < width)

    @fact
    def positions(self) -> torch.Tensor:
        """Return the positions of the new tokens, given or counted from each row's first real token, `[B or 1, Q]`.

        Padding has position 0 if the caller gave positions, or if the highest position decides the frequencies
        (`dynamic` and `longrope` scaling). Otherwise it has transformers' positions: question answering scores it, too.
        """
        positions = self.positions_at(self.query_index) if self.position_ids is None else self.position_ids
        rope_type = self.config.rope_parameters["rope_type"]
        follows_length = "dynamic" in rope_type or rope_type == "longrope"
        if self.padding_mask is None or (self.position_ids is None and not follows_length):
            return positions
        return torch.where(self.is_real(self.query_index), positions, 0)

    @fact
    def first_position(self) -> int | None:
        """Return the first position if all rows count up from it, without padding; else None. Reads values."""
        if self.padding_mask is not None:
            return None
        if self.position_ids is None:
            return self.query_offset
        firsts = self.position_ids - torch.arange(self.query_length, device=self.device)
        lowest, highest = torch.stack(firsts.aminmax()).tolist()
        return lowest if lowest == highest else None

    def counts_at(self, index: torch.Tensor) -> torch.Tensor:
        """Return the number of real tokens of each row up to and including these indices `[T]`, `[B or 1, T]`."""
        if self.padding_mask is None:
            return index[None] + 1
        return self.padding_mask.cumsum(-1)[:, index.clamp(0, self.padding_mask.shape[1] - 1)]

    def positions_at(self, index: torch.Tensor) -> torch.Tensor:
        """Return the positions of the tokens at these indices `[T]` along the rows, cached or new, `[B or 1, T]`.

        If positions of the new tokens are given, cached real tokens are counted back from each row's first new token.
        """
        if self.position_ids is None:
            if self.padding_mask is None:
                return index[None]
            left_padding_B1 = (self.padding_mask.cumsum(-1) == 0).sum(-1, keepdim=True)
            return (index - left_padding_B1).clamp(min=0)
        offset = self.query_offset
        new = self.position_ids[:, (index - offset).clamp(0, self.query_length - 1)]
        if isinstance(offset, int) and offset == 0:
            return new
        before = self.position_ids - self.counts_at(self.query_index)
        if self.padding_mask is None:
            before = before[:, :1]
        else:
            before = before.gather(1, self.is_real(self.query_index).int().argmax(1, keepdim=True))
        # Not below 0: after right padding, `generate` may start at a position lower than the number of earlier tokens.
        return torch.where(index < offset, (self.counts_at(index) + before).clamp(min=0), new)

    @fact
    def segments(self) -> torch.Tensor | None:
        """Return the number of each token's packed segment, `[B or 1, Q]`; None if rows are not packed. Reads values.

        Raises:
            ValueError: packed rows with a static cache, which cannot tell segments apart; checked on the CPU only.
        """
        positions = self.position_ids
        if self.attention_mask is not None or positions is None:
            return None
        if self.is_static:
            if is_readable(positions) and bool((positions.diff(dim=1) != 1).any()):
                raise ValueError(
                    "position_ids restart within a row, as in packed rows, and past_key_values is a cache of fixed "
                    "length, which takes one sequence a row: use DynamicCache(), or none. For padding give an "
                    "attention_mask."
                )
            return None
        if self.query_offset > 0:
            return None
        segments = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
        return segments if is_tracing(positions) or bool(segments[:, -1].any()) else None

    def groups(self, rule: Rule) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the number of the group of each query `[B, Q]` and key `[B, K]`; None if each row is a single group.

        A query sees only keys of its group: a packed segment, a chunk, or a chunk of a segment.
        """
        segments, chunk_size = self.segments, rule.chunk_size
        if segments is not None:
            # Packed rows have no cached keys, so queries and keys have the same groups. A segment has fewer than
            # 2 ** 32 chunks, so each pair of segment and chunk has a number of its own.
            groups = segments if chunk_size is None else segments * 2**32 + self.positions // chunk_size
            groups = groups.expand(self.batch_size, -1)
            return groups, groups
        if chunk_size is None:
            return None
        self._check_cached_padding(rule)
        key_positions = self.positions_at(self.keys(rule).index(self.device))
        chunks = (positions // chunk_size for positions in (self.positions, key_positions))
        of_queries, of_keys = (chunk.expand(self.batch_size, -1) for chunk in chunks)
        return of_queries, of_keys

    def _check_cached_padding(self, rule: Rule) -> None:
        """Raise a `ValueError` if padding between cached tokens hides which chunks they are in; on the CPU only."""
        mask, positions = self.padding_mask, self.position_ids
        if mask is None or positions is None or self.past_key_values is None or not is_readable(mask):
            return
        begin, end = int(self.query_offset), int(self.query_offset) + self.query_length
        # Within the first chunk all tokens are in one group: `generate` may continue there after right padding.
        if max(end, int(positions.max()) + 1) <= rule.chunk_size:
            return
        counts_BW, is_new = mask.cumsum(-1), mask[:, begin:end]
        holes_BT = ((counts_BW > 0) & ~mask)[:, :begin] & is_new.any(1, keepdim=True)
        is_counted = positions == counts_BW[:, begin:end] - 1
        num_lost = max(0, end - self.keys(rule).length)
        if (num_lost and holes_BT[:, num_lost:].any()) or (
            is_new & ~is_counted & holes_BT.any(1, keepdim=True)
        ).any():
            raise ValueError(
                "attention_mask hides tokens between cached ones of a row, whose chunks are not known: either the KV "
                "cache has forgotten tokens that may still be needed, since it keeps the last tokens of each chunked "
                "layer, padding included, or position_ids are not the numbers of real tokens. Leave the hidden tokens "
                "out, or give past_key_values=DynamicCache(), without a config, and position_ids = "
                "attention_mask.cumsum(-1) - 1."
            )


def mask_of_new_tokens(attention_mask: object, num_tokens: int) -> torch.Tensor | None:
    """Return the mask `[B, T]` of the last T tokens, zeros on padding; None if `attention_mask` is not 2-D."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        return attention_mask[:, -num_tokens:]
    return None
