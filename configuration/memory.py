"""Compute the bytes of the KV cache from a configuration's fields.

In a layer with chunks or a sliding window, transformers' caches keep the tokens of the latest forward call, and before
them one token less than a chunk or window has. In other layers they keep all tokens. So if a prompt is read in one
call, every layer keeps the whole prompt until the next call.
"""

from .base import LlamoeBaseConfig
from .sizes import count_of


def default_context(config: LlamoeBaseConfig) -> int:
    """Return the default number of tokens of a planned cache: 8192, or the model's limit if that is lower."""
    return min(8192, config.get_text_config().max_position_embeddings)


def cache_tokens(config: LlamoeBaseConfig, context: int, piece: int = 1) -> list[int]:
    """Return the largest number of tokens in each layer's cache.

    Args:
        config: A decoder's configuration, or a multimodal one.
        context: Number of tokens of the prompt and the answer together.
        piece: Number of prompt tokens in one forward call: all of them, or `prefill_chunk_size` of `generate`.

    Raises:
        ValueError: `context` exceeds the model's limit, `piece` exceeds `context`, or one of them is below 1.
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
    """Return the largest size in bytes of each layer's cache of keys and values.

    Args:
        config, context, piece: As in `cache_tokens`.
        batch_size: Number of rows.
        element_size: Bytes of a number: 2 in bfloat16.
    """
    text = config.get_text_config()
    bytes_per_token = (
        2 * text.num_key_value_heads * text.head_dim * element_size * count_of("batch_size", batch_size)
    )
    return [bytes_per_token * tokens for tokens in cache_tokens(config, context, piece)]
