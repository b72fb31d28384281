"""What a checkpoint must have for packed weights, and checks of what was read."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ..checkpoints import DTYPES, forget_pages, headers_of
from .experts import QuantizedExperts
from .linear import QuantizedLinear
from .packed import check_finite

# In which weights are quantized as they were stored.
_FLOATS = {"F32", "F16", "BF16"}


def packed_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules with packed weights, by their paths."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, QuantizedExperts | QuantizedLinear)]


def dtype_to_quantize(files: Iterable[str]) -> torch.dtype | None:
    """The dtype in which weights of these files are quantized; None without files.

    It is theirs: a cast would copy whole stacks, and round weights that are rounded again. Of files with several dtypes
    weights are read in bfloat16.
    """
    found = {header.dtype for header in headers_of(files)} & _FLOATS
    if not found:
        return None
    return DTYPES[found.pop()] if len(found) == 1 else torch.bfloat16


def shapes_in_files(
    model: nn.Module, is_packed: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shapes that files have for the weights of this empty model, and dtypes of codes; None for any of plain weights.

    `is_packed` says whether the files hold packed weights, too, and not those that are packed now.
    """
    # Under DeepSpeed's ZeRO-3 the empty model is in parts already.
    shapes: dict[str, Any] = {
        name: (tuple(getattr(parameter, "ds_shape", parameter.shape)), None)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for path, module in packed_modules(model):
        for name, (shape, dtype) in module.part_shapes().items() if is_packed else ():
            # Scales are cast.
            shapes[f"{path}.{name}"] = shape, None if dtype.is_floating_point else dtype
        for name, shape in () if is_packed else module.unpacked_shapes().items():
            shapes[f"{path}.{name}"] = shape, None
    return shapes


def settle_packed(model: nn.Module, is_mapped: bool) -> None:
    """Check the scales of a loaded model, and copy codes that are mapped where its kernels cannot read them.

    Raises:
        CheckpointError: scales of packed weights are NaN or infinite.
    """
    for path, module in packed_modules(model):
        for name, part in module._buffers.items():
            if part is not None and part.is_floating_point() and not part.is_meta:
                check_finite(part, f"{path}.{name}")
        for parameter in module._parameters.values() if is_mapped else ():
            is_code = parameter is not None and not parameter.is_floating_point() and parameter.is_cpu
            if is_code and parameter.data_ptr() % module.format.alignment:
                mapped, parameter.data = parameter.data, parameter.data.clone()
                forget_pages(mapped)


def check_found(model: nn.Module, loading_info: Any, place: Any) -> None:
    """Check that a checkpoint had all parts of the packed weights, in their shapes; nothing else could fill them.

    Args:
        model: with packed modules.
        loading_info: transformers' record of what was missing, and of what had another shape.
        place: of the checkpoint, for the message.

    Raises:
        CheckpointError: a part was missing, or has another shape.
    """
    absent = {*loading_info.missing_keys, *(key for key, *_ in loading_info.mismatched_keys)}
    lost = [
        f"{path}.{name}"
        for path, m in packed_modules(model)
        for name in m.state_dict()
        if f"{path}.{name}" in absent
    ]
    if lost:
        raise CheckpointError(
            f"{place}: {listed(lost, 5)} cannot be filled from the checkpoint, and packed weights do not begin anew. "
            "Download or copy it again, or load it with the configuration that it was saved with."
        )
