"""Chunked and sliding attention by torch's `scaled_dot_product_attention` (SDPA) for rows without padding.

Queries are cut into blocks. A block attends only to the keys that at least one of its queries sees. A chunk without
cached tokens is one block of causal attention; other blocks have a mask each. So memory grows with the number of
tokens, not with its square, and keys before a window take no time.

Shapes: B batch, H query heads, G key/value heads, Q query tokens, K key tokens (cached and new), D head_dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .visibility import Rule

# Maximum number of queries in a block. Larger blocks are no faster: this size keeps every core of a GPU busy.
BLOCK = 1024
SMALLEST_BLOCK = 16


def window_block(window: int) -> int:
    """Return the number of queries in a block for a window of `window` tokens."""
    return min(BLOCK, max(window, SMALLEST_BLOCK))


class Block(NamedTuple):
    """Queries of a row, and the keys that at least one of them sees.

    Attributes:
        queries: slice of Q.
        keys: slice of K; its last key belongs to the token of the last query.
        window: number of tokens that a query sees; None: all keys of the slice up to its own.
    """

    queries: slice
    keys: slice
    window: int | None

    @property
    def is_plain(self) -> bool:
        """True if the block needs no mask: it has a single query, or is causal attention of as many keys as queries."""
        num_queries = self.queries.stop - self.queries.start
        num_keys = self.keys.stop - self.keys.start
        return num_queries == 1 or (num_queries == num_keys and self.window is None)

    def mask(self, device: torch.device) -> torch.Tensor:
        """Return the mask `[1, 1, queries, keys]` bool, True where a query sees a key."""
        # Count both indices back from the end: the last query and the last key are the same token.
        key = torch.arange(self.keys.start - self.keys.stop, 0, device=device)
        query = torch.arange(self.queries.start - self.queries.stop, 0, device=device)[:, None]
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        return seen[None, None]


class EqualRows(NamedTuple):
    """Rows without padding that all begin at the same position, so that sizes determine their blocks.

    Attributes:
        rule: the layer's rule.
        first_query: position of the first query.
        first_key: position of the first key; the other keys follow. Keys after the last query are ignored.
        key_length: K, the number of keys.
    """

    rule: Rule
    first_query: int
    first_key: int
    key_length: int

    def contiguous(self) -> "EqualRows":
        """Return self: `generate` calls this method on every mask."""
        return self

    def blocks(self, query_length: int) -> list[Block]:
        """Cut `query_length` queries into blocks, in order."""
        chunk_size, window = self.rule
        num_cached = self.first_query - self.first_key
        if window is not None and num_cached + query_length <= window:
            window = None
        blocks, begin = [], 0
        while begin < query_length:
            position, end = self.first_query + begin, query_length
            first = self.first_key
            if chunk_size is not None:
                first = max(first, position - position % chunk_size)
                end = min(end, begin + chunk_size - position % chunk_size)
            if window is not None:
                first = max(first, position - window + 1)
                end = min(end, begin + window_block(window))
            if first < position:
                end = min(end, begin + BLOCK)
            keys = slice(first - self.first_key, num_cached + end)
            blocks.append(Block(slice(begin, end), keys, window))
            begin = end
        return blocks


def attend_in_equal_rows(
    attend: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: EqualRows
) -> torch.Tensor:
    """Compute attention block by block, in all rows at once.

    Args:
        attend: SDPA as a function of queries, keys, values, and a mask or None for causal attention.
        query: `[B, H, Q, D]`.
        key: `[B, G, K, D]`.
        value: `[B, G, K, D]`.
        rows: gives the blocks; its `key_length` is K.

    Returns:
        `[B, Q, H, D]`.

    Raises:
        ValueError: the cache returned another number of keys than its `get_mask_sizes` did.
    """
    if key.shape[2] != rows.key_length:
        # Without this check slices would silently take wrong keys.
        raise ValueError(
            f"A layer has {key.shape[2]} keys, cached and new, but should have {rows.key_length}: the layers of "
            "past_key_values hold differing numbers of tokens, or update returns other keys than get_mask_sizes says."
        )
    outputs = []
    for block in rows.blocks(query.shape[2]):
        mask = None if block.is_plain else block.mask(query.device)
        keys = key[:, :, block.keys], value[:, :, block.keys]
        outputs.append(attend(query[:, :, block.queries], *keys, mask)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
