"""Whether an adapter's files are whole and can be an adapter of this model, checked on their headers.

peft creates an adapter's layers before it opens the file of weights, and reads the whole file before it checks it.
"""

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

from ...configuration.errors import CheckpointError
from ...configuration.hub import hub_arguments
from ...configuration.json_files import read_json
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
) -> dict[str, TensorHeader]:
    """Check an adapter's files, in a folder or on the Hub, before peft creates layers for it and reads it.

    Of `download`, what says from where files are read counts. Returns the headers of the weights; empty without a file.

    Raises:
        CheckpointError: a file is damaged or hostile, has more numbers than an adapter of this model could, or dtypes
            that no weight has; or the config asks for layers that the file could not fill.
    """
    path = next(filter(None, (_find(name_or_path, name, download) for name in _WEIGHTS)), None)
    if path is None:
        return {}
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
    config = _find(name_or_path, "adapter_config.json", download)
    if config is not None:
        _check_ranks(config, read_json(config), header)
    return header


def _find(name_or_path: str | os.PathLike, name: str, download: Mapping[str, Any]) -> str | None:
    try:
        return cached_file(
            os.fspath(name_or_path),
            name,
            _raise_exceptions_for_missing_entries=False,
            **hub_arguments(download),
        )
    except (OSError, ValueError):
        # No network or no such repository: peft reports it.
        return None


def _check_ranks(path: str, config: Mapping[str, Any], header: Mapping[str, TensorHeader]) -> None:
    """Refuse ranks that no tensor of the file has: peft creates layers of that size before it checks."""
    longest = max((axis for tensor in header.values() for axis in tensor.shape), default=0)
    # In methods other than LoRA, a large rank can mean whole matrices.
    most = max(longest, _COMMON_RANK if config.get("peft_type") == "LORA" else _FULL_RANK)
    ranks = {name: config.get(name) for name in ("r", "init_r", "num_virtual_tokens")}
    if isinstance(pattern := config.get("rank_pattern"), dict):
        ranks |= {f"rank_pattern[{name[:99]!r}]": rank for name, rank in pattern.items()}
    for name, rank in ranks.items():
        if isinstance(rank, int) and rank > most:
            raise CheckpointError(
                f"{path}: {name} = {rank}, and no tensor of the adapter is longer than {longest}."
            )
