"""Convert vision towers of any format to llamoe's, and resize their positions: `llamoe vision`."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from .checkpoint import Report
from .clip import resize
from .hf import save_hf
from .io import Progress, WriteOptions, check_apart, check_target
from .open import open_tower


def convert_vision(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    image_size: int | None = None,
    model: str | None = None,
    dtype: str | torch.dtype | None = None,
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Convert a vision tower to a folder of `LlamoeVisionModel`.

    Args:
        source: an open_clip file or folder, or a folder of CLIP, MetaCLIP 2, Llama 4 or llamoe; it is never changed.
        target: a folder that does not exist or is empty.
        image_size: side of the pictures that the new tower reads, in pixels, a multiple of the patch size; None keeps
            the source's. Positions are resized as open_clip does it.
        model: the architecture's name in open_clip, such as "ViT-L-14-quickgelu"; needed for an open_clip file without
            open_clip_config.json. It decides on the activation, which the weights do not show.
        dtype, resume, dry_run, progress: as in `WriteOptions`.

    Returns:
        a report, whose notes say where the activation was read and what was changed.

    Raises:
        ValueError: bad options, a target in use, a file that nothing describes, or a damaged source. No file is left
            behind.
        OSError: the disk is full or fails. Complete files stay for `resume`.
    """
    target = Path(target)
    options = WriteOptions("llamoe", dtype, resume=resume, dry_run=dry_run, progress=progress)
    check_apart(Path(source), target)
    check_target(target, resume)
    checkpoint = open_tower(source, model=model)
    if image_size is not None:
        checkpoint = resize(checkpoint, image_size)
    identity = {"image_size": image_size, "hidden_act": checkpoint.config.hidden_act}
    return replace(save_hf(checkpoint, target, options, identity=identity), to="tower")
