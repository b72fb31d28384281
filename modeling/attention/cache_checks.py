"""Refuse a KV cache that is not this model's, before anything is written to it.

A step of one token checks only what a pass can change: rows, heads, and room in a cache of fixed length.
"""

from typing import Any, NoReturn

import torch
from transformers import PreTrainedConfig
from transformers.utils import is_torchdynamo_compiling

from ..kernels import is_readable
from .visibility import RULES

# By type of layer, the config's field that says how many of the last tokens its window must keep.
_WINDOWS = {layer_type: name for layer_type, fields in RULES.items() for name in fields.values()}


def check_cache(config: PreTrainedConfig, batch_size: int, num_tokens: int, past_key_values: Any) -> None:
    """Check that a cache fits this decoder and a batch of `batch_size` rows with `num_tokens` new tokens.

    Reads only kinds of layers and shapes, and on the CPU the number of tokens in a static cache. A cache whose layers
    all keep every token fits chunked layers too; their mask applies the chunks.

    Raises:
        ValueError: no cache; another number of layers; layers that forget tokens which ours still need; other
            key/value heads, head size or batch size; or no room for the new tokens.
    """
    if past_key_values is None or is_torchdynamo_compiling() or torch.jit.is_tracing():
        return
    cache = getattr(past_key_values, "self_attention_cache", past_key_values)
    if not hasattr(cache, "get_seq_length"):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}; expected a transformers Cache: "
            "DynamicCache(config=model.config)."
        )
    layers = getattr(cache, "layers", None)
    if not layers:
        # Its layers are made in the first pass.
        return
    if num_tokens > 1:
        _check_layers(config, layers)
    keys = getattr(layers[0], "keys", None)
    # Empty and quantized layers have no such keys.
    if isinstance(keys, torch.Tensor) and keys.ndim == 4:
        _check_shape(config, keys.shape, batch_size)
    if getattr(cache, "is_compileable", False):
        _check_room(config, layers, num_tokens)


def _check_layers(config: PreTrainedConfig, layers: list[Any]) -> None:
    count, layer_types = config.num_hidden_layers, config.attention_types()
    # While `generate(assistant_early_exit=...)` drafts, the config has fewer layers than the model and its lists.
    if len(layers) not in (count, len(layer_types)):
        _fail(f"has {len(layers)} layers", f"num_hidden_layers = {count}")
    # In a static cache shorter than a window, windows are as short as the cache.
    whole = max((layer.max_cache_len for layer in layers if _is_static(layer, is_sliding=False)), default=0)
    slides = set()
    for index, (layer, layer_type) in enumerate(zip(layers, layer_types, strict=False)):
        is_sliding, kind = getattr(layer, "is_sliding", False), type(layer).__name__
        if not hasattr(layer, "update"):
            _fail(f"has a {kind} as layer {index}", "keys and values in every layer")
        if layer_type not in _WINDOWS:
            if is_sliding:
                _fail(f"forgets tokens in layer {index} ({kind})", "a full attention layer")
            continue
        slides.add(is_sliding)
        if len(slides) > 1:
            _fail("slides in some chunked layers only", "layers of one kind for all of them")
        wanted = getattr(config, _WINDOWS[layer_type])
        kept = getattr(layer, "sliding_window", None)
        if kept is None and _is_static(layer, is_sliding=True) and layer.max_cache_len < whole:
            kept = layer.max_cache_len
        if kept is not None and kept < wanted:
            _fail(f"keeps {kept} tokens", f"{_WINDOWS[layer_type]} = {wanted}")


def _is_static(layer: Any, is_sliding: bool) -> bool:
    return hasattr(layer, "max_cache_len") and getattr(layer, "is_sliding", False) == is_sliding


def _check_shape(config: PreTrainedConfig, shape: torch.Size, batch_size: int) -> None:
    heads, head_dim = config.num_key_value_heads, config.head_dim
    if shape[1] != heads or shape[3] != head_dim:
        # With tensor parallelism each process holds some of the heads.
        is_parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
        if shape[3] != head_dim or not is_parallel or heads % shape[1] != 0:
            _fail(
                f"has {shape[1]} heads of size {shape[3]}",
                f"num_key_value_heads = {heads} and head_dim = {head_dim}",
            )
    if shape[0] != batch_size:
        raise ValueError(
            f"past_key_values holds {shape[0]} rows, but the batch has {batch_size}: start with an empty cache, or "
            "use its batch_repeat_interleave or batch_select_indices."
        )


def _check_room(config: PreTrainedConfig, layers: list[Any], num_tokens: int) -> None:
    """Refuse more tokens than a layer of fixed length takes: one that keeps all, or a window too short to forget."""
    wanted = max(getattr(config, name, None) or 0 for name in _WINDOWS.values())
    fixed = [layer for layer in layers if hasattr(layer, "max_cache_len")]
    windows = [layer for layer in fixed if getattr(layer, "is_sliding", False)]
    limits = [layer for layer in fixed if layer not in windows]
    limits = limits or [layer for layer in windows if layer.max_cache_len < wanted]
    if not limits:
        return
    written = getattr(limits[0], "cumulative_length", 0)
    is_known = not isinstance(written, torch.Tensor) or is_readable(written)
    if is_known and int(written) + num_tokens > limits[0].max_cache_len:
        raise ValueError(
            f"past_key_values holds at most {limits[0].max_cache_len} tokens: {int(written)} are in it and "
            f"{num_tokens} are new. Make it with a larger max_cache_len, or empty it with reset()."
        )


def _fail(given: str, expected: str) -> NoReturn:
    raise ValueError(
        f"past_key_values is a cache of another model: it {given}; expected: {expected}. Make it with "
        "DynamicCache(config=model.config)."
    )
