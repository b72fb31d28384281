"""Compute the bytes of the KV cache from a configuration's fields.

In a chunked or sliding layer transformers' caches keep one token less than a chunk or window has, and the tokens of the
latest forward call. In every other layer they keep all tokens. So after a prompt that is read in one call every layer
keeps all of it until the next call, and a plan must count it.
"""

from .base import LlamoeBaseConfig
from .sizes import count_of


def default_context(config: LlamoeBaseConfig) -> int:
    """Return the default number of tokens of a planned cache: 8192, or the model's limit if lower."""
    return min(8192, config.get_text_config().max_position_embeddings)


def cache_tokens(config: LlamoeBaseConfig, context: int, piece: int = 1) -> list[int]:
    """Return the largest number of tokens in each layer's cache.

    Args:
        config: A decoder's configuration, or a multimodal one.
        context: Tokens of the prompt and the answer together.
        piece: Prompt tokens in one forward call: all of them, or `prefill_chunk_size` of `generate`.
    """
    text = config.get_text_config()
    for name, value, most in (("context", context, text.max_position_embeddings), ("piece", piece, context)):
        if count_of(name, value) > most:
            raise ValueError(f"{name} = {value!r}: should be a number of tokens from 1 to {most}")
    local, size = text.local_attention
    return [
        min(context - piece, getattr(text, size) - 1) + piece if kind == local else context
        for kind in text.attention_types()
    ]


def cache_bytes(
    config: LlamoeBaseConfig, context: int, batch_size: int = 1, element_size: int = 2, piece: int = 1
) -> list[int]:
    """Return the largest bytes of each layer's cache: keys and values, for every key/value head, token and row.

    Args:
        config, context, piece: As in `cache_tokens`.
        batch_size: Rows.
        element_size: Bytes of a number: 2 in bfloat16.
    """
    text = config.get_text_config()
    bytes_per_token = (
        2 * text.num_key_value_heads * text.head_dim * element_size * count_of("batch_size", batch_size)
    )
    return [bytes_per_token * tokens for tokens in cache_tokens(config, context, piece)]
