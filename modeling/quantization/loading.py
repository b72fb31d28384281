"""Quantizing while a checkpoint is read: one stack, linear layer or expert after the other."""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ..checkpoints import DTYPES, forget_pages, read_header
from .experts import QuantizedExperts
from .linear import QuantizedLinear

# In which weights are quantized as they were stored.
_FLOATS = {"F32", "F16", "BF16"}


class _Refusal(BaseException):
    """An error in a weight: transformers collects exceptions until all is read, and words an error of its own."""

    def __init__(self, error: CheckpointError):
        self.error = error


@contextmanager
def refusing_at_once() -> Iterator[None]:
    """Context in which transformers reads weights, and a damaged one ends that as a `CheckpointError`."""
    try:
        yield
    except _Refusal as refusal:
        raise refusal.error from None


class Quantize(ConversionOps):
    """The parts of a weight that is read whole: of a linear layer, or a stack of experts."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], model: nn.Module, **kwargs: Any) -> dict[str, Any]:
        """The parts by name; `input_dict` has the weight under its name in the model."""
        found: dict[str, Any] = {}
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            path, _, name = key.rpartition(".")
            module: Any = model.get_submodule(path)
            # Experts that were stored one by one are packed already, and come with their parts.
            if not weight.is_floating_point() or name not in module._parameters:
                found[key] = weight
                continue
            parts = module.quantize(name, weight)
            _check_made(path, parts)
            found |= {f"{path}.{own_name}": part for own_name, part in parts.items()}
            forget_pages(weight)
        return found


class QuantizeExperts(MergeModulelist):
    """The parts of a stack whose experts are stored as linear layers, `[out, in]`; gate before up.

    Releases of transformers before 5.23 count a rule's tensors only for operations of this class.
    """

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """The parts by name; `input_dict` maps the source patterns to tensors in the order of the experts."""
        path, _, name = full_layer_name.rpartition(".")
        experts: QuantizedExperts = model.get_submodule(path)
        parts = experts.quantize_each(name, zip(*(input_dict.pop(p) for p in source_patterns), strict=True))
        _check_made(path, parts)
        return {f"{path}.{own_name}": part for own_name, part in parts.items()}


def in_place_of_fusing(conversions: list[Any], model: nn.Module) -> list[Any]:
    """Transformers' rules, in which those that fuse experts quantize them one by one instead."""
    packed = {name for name, module in model.named_modules() if isinstance(module, QuantizedExperts)}
    if not packed:
        return conversions
    return [
        WeightConverter(rule._original_source_patterns, rule._original_target_patterns, [QuantizeExperts()])
        if isinstance(rule, WeightConverter) and "experts" in rule._original_target_patterns[0]
        else rule
        for rule in conversions
    ]


def keep_dtypes(load_config: Any, files: Iterable[str] | None, model: nn.Module) -> Any:
    """A record of the loading in which weights to be packed are read in the dtype of the files.

    A cast would copy whole stacks, and round weights that are rounded again. Of files with several dtypes weights are
    read in bfloat16. Releases of transformers before 5.23 would cast those without a plan to the dtype of codes.
    """
    if load_config.hf_quantizer.pre_quantized or not files:
        return load_config
    found = {header.dtype for file in files for header in read_header(file).values()} & _FLOATS
    if not found:
        return load_config
    dtype = DTYPES[found.pop()] if len(found) == 1 else torch.bfloat16
    packed = [
        name
        for name, module in model.named_modules()
        if isinstance(module, QuantizedExperts | QuantizedLinear)
    ]
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


def _check_made(path: str, parts: dict[str, torch.Tensor]) -> None:
    try:
        check_finite(path, parts)
    except CheckpointError as error:
        raise _Refusal(error) from None


def check_finite(path: str, parts: dict[str, torch.Tensor]) -> None:
    """Check the scales of a module's weight.

    Raises:
        CheckpointError: a scale is infinite or no number.
    """
    for name, part in parts.items():
        # The largest and smallest number take no memory of their own, and are NaN if one is.
        if part.is_floating_point() and not torch.stack(part.aminmax()).isfinite().all():
            bad = (~part.isfinite()).sum().item()
            raise CheckpointError(
                f"{path}.{name}: {bad} of {part.numel()} scales are NaN or infinite. The checkpoint is damaged, or its "
                "weights overflowed."
            )


def check_scales(model: nn.Module) -> None:
    """Check the scales of all packed weights of a loaded model; errors as in `check_finite`."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts | QuantizedLinear):
            scales = {name: part for name, part in module._buffers.items() if part is not None}
            if not any(part.is_meta for part in scales.values()):
                check_finite(path, scales)


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
