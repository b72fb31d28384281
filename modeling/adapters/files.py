"""An adapter's files, checked on their headers: whether they are whole and can be an adapter of this model.

peft creates an adapter's layers before it opens the file of weights, and reads the whole file before it checks it.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

from ...configuration.errors import CheckpointError
from ...configuration.hub import hub_arguments
from ..checkpoints import WEIGHT_DTYPES, TensorHeader, read_header

# Names of an adapter's weights, in peft's order.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Some methods save the indices of the rows they change, as integers.
_POSITIONS = re.compile(r"indices(\.|$)")
# Ranks up to which a config is trusted (LoRA, other methods), and a number of elements always allowed in a file.
_COMMON_RANK, _FULL_RANK, _FEW_NUMBERS = 1 << 10, 1 << 16, 1 << 26
# What a file has beside its numbers at the most.
_HEADER_BYTES = 100_000_000


def check_files(
    model: PreTrainedModel, name_or_path: str | os.PathLike, **download: Any
) -> tuple[Any, dict[str, TensorHeader]]:
    """Check an adapter's files, in a folder or on the Hub, before peft creates layers for it and reads it.

    Of `download`, what says from where files are read counts. Returns the config, None without its file, and the
    headers of the weights, empty without theirs.

    Raises:
        CheckpointError: a file is damaged or hostile, has more numbers than an adapter of this model could, or dtypes
            that no weight has; or the config asks for layers that the file could not fill.
        ValueError: a field of the config has a value of the wrong type.
    """
    download = hub_arguments(download)
    path = next(filter(None, (_find(name_or_path, name, download) for name in _WEIGHTS)), None)
    header = {} if path is None else _check_weights(model, path)
    path = _find(name_or_path, "adapter_config.json", download)
    if path is None:
        return None, header
    config = _read_config(name_or_path, download)
    if header:
        _check_ranks(path, config, header)
    return config, header


def _find(name_or_path: str | os.PathLike, name: str, download: Mapping[str, Any]) -> str | None:
    try:
        return cached_file(
            os.fspath(name_or_path), name, _raise_exceptions_for_missing_entries=False, **download
        )
    except (OSError, ValueError):
        # No network or no such repository: peft reports it.
        return None


def _check_weights(model: PreTrainedModel, path: str) -> dict[str, TensorHeader]:
    most = max(_FEW_NUMBERS, 4 * sum(parameter.numel() for parameter in model.parameters()))
    # Of eight bytes a number at the most. Asked first: a file of terabytes cannot be opened everywhere.
    if (size := os.stat(path).st_size) > 8 * most + _HEADER_BYTES:
        raise CheckpointError(
            f"{path}: has {size} bytes, which is beyond reason for an adapter of this model."
        )
    header = read_header(path)
    for name, tensor in header.items():
        if tensor.dtype not in WEIGHT_DTYPES and not _POSITIONS.search(name):
            raise CheckpointError(
                f"{path}: {name} has dtype {tensor.dtype}, which is not a dtype of an adapter's weights "
                f"({', '.join(sorted(WEIGHT_DTYPES))})."
            )
    found = sum(math.prod(tensor.shape) for tensor in header.values())
    if found > most:
        raise CheckpointError(
            f"{path}: holds {found} numbers, which is beyond reason for an adapter of this model."
        )
    return header


_KINDS = {"rank_pattern": dict, "alpha_pattern": dict, "alora_invocation_tokens": list}
# What may be one of a type, or a list of them.
_ONE_OR_MORE = {
    "layers_to_transform": int,
    **dict.fromkeys(("exclude_modules", "layers_pattern", "modules_to_save", "target_modules"), str),
}


def _read_config(name_or_path: str | os.PathLike, download: Mapping[str, Any]) -> Any:
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(name_or_path, **download)
        for field in fields(config):
            value = getattr(config, field.name)
            if field.type in (bool, "bool") and not isinstance(value, bool | NoneType):
                raise TypeError(f"{field.name} = {value!r} is neither true nor false")
        begin = getattr(config, "init_lora_weights", None)
        if not isinstance(begin, bool | str | NoneType):
            raise TypeError(f"init_lora_weights = {begin!r} is neither a truth value nor a name")
        for name, kind in _KINDS.items():
            if not isinstance(value := getattr(config, name, None), kind | NoneType):
                raise TypeError(f"{name} = {value!r} is not a {kind.__name__}")
        for name, kind in _ONE_OR_MORE.items():
            value = getattr(config, name, None)
            several = value if isinstance(value, list | tuple | set) else () if value is None else (value,)
            if any(type(each) is not kind for each in several):
                raise TypeError(f"{name} = {value!r} is neither {kind.__name__} nor a list of them")
        return config
    # peft does not check the types of fields.
    except Exception as error:
        raise ValueError(
            f"{name_or_path}: adapter_config.json: peft cannot read it ({type(error).__name__}: {error})."
        ) from error


def _check_ranks(path: str, config: Any, header: Mapping[str, TensorHeader]) -> None:
    """Refuse ranks that no tensor of the file has: peft creates layers of that size before it checks."""
    longest = max((axis for tensor in header.values() for axis in tensor.shape), default=0)
    # In methods other than LoRA, a large rank can mean whole matrices.
    most = max(longest, _COMMON_RANK if config.peft_type == "LORA" else _FULL_RANK)
    ranks = {name: getattr(config, name, None) for name in ("r", "init_r", "num_virtual_tokens")}
    ranks |= getattr(config, "rank_pattern", None) or {}
    for name, rank in ranks.items():
        if isinstance(rank, int) and rank > most:
            raise CheckpointError(
                f"{path}: {name[:99]} = {rank}, and no tensor of the adapter is longer than {longest}."
            )
