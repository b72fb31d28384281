"""How often each expert was used, in a file: those used most are then read while the model loads the next time."""

import json
import os
from collections.abc import Mapping
from typing import Any

from ...configuration.errors import CheckpointError
from ...configuration.json_files import read_json, write_whole
from ..moe import Experts

_KEY = "experts_usage"


def read_usage(path: str | os.PathLike, layers: Mapping[str, Experts]) -> dict[str, list[int]]:
    """For each of these layers the uses of its experts, as `write_usage` has written them.

    Raises:
        ValueError: there is no such file, or it is of another model.
    """
    advice = "Give what model.save_experts_usage(path) wrote for this model."
    try:
        layers_there = read_json(path)[_KEY]
        uses = {name: list(layers_there[_in_decoder(name)]) for name in layers}
    except CheckpointError as error:
        raise ValueError(f"ExpertsMemory(usage=…): {error} {advice}") from error
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"ExpertsMemory(usage={str(path)!r}): it does not count the experts of {', '.join(layers)}. {advice}"
        ) from error
    for name, counts in uses.items():
        wrong = [count for count in counts if type(count) is not int or count < 0]
        if wrong or len(counts) != layers[name].num_experts:
            found = f"{wrong[0]!r} uses" if wrong else f"{len(counts)} experts"
            raise ValueError(
                f"ExpertsMemory(usage={str(path)!r}): {found} of {name}, which has {layers[name].num_experts} experts. "
                f"{advice}"
            )
    return uses


def write_usage(path: str | os.PathLike, uses: Mapping[str, list[int]]) -> None:
    """Write for each layer how often each of its experts was used; the file is there whole, or as it was.

    Raises:
        OSError: the file cannot be written.
    """
    content: dict[str, Any] = {_KEY: {_in_decoder(name): counts for name, counts in uses.items()}}
    write_whole(path, json.dumps(content) + "\n")


def _in_decoder(name: str) -> str:
    """A layer's name that does not depend on the class that was loaded."""
    return name[name.find("layers.") :]
