"""Rules of which tokens see each other in each type of layer: groups, chunk borders and sliding windows.

A token sees another token of its row if both are real, both are in the same group, and the other is not later and, in
sliding layers, less than W earlier. A group is a packed segment; in chunked layers it is a chunk of positions in a
segment. Masks, and what takes their place (`forms`), all apply this rule.

Chunks depend on positions. A window counts indices along the row, padding included, as in transformers.

Shapes: B batch, Q query tokens, K key tokens (cached and new), T new tokens, C tokens of a chunk, W tokens of a window.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import causal_mask_function

from ...configuration.errors import ConfigurationError
from .cache import Keys

# For each type of layer, the config's fields that give the fields of `Rule`.
RULES: dict[str, dict[str, str]] = {
    "full_attention": {},
    "chunked_attention": {"chunk_size": "attention_chunk_size"},
    "sliding_attention": {"window": "sliding_window"},
}


class Rule(NamedTuple):
    """The limits on which earlier tokens of its row a token sees.

    Attributes:
        chunk_size: tokens of a chunk; None: no chunks.
        window: number of tokens that a token sees: itself and those right before it; None: no window.
    """

    chunk_size: int | None = None
    window: int | None = None

    @property
    def local_size(self) -> int | None:
        """The maximum number of tokens that a token sees; a cache may forget older ones. None: all."""
        return self.chunk_size or self.window

    def sees(
        self, groups: tuple[torch.Tensor, torch.Tensor] | None, query_offset: int | torch.Tensor, keys: Keys
    ) -> Callable[..., Any]:
        """Return a mask function of transformers' interface: True where a query sees a key, apart from padding.

        Args:
            groups: number of the group of each query `[B, Q]` and each key `[B, K]`; None if a row is a single group.
            query_offset: index of the first query along the row.
            keys: indices of the keys along the row.
        """
        if groups is None and self.window is None:
            # Plain causal attention, as keys are in row order: other libraries may recognise transformers' function.
            return causal_mask_function
        window = self.window

        def visible(row, head, query, key):
            index = key if keys.ring is None else keys.ring[key]
            seen = index <= query
            if window is not None:
                seen = seen & (index > query - window)
            if groups is not None:
                seen = seen & (groups[0][row, query - query_offset] == groups[1][row, key - keys.offset])
            return seen

        return visible


def rules_of(config: PreTrainedConfig) -> dict[str, Rule]:
    """Return the rule of each layer type in a decoder's config.

    Raises:
        ConfigurationError: a chunked or sliding type without its size; it would silently become full attention.
    """
    rules = {}
    for layer_type in dict.fromkeys(config.attention_types()):
        sizes = {field: getattr(config, name) for field, name in RULES[layer_type].items()}
        if None in sizes.values():
            name = "".join(RULES[layer_type].values())
            raise ConfigurationError(
                f'{name} = None, but layer_types asks for {layer_type!r}. Set layer_types, too: "full_attention" '
                "for these layers."
            )
        rules[layer_type] = Rule(**sizes)
    return rules
