"""Quantize a model to int4 or int8, block by block, without loading it: `llamoe quantize`."""

import os
import re
from collections.abc import Sequence

from ..configuration import QuantizationConfig
from ..configuration.quantization import WEIGHTS
from ..modeling.quantization import is_kept
from .checkpoint import Checkpoint, Report
from .hf import save_hf
from .io import Progress, WriteOptions
from .open import check_unpacked, open_source


def quantize(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    to: str,
    group_size: int | None = None,
    experts: bool = True,
    linears: bool = True,
    search: bool = True,
    keep: list[str] | str | None = None,
    instruct: bool | None = None,
    shard_size: int | str = "5GB",
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write a model with its routed experts and linear layers in 4 or 8 bits.

    The tensors are bit by bit those of a model that was loaded with a `QuantizationConfig` and saved by
    `save_pretrained`; `from_pretrained` loads the folder. Weights in float32 and float16 are rounded to bfloat16 first.
    One matrix, or one expert's matrix, is in memory at a time.

    If another program has packed the source in 4 bits (GPTQ, AWQ and others), int4 keeps its codes. Modules that the
    source has in 16 bits stay so.

    Args:
        source: a model of any format that `open_checkpoint` reads, but no folder that `quantize` has written.
        target: the folder to write.
        to: "int4" (a scale and a zero point for each group of inputs) or "int8" (a scale for each output).
        group_size: for int4: number of inputs that share a scale: 32, 64, 128 or 256. None takes the source's number if
            another program has packed it in 4 bits, else 32.
        experts: quantize routed experts.
        linears: quantize linear layers of the decoder.
        search: search for the scales with the least squared error, which takes longer.
        keep: `modules_to_not_convert` of `QuantizationConfig`: names of more modules that stay in 16 bits.
        instruct: as in `convert`.
        shard_size, resume, dry_run, progress: as in `WriteOptions`.

    Returns:
        a report, whose `parts` are the bytes of each part of the model before and after.

    Raises:
        ValueError: options contradict each other, the format cannot store a size, or the source is quantized already or
            has nothing to quantize.
        CheckpointError: a missing or damaged file (also a ValueError).
    """
    if to not in WEIGHTS:
        raise ValueError(f"to = {to!r}: valid are {' and '.join(map(repr, WEIGHTS))}.")
    options = WriteOptions("llamoe", None, shard_size, resume, dry_run, progress)
    quantization = QuantizationConfig(to, group_size, experts, linears, search, keep or None)
    checkpoint = open_source(source, target, resume, instruct=instruct, may_be_packed=True)
    if checkpoint.kind == "hf":
        check_unpacked(checkpoint)
    if checkpoint.quantization is not None and to == "int4":
        stored = checkpoint.quantization.group_size
        if group_size not in (None, stored):
            raise ValueError(
                f"group_size = {group_size}: {source} has groups of {stored}, whose codes are kept. Leave it out."
            )
        quantization.group_size = stored
    names = quantization.modules_to_not_convert or []
    _check_names(names, checkpoint)
    quantization.modules_to_not_convert = [*dict.fromkeys([*names, *checkpoint.in_16_bit])] or None
    identity = {"quantization": quantization.to_dict()}
    return save_hf(checkpoint, target, options, identity=identity, quantization=quantization)


def _check_names(names: Sequence[str], checkpoint: Checkpoint) -> None:
    """Raise a `ValueError` for names of modules that the model does not have, since they would have no effect."""
    modules = {key.rpartition(".")[0] for key in checkpoint.tensors}
    for name in names:
        try:
            is_there = any(is_kept(module, [name]) for module in modules)
        except re.error:
            is_there = False
        if not is_there:
            raise ValueError(f"keep = {name!r}: no module of the model has this name, or one that ends so.")
