"""The tensors of a checkpoint, and whether they have the shapes and dtypes that a model needs."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ...configuration.errors import CheckpointError
from .checkpoint_files import read_header
from .safetensors_files import DTYPE_NAMES, WEIGHT_DTYPES

OTHER_MODEL = "Weights and config.json do not belong together."


class Stored(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        origin: the file, or "state_dict".
        name: there.
        dtype: in safetensors' spelling.
        shape: as stored.
        content: the tensor, mostly mapped from the file; or its header.
    """

    origin: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Any

    def __str__(self) -> str:
        return f"{self.origin}: {self.name}"


def headers_of(files: Iterable[str]) -> list[Stored]:
    """The tensors of files, without their numbers."""
    return [
        Stored(str(file), name, header.dtype, header.shape, header)
        for file in files
        for name, header in read_header(file).items()
    ]


def tensors_of(state_dict: Mapping[str, Any]) -> list[Stored]:
    """The tensors of a state dict."""
    return [
        Stored(
            "state_dict", name, DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), tensor
        )
        for name, tensor in state_dict.items()
        if isinstance(tensor, torch.Tensor)
    ]


def check_tensor(stored: Stored, wanted: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """Check the shape and dtype of a tensor of a checkpoint; `dtype` is None for any of plain weights.

    Raises:
        CheckpointError: it has others.
    """
    if stored.shape != wanted:
        raise CheckpointError(
            f"{stored} has shape {list(stored.shape)}, but the model that config.json describes has {list(wanted)}. "
            + OTHER_MODEL
        )
    if dtype is None and stored.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(
            f"{stored} has dtype {stored.dtype}, which is not a dtype of plain weights "
            f"({', '.join(sorted(WEIGHT_DTYPES))}), and config.json has no quantization_config for it. Load the "
            "unquantized checkpoint."
        )
    if dtype is not None and stored.dtype != DTYPE_NAMES[dtype]:
        raise CheckpointError(
            f"{stored} has dtype {stored.dtype}, but the quantization_config in config.json means "
            f"{DTYPE_NAMES[dtype]}. {OTHER_MODEL}"
        )


def check_fit(model: PreTrainedModel, files: Iterable[str], load_config: Any) -> None:
    """Compare the headers with the model; other quantizers' checkpoints are their business.

    Args:
        model: empty; in the places of modules that are packed, or will be, stand packed ones.
        files: of the checkpoint.
        load_config: transformers' record of the loading.

    Raises:
        CheckpointError: a tensor has another shape than the model, or a dtype that no weight has.
    """
    quantizer = load_config.hf_quantizer
    if quantizer is not None and not getattr(quantizer, "checks_shapes", False):
        return
    # Under DeepSpeed's ZeRO-3 the empty model is in parts already.
    expected: dict[str, Any] = {
        name: (tuple(getattr(parameter, "ds_shape", parameter.shape)), None)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    is_packed = quantizer is not None and quantizer.pre_quantized
    # What packed modules alone have.
    packed: Any = [(path, each) for path, each in model.named_modules() if hasattr(each, "part_shapes")]
    for path, module in packed:
        for name, (shape, dtype) in module.part_shapes().items() if is_packed else ():
            # Scales are cast.
            expected[f"{path}.{name}"] = shape, None if dtype.is_floating_point else dtype
        for name, shape in () if is_packed else module.unpacked_shapes().items():
            expected[f"{path}.{name}"] = shape, None
    prefixes: Mapping[str, str] = getattr(model, "_checkpoint_prefixes", {})
    patterns = [(re.compile(f"^{old}"), new) for old, new in prefixes.items()]
    for stored in headers_of(files):
        names = (stored.name, *(pattern.sub(new, stored.name) for pattern, new in patterns))
        if key := next((known for known in names if known in expected), None):
            shape, dtype = expected[key]
            if not load_config.ignore_mismatched_sizes:
                check_tensor(stored, shape, dtype)
            elif dtype is not None:
                check_tensor(stored, stored.shape, dtype)
