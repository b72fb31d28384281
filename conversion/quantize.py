"""Write the folder that a quantized model would save, block by block, without loading the model."""

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

    The folder has the tensors that `save_pretrained` writes of a model that was loaded with a `QuantizationConfig`, bit
    by bit, and `from_pretrained` loads it as it is. Weights of float32 and float16 are rounded to bfloat16 first. One
    matrix is in memory at a time, of a stack that of one expert.

    If another program has packed the source in 4 bits (GPTQ, AWQ and others), int4 keeps its codes. Modules that the
    source has in 16 bit stay so.

    Args:
        source: a model of any format that `open_checkpoint` reads, but not what `quantize` wrote.
        target: the folder to write.
        to: "int4" (a scale and a zero point for each group of inputs) or "int8" (a scale for each output).
        group_size: for int4: inputs that share a scale: 32, 64, 128 or 256. None takes that of a source which another
            program has packed in 4 bits, and 32 for others.
        experts: whether routed experts are quantized.
        linears: whether linear layers of the decoder are quantized.
        search: whether scales are searched that minimise the squared error, which takes longer.
        keep: `modules_to_not_convert` of `QuantizationConfig`: a name, or names, of more modules that stay in 16 bit.
        instruct: as in `convert`.
        shard_size, resume, dry_run, progress: as in `WriteOptions`.

    Returns:
        what was written; its `parts` are the bytes of each part before and after.

    Raises:
        ValueError: options that contradict one another, sizes that the format cannot store, or a source that is
            quantized already or has nothing to quantize.
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
    """Refuse names of modules that the model does not have: a misspelt one would be quantized in silence."""
    modules = {key.rpartition(".")[0] for key in checkpoint.tensors}
    for name in names:
        try:
            is_there = any(is_kept(module, [name]) for module in modules)
        except re.error:
            is_there = False
        if not is_there:
            raise ValueError(f"keep = {name!r}: the model has no module whose name is or ends so.")
