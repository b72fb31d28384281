"""The names of an adapter's tensors, which peft does not look at before it makes layers for them."""

import os
from collections.abc import Collection
from typing import Any

from transformers.utils import cached_file

from ...configuration.hub import hub_arguments
from ..checkpoints import read_header

# Names of an adapter's weights, in peft's order.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def tensor_names(name_or_path: str | os.PathLike, **download: Any) -> Collection[str]:
    """Return the names of an adapter's tensors, in a folder or on the Hub; none without a file of weights.

    Of `download`, what says from where files are read counts.

    Raises:
        CheckpointError: the file is damaged.
    """
    for name in _WEIGHTS:
        try:
            path = cached_file(
                os.fspath(name_or_path),
                name,
                _raise_exceptions_for_missing_entries=False,
                **hub_arguments(download),
            )
        except (OSError, ValueError):
            # No network or no such repository: peft reports it.
            continue
        if path is not None:
            return read_header(path)
    return ()
