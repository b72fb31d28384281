"""Quantizing while a checkpoint is read, and checking what was read packed."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ..checkpoints import DTYPES, forget_pages, headers_of
from .experts import QuantizedExperts
from .linear import QuantizedLinear
from .packed import check_finite

# In which weights are quantized as they were stored.
_FLOATS = {"F32", "F16", "BF16"}


class Quantize(ConversionOps):
    """The parts of a linear layer's weight."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], model: nn.Module, **kwargs: Any) -> dict[str, Any]:
        """The parts by name; `input_dict` has the weight under its name in the model."""
        found: dict[str, Any] = {}
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            path, _, name = key.rpartition(".")
            module: Any = model.get_submodule(path)
            found |= {f"{path}.{own_name}": part for own_name, part in module.quantize(name, weight).items()}
            forget_pages(weight)
        return found


def dtype_to_quantize(files: Iterable[str] | None) -> torch.dtype | None:
    """The dtype in which weights of these files are quantized; None without files.

    It is theirs: a cast would copy whole stacks, and round weights that are rounded again. Of files with several dtypes
    weights are read in bfloat16.
    """
    found = {header.dtype for header in headers_of(files or ())} & _FLOATS
    if not found:
        return None
    return DTYPES[found.pop()] if len(found) == 1 else torch.bfloat16


def keep_dtypes(load_config: Any, dtype: torch.dtype | None, model: nn.Module) -> Any:
    """A record of the loading in which linear layers that are to be packed are read in this dtype.

    transformers would read them in the model's dtype otherwise.
    """
    if load_config.hf_quantizer.pre_quantized or dtype is None:
        return load_config
    packed = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    # A `*` stands for a layer's number.
    names = {re.sub(r"\.\d+\.", ".*.", name) + ".*" for name in packed}
    return dataclasses.replace(
        load_config, dtype_plan={**(load_config.dtype_plan or {}), **dict.fromkeys(names, dtype)}
    )


def shapes_in_files(model: nn.Module, is_packed_there: bool) -> dict[str, tuple[int, ...]]:
    """The shapes that files of this empty model have, by the model's names.

    Args:
        model: with packed modules.
        is_packed_there: whether the files hold packed weights, too, and not those that are packed now.
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts | QuantizedLinear):
            if is_packed_there:
                shapes |= {
                    f"{path}.{name}": tuple(b.shape) for name, b in module._buffers.items() if b is not None
                }
            else:
                shapes |= {f"{path}.{name}": shape for name, shape in module.unpacked_shapes().items()}
    return shapes


def check_scales(model: nn.Module) -> None:
    """Raise a `CheckpointError` if scales of a loaded model's packed weights are NaN or infinite."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts | QuantizedLinear):
            for name, part in module._buffers.items():
                if part is not None and part.is_floating_point() and not part.is_meta:
                    check_finite(part, f"{path}.{name}")


def check_found(model: nn.Module, loading_info: Any, place: Any) -> None:
    """Check that a checkpoint had all parts of the packed weights, in their shapes; nothing else could fill them.

    Args:
        model: with packed modules.
        loading_info: transformers' record of what was missing, and of what had another shape.
        place: of the checkpoint, for the message.

    Raises:
        CheckpointError: a part was missing, or has another shape or dtype.
    """
    absent = {*loading_info.missing_keys, *(key for key, *_ in loading_info.mismatched_keys)}
    lost = []
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts | QuantizedLinear):
            wanted = module.part_shapes()
            for name, tensor in module.state_dict().items():
                # transformers compares no shapes of what a quantizer makes.
                found = tuple(tensor.shape), tensor.dtype
                if f"{path}.{name}" in absent or found != wanted.get(name, found):
                    lost.append(f"{path}.{name}")
    if lost:
        raise CheckpointError(
            f"{place}: {listed(lost, 5)} cannot be filled from the checkpoint, and packed weights do not begin anew. "
            "Download or copy it again, or load it with the configuration that it was saved with."
        )


def align_codes(model: nn.Module) -> None:
    """Copy codes that lie in a mapped file at addresses which their format's kernel cannot read."""
    for module in model.modules():
        if isinstance(module, QuantizedExperts | QuantizedLinear):
            for parameter in module._parameters.values():
                is_code = parameter is not None and not parameter.is_floating_point() and parameter.is_cpu
                if is_code and parameter.data_ptr() % module.format.alignment:
                    mapped, parameter.data = parameter.data, parameter.data.clone()
                    forget_pages(mapped)
