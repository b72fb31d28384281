"""Conversion between Meta's format and Hugging Face's: a checkpoint is recognised by its files, opened and written."""

import os
from pathlib import Path
from typing import Any

import torch

from .checkpoint import Report
from .hf import save_hf
from .io import Progress, check_apart, check_sums, check_target
from .meta import save_meta
from .open import open_checkpoint


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    to: str = "hf",
    shards: int | None = None,
    style: str = "release",
    dtype: str | torch.dtype | None = None,
    shard_size: int | str = "5GB",
    experts: str = "fused",
    layout: str | None = None,
    resume: bool = False,
    dry_run: bool = False,
    checksums: bool = False,
    instruct: bool | None = None,
    progress: Progress | None = None,
) -> Report:
    """Convert a language or multimodal checkpoint between formats.

    Args:
        source: a folder in Meta's or Hugging Face's format; it is never changed.
        target: a folder that does not exist or is empty.
        to: "hf" or "meta".
        shards: for "meta", the number of files that each tensor is split over; it divides the key-value heads. None
            takes as many as Meta's releases of that size have: one up to 17.5 GB.
        style: for "meta" and Llama 4, "release" (names of the published files, some tensors fused) or "unfused" (module
            names of Meta's code).
        dtype: "float32", "float16" or "bfloat16" for all tensors; None keeps the dtype of each.
        shard_size: for "hf", bytes that a file should not exceed, such as "5GB".
        experts: for "hf", "fused" (stacked, as stock) or "split" (a linear layer for each expert).
        layout: for "hf", config.json as "stock" or "llamoe"; None takes stock where it can express the model.
        resume: continue a folder that an earlier run left unfinished.
        dry_run: check and plan everything, write nothing.
        checksums: first compare the source with its checklist.chk and with the checksums inside .pth files. This reads
            the source once more.
        instruct: for Meta's folders, whether the model was tuned for conversations. It decides on chat template, stop
            tokens and sampling. None goes by the folder's name.
        progress: called for every block.

    Raises:
        ValueError: bad options, a target in use, a damaged or unknown source, or weights that are not finite; no file
            is left behind.
        OSError: the disk is full or fails; complete files stay for `resume`.
    """
    if to not in ("hf", "meta"):
        raise ValueError(f"to = {to!r}: valid are 'hf' and 'meta'.")
    unused: dict[str, Any] = {"shards": (shards, None), "style": (style, "release")} if to == "hf" else {
        "shard_size": (shard_size, "5GB"), "experts": (experts, "fused"), "layout": (layout, None),
    }  # fmt: skip
    for name, (value, default) in unused.items():
        if value != default:
            raise ValueError(f"{name} = {value!r}: has no meaning for to = {to!r}.")
    check_apart(Path(source), Path(target))
    check_target(Path(target), resume)
    checkpoint = open_checkpoint(source, instruct=instruct)
    if checkpoint.kind in ("open_clip", "clip"):
        raise ValueError(f"{source}: is a vision tower; convert it with `llamoe vision` (convert_vision).")
    if checksums:
        check_sums(checkpoint.sources)
    if to == "meta":
        return save_meta(
            checkpoint,
            target,
            shards=shards,
            style=style,
            dtype=dtype,
            resume=resume,
            dry_run=dry_run,
            progress=progress,
        )
    return save_hf(
        checkpoint,
        target,
        layout=layout,
        experts=experts,
        dtype=dtype,
        shard_size=shard_size,
        resume=resume,
        dry_run=dry_run,
        progress=progress,
    )
