"""Make grouped-query attention from multi-head attention by merging groups of key/value heads: `llamoe gqa`."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import torch

from ..configuration import LlamoeVisionConfig
from ..configuration.sizes import count_of
from .checkpoint import Report
from .hf import save_hf
from .io import LazyTensor, Progress, WriteOptions
from .open import family_of, open_source

_KEY_VALUE = re.compile(r"(?:language_model\.)?model\.layers\.\d+\.self_attn\.[kv]_proj\.(?:weight|bias)")


def merge_kv_heads(
    source: str | Path,
    target: str | Path,
    *,
    kv_heads: int,
    layout: str | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: int | str = "5GB",
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Replace each group of a decoder's key/value heads by its mean, as a start for further training.

    Means are computed in a wider dtype (float32, or float64 for float32) and cast back. If the heads of each group are
    equal, the model computes the same as before; otherwise it needs further training (Ainslie et al. 2023: 5 % of the
    original's). Dense, mixture and multimodal models are converted; the tower of a multimodal model is unchanged.

    Args:
        source: a model of any format that `open_checkpoint` reads.
        target: the folder to write.
        kv_heads: number of key/value heads of the result, a divisor of the source's. 1 makes multi-query attention.
        layout, dtype, shard_size, resume, dry_run, progress: as in `WriteOptions`.

    Raises:
        ValueError: a source without a decoder, or a number of heads that does not divide the source's.
        CheckpointError: a missing or damaged file (also a ValueError).
    """
    options = WriteOptions(layout, dtype, shard_size, resume, dry_run, progress)
    count_of("kv_heads", kv_heads)
    checkpoint = open_source(source, target, resume)
    if isinstance(checkpoint.config, LlamoeVisionConfig):
        raise ValueError(f"gqa: {source} is {family_of(checkpoint.config)}; give a model with a decoder.")
    config = copy.deepcopy(checkpoint.config)
    text = config.get_text_config()
    before = text.num_key_value_heads
    if before % kv_heads:
        raise ValueError(f"gqa: {source} has {before} key/value heads, which do not merge into {kv_heads}.")
    text.num_key_value_heads = kv_heads
    tensors = {
        key: merge_heads(tensor, before, kv_heads) if _KEY_VALUE.fullmatch(key) else tensor
        for key, tensor in checkpoint.tensors.items()
    }
    merged = replace(checkpoint, config=config, tensors=tensors)
    report = save_hf(merged, target, options, identity={"kv_heads": kv_heads})
    report.notes.append(
        f"{before} key/value heads a layer became {kv_heads}, each the mean of {before // kv_heads}"
    )
    return report


def merge_heads(tensor: LazyTensor, before: int, after: int) -> LazyTensor:
    """View a key or value projection `[before * D, ...]`, D the head size, with the mean of each group of heads."""
    if before == after:
        return tensor
    head_dim = tensor.shape[0] // before

    def merge(rows: torch.Tensor) -> torch.Tensor:
        grouped = rows.unflatten(0, (after, before // after, head_dim))
        # In the wider dtype the sum of equal numbers is exact, so that their mean is the number itself.
        wide = torch.float32 if rows.dtype.itemsize < 4 else torch.float64
        return grouped.to(wide).mean(1).to(rows.dtype).flatten(0, 1)

    return tensor.map(merge, (after * head_dim, *tensor.shape[1:]))
