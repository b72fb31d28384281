"""The input of a plan: a configuration, the sizes of its files if there are any, and the model without weights."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..configuration import from_stock, preset
from ..configuration.base import LlamoeBaseConfig
from ..configuration.json_files import read_json
from ..configuration.stock import CONFIG_CLASSES
from ..modeling.checkpoints import DTYPES, find_weights, read_header
from ..modeling.registration import empty_model


@dataclass(frozen=True)
class Source:
    """The input of a plan.

    Attributes:
        config: of any of our models.
        quantization: how its weights are quantized, as config.json says it; None for plain ones.
        stored: key to name of the dtype and bytes of each tensor, as files have them; None without files.
        are_safetensors: whether these are safetensors files, out of which experts can be read one by one.
    """

    config: LlamoeBaseConfig
    quantization: Mapping[str, Any] | None = None
    stored: Mapping[str, tuple[str, int]] | None = None
    are_safetensors: bool = True

    @cached_property
    def model(self) -> Any:
        """The model without weights; do not change it."""
        return empty_model(self.config)

    @property
    def method(self) -> str:
        """Name of the method that stores quantized weights; "" for plain ones."""
        method = (self.quantization or {}).get("quant_method", "")
        return str(getattr(method, "value", method))


def read_source(model: Any) -> Source:
    """Read a configuration, ours or stock, a preset, a folder or a config.json.

    Raises:
        ValueError: there is no such thing, or it describes no model of ours.
    """
    if isinstance(model, Source):
        return model
    if not isinstance(model, (str, os.PathLike)):
        if not isinstance(model, (PreTrainedConfig, Mapping)):
            raise ValueError(
                f"{type(model).__name__}: give a configuration, the name of a preset, a config.json, or a folder."
            )
        return _with_files(model if type(model) in CONFIG_CLASSES else from_stock(model), None)
    if not str(model):
        raise ValueError("'': give the name of a preset, a config.json, or a folder.")
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if file.name == "config.json":
            raise ValueError(f"no such file: {file}")
        if "/" in str(model):
            raise ValueError(f"no such folder or file: {model}")
        return Source(preset(str(model)))
    content = read_json(file)
    try:
        config = from_stock(content)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return _with_files(config, find_weights(path) if path.is_dir() else None)


def _with_files(config: Any, weights: Any) -> Source:
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    if weights is None:
        return Source(config, quantization)
    stored = {
        key: (str(DTYPES.get(header.dtype, header.dtype)).removeprefix("torch."), header.nbytes)
        for file in weights.files
        for key, header in read_header(file).items()
    }
    return Source(
        config, quantization, stored, all(str(file).endswith(".safetensors") for file in weights.files)
    )
