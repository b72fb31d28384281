"""Read the input of a plan: a configuration, the sizes of the tensors in its folder, and the model without weights."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..configuration import from_stock, preset
from ..configuration.base import LlamoeBaseConfig
from ..configuration.json_files import read_json
from ..modeling.checkpoints import DTYPES, TensorHeader, find_weights, read_header
from ..modeling.formats.packed import Layout
from ..modeling.quantization import layout_of
from ..modeling.registration import empty_model


@dataclass(frozen=True)
class Source:
    """The input of a plan.

    Attributes:
        config: configuration of any of llamoe's models.
        quantization: `quantization_config` of config.json; None if the weights are not quantized.
        stored: name of each tensor in the files to the name of its dtype and its bytes. If another program has packed
            the weights, these are the bytes that they take after loading. None if there are no files.
        are_safetensors: whether all files are safetensors, from which a single expert can be read.
    """

    config: LlamoeBaseConfig
    quantization: Mapping[str, Any] | None = None
    stored: Mapping[str, tuple[str, int]] | None = None
    are_safetensors: bool = True

    @cached_property
    def model(self) -> Any:
        """Return the model without weights; do not change it."""
        return empty_model(self.config)

    @cached_property
    def layout(self) -> Layout | None:
        """Return the layout of weights that another program has packed; None for llamoe's formats and plain weights."""
        return layout_of(self.quantization) if self.quantization else None

    @property
    def has_stacked_scales(self) -> bool:
        """Return True if one tensor holds the scales of all experts of a layer: then no expert can be read alone."""
        scales = self.layout.in_stacks[1:] if self.layout else ()
        return any(key.endswith(f"_proj{suffix}") for suffix in scales for key in self.stored or ())

    @property
    def method(self) -> str:
        """Return the name of the quantization method; "" for plain weights."""
        method = (self.quantization or {}).get("quant_method", "")
        return str(getattr(method, "value", method))


def read_source(model: Any) -> Source:
    """Read the input of a plan.

    Args:
        model: a configuration of llamoe or transformers, the name of a preset, a folder, a config.json, or a `Source`,
            which is returned as it is.

    Raises:
        ValueError: the folder or file does not exist, or its configuration is of a model that llamoe does not have.
    """
    if isinstance(model, Source):
        return model
    if not isinstance(model, (str, os.PathLike)):
        return _without_files(from_stock(model))
    path = Path(model)
    if not path.exists() and str(model) == path.name:
        return Source(preset(path.name))
    if not path.is_dir():
        return _without_files(from_stock(read_json(path)))
    source, weights = _without_files(from_stock(read_json(path / "config.json"))), find_weights(path)
    if weights is None:
        return source
    stored = {
        key: (
            str(DTYPES.get(header.dtype, header.dtype)).removeprefix("torch."),
            _bytes_when_loaded(key, header, source.layout),
        )
        for file in weights
        for key, header in read_header(file).items()
    }
    are_safetensors = all(str(file).endswith(".safetensors") for file in weights)
    return Source(source.config, source.quantization, stored, are_safetensors)


def _bytes_when_loaded(key: str, header: TensorHeader, layout: Layout | None) -> int:
    """Return the bytes that a tensor of a file takes in the loaded model."""
    kind = key.rpartition(".")[2]
    is_packed = layout is not None and layout.holds(kind, header.dtype)
    return layout.nbytes_loaded(kind, header.nbytes) if is_packed else header.nbytes


def _without_files(config: Any) -> Source:
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    return Source(config, quantization)
