"""Convert checkpoints to Hugging Face's or Meta's format: `llamoe convert`."""

import copy
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..configuration.base import LlamoeBaseConfig
from .checkpoint import Report
from .hf import save_hf
from .io import Progress, WriteOptions
from .meta import save_meta
from .open import open_source

_ROPE_NAMES = (
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "attention_factor", "beta_fast", "beta_slow", "short_factor", "long_factor", "mscale", "mscale_all_dim", "truncate",
)  # fmt: skip


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    to: str = "hf",
    shards: int | None = None,
    experts: str = "fused",
    instruct: bool | None = None,
    rope_scaling: str | Mapping[str, Any] | None = None,
    layout: str | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: int | str = "5GB",
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Convert a language or multimodal checkpoint between formats.

    Args:
        source: a folder in Meta's, Mistral AI's or Hugging Face's format, or a GGUF file; it is never changed. Packed
            weights are unpacked.
        target: a folder that does not exist or is empty.
        to: format of the target: "hf" (Hugging Face) or "meta".
        shards: for "meta": number of files that each tensor is split over, a divisor of the number of key/value heads.
            None takes as many as Meta's releases of that size have: one up to 17.5 GB.
        experts: for "hf": "fused" (stacked, as transformers has them) or "split" (a linear layer for each expert).
        instruct: for Meta's and Mistral AI's folders: whether the model was tuned for conversations, which decides on
            chat template, stop tokens and sampling. None decides by the folder's name.
        rope_scaling: entries of the target's `rope_parameters`, as a dictionary or as JSON. With a `rope_type` they
            replace the source's scaling; `{"rope_type": "default"}` removes it. Without a `rope_type` they change only
            the entries that they name: `{"factor": 32}`. The base `rope_theta` stays unless it is given.
        layout, dtype, shard_size, resume, dry_run, progress: as in `WriteOptions`; "meta" ignores `shard_size` and
            `layout`.

    Raises:
        ValueError: bad options, a target in use, a damaged or unknown source, or weights that are not finite. No file
            is left behind.
        OSError: the disk is full or fails. Complete files stay for `resume`.
    """
    if to not in ("hf", "meta"):
        raise ValueError(f"to = {to!r}: valid are 'hf' and 'meta'.")
    options = WriteOptions(layout, dtype, shard_size, resume, dry_run, progress)
    checkpoint = open_source(source, target, resume, instruct=instruct, may_be_packed=True)
    if checkpoint.kind in ("open_clip", "clip"):
        raise ValueError(f"{source}: is a vision tower; convert it with `llamoe vision` (convert_vision).")
    if rope_scaling is not None:
        checkpoint.config = _scale_rope(checkpoint.config, rope_scaling)
        scaled = checkpoint.config.get_text_config().rope_parameters
        checkpoint.notes.append(f"rope_parameters are those of rope_scaling: {scaled}")
    if to == "meta":
        return save_meta(checkpoint, target, options, shards=shards)
    return save_hf(checkpoint, target, options, experts=experts)


def _scale_rope(config: LlamoeBaseConfig, scaling: str | Mapping[str, Any]) -> LlamoeBaseConfig:
    """Copy a configuration with another rotary scaling."""
    try:
        given = json.loads(scaling) if isinstance(scaling, str) else scaling
    except ValueError as error:
        raise ValueError(f'rope_scaling = {scaling!r}: is no JSON such as {{"factor": 32}}.') from error
    if not isinstance(given, Mapping):
        raise ValueError(
            f'rope_scaling = {scaling!r}: has no names; give an object such as {{"factor": 32}}.'
        )
    if unknown := sorted(given.keys() - set(_ROPE_NAMES)):
        raise ValueError(f"rope_scaling has {', '.join(unknown)}: valid are {', '.join(_ROPE_NAMES)}.")
    config = copy.deepcopy(config)
    text = config.get_text_config()
    present = dict(text.rope_parameters or {})
    kept = {"rope_theta": present.get("rope_theta", text.default_theta)} if "rope_type" in given else present
    text.rope_parameters = {"rope_type": "default", **kept, **given}
    if text.rope_parameters["rope_type"] == "default" and given.keys() - {"rope_type", "rope_theta"}:
        raise ValueError(
            f"rope_scaling = {scaling!r}: rope_type = 'default' scales nothing: give the rope_type, too."
        )
    config.validate()
    return config
