"""Conversion between Meta's, Mistral AI's and Hugging Face's formats: `llamoe convert`."""

import os
from typing import Unpack

from .checkpoint import DEFAULTS, Report, WriteOptions, takes_options
from .hf import save_hf
from .io import check_sums
from .meta import save_meta
from .mistral import save_mistral
from .open import open_source


@takes_options
def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    to: str = "hf",
    shards: int | None = None,
    style: str = "release",
    experts: str = "fused",
    checksums: bool = False,
    instruct: bool | None = None,
    **options: Unpack[WriteOptions],
) -> Report:
    """Convert a language or multimodal checkpoint between formats.

    Args:
        source: a folder in Meta's, Mistral AI's or Hugging Face's format; it is never changed. Weights that `quantize`
            has packed are unpacked.
        target: a folder that does not exist or is empty.
        to: "hf", "meta" or "mistral".
        shards: for "meta", the number of files that each tensor is split over; it divides the key/value heads. None
            takes as many as Meta's releases of that size have: one up to 17.5 GB.
        style: for "meta" and Llama 4, "release" (names of the published files, some tensors fused) or "unfused" (module
            names of Meta's code).
        experts: for "hf", "fused" (stacked, as stock) or "split" (a linear layer for each expert).
        checksums: first compare the source with its checklist.chk and with the checksums inside .pth files. This reads
            the source once more.
        instruct: for Meta's and Mistral AI's folders, whether the model was tuned for conversations. It decides on chat
            template, stop tokens and sampling. None goes by the folder's name.
        **options: see `WriteOptions`; only "hf" has `shard_size` and `layout`.

    Raises:
        ValueError: bad options, a target in use, a damaged or unknown source, or weights that are not finite; no file
            is left behind.
        OSError: the disk is full or fails; complete files stay for `resume`.
    """
    if to not in ("hf", "meta", "mistral"):
        raise ValueError(f"to = {to!r}: valid are 'hf', 'meta' and 'mistral'.")
    of_hf = {"shard_size": options.pop("shard_size"), "layout": options.pop("layout")}
    unused = {} if to == "meta" else {"shards": (shards, None), "style": (style, "release")}
    if to != "hf":
        unused |= {"experts": (experts, "fused"), **{name: (of_hf[name], DEFAULTS[name]) for name in of_hf}}
    for name, (value, default) in unused.items():
        if value != default:
            raise ValueError(f"{name} = {value!r}: has no meaning for to = {to!r}.")
    checkpoint = open_source(source, target, options["resume"], instruct=instruct, may_be_packed=True)
    if checkpoint.kind in ("open_clip", "clip"):
        raise ValueError(f"{source}: is a vision tower; convert it with `llamoe vision` (convert_vision).")
    if checksums:
        check_sums(checkpoint.sources, options["progress"])
    if to == "meta":
        return save_meta(checkpoint, target, shards=shards, style=style, **options)
    if to == "mistral":
        return save_mistral(checkpoint, target, **options)
    return save_hf(checkpoint, target, experts=experts, **options, **of_hf)
