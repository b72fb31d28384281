"""The parts of a model that a device holds whole, with their bytes: of a configuration, or of a folder's files.

A part is a layer of a decoder or a tower, or what stands beside the layers. A mixture's routed experts count by
themselves, as they may be elsewhere.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..configuration import (
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeMixtralConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
    from_stock,
    preset,
)
from ..configuration.base import LlamoeBaseConfig
from ..configuration.json_files import read_json
from ..configuration.quantization import METHOD
from ..modeling.checkpoints import find_weights, read_header
from ..modeling.checkpoints.safetensors_files import DTYPE_BITS
from ..modeling.decoder import LlamoeDenseForCausalLM, LlamoeForCausalLM, LlamoeMixtralForCausalLM
from ..modeling.multimodal import LlamoeForConditionalGeneration
from ..modeling.vision import LlamoeVisionModel

_CLASSES = {
    LlamoeConfig: LlamoeForConditionalGeneration,
    LlamoeTextConfig: LlamoeForCausalLM,
    LlamoeDenseConfig: LlamoeDenseForCausalLM,
    LlamoeMixtralConfig: LlamoeMixtralForCausalLM,
    LlamoeVisionConfig: LlamoeVisionModel,
}
# Bytes of a linear layer, or of an expert's matrix, as bitsandbytes stores it, from its rows and its number of weights.
_QUANTIZED: dict[int, Callable[[int, int], int]] = {
    # A float32 scale for each row.
    8: lambda rows, numbers: numbers + 4 * rows,
    # Half a byte for each weight, and a float32 scale for each 64 weights.
    4: lambda rows, numbers: -(-numbers // 2) + 4 * -(-numbers // 64),
}
BITS = (32, 16, 8, 4)


@dataclass(frozen=True)
class Unit:
    """A part of the model that a device holds whole.

    Attributes:
        name: of the module or parameter.
        weights: bytes, without routed experts.
        experts_name: of its routed experts; "" without.
        experts: bytes of all of its routed experts.
        num_experts: their number.
        cache: bytes of keys and values at their fullest.
        is_read: whether a token that is generated reads all of its weights, as it does not of an embedding or a tower.
        tied_to: name of the unit that has its weights, too; "" for none.
    """

    name: str
    weights: int
    experts_name: str = ""
    experts: int = 0
    num_experts: int = 0
    cache: int = 0
    is_read: bool = True
    tied_to: str = ""

    @property
    def one_expert(self) -> int:
        """Bytes of one expert."""
        return -(-self.experts // self.num_experts) if self.num_experts else 0


@dataclass(frozen=True)
class Sizes:
    """A model by its parts.

    Attributes:
        units: in the order in which they run.
        parts: part of the model to its parameters and bytes.
        form: dtype or format of the weights, as text.
        element_size: bytes of a number in the cache.
        chosen: experts that a token is given in each mixture; 0 without mixtures.
        may_leave: whether routed experts can be elsewhere, which takes safetensors files, plain or in llamoe's formats.
    """

    units: tuple[Unit, ...]
    parts: dict[str, tuple[int, int]] = field(repr=False)
    form: str
    element_size: int
    chosen: int
    may_leave: bool = True

    @property
    def weights(self) -> int:
        """Bytes of everything but routed experts."""
        return sum(unit.weights for unit in self.units)

    @property
    def experts(self) -> int:
        """Bytes of all routed experts."""
        return sum(unit.experts for unit in self.units)

    @property
    def cache(self) -> int:
        """Bytes of keys and values."""
        return sum(unit.cache for unit in self.units)

    def with_cache(self, per_layer: list[int], layer_names: list[str]) -> "Sizes":
        """The same, where each layer has its cache."""
        found = dict(zip(layer_names, per_layer, strict=True))
        return replace(self, units=tuple(replace(unit, cache=found.get(unit.name, 0)) for unit in self.units))


def read_config(model: Any) -> tuple[LlamoeBaseConfig, Path | None]:
    """The configuration of a preset, a folder or a config.json, ours or stock, and the folder if it has weights.

    Raises:
        ValueError: there is no such thing, or it describes no model of ours.
    """
    if not isinstance(model, (str, os.PathLike)):
        if not isinstance(model, (PreTrainedConfig, Mapping)):
            raise ValueError(
                f"{type(model).__name__}: give a configuration, the name of a preset, a config.json, or a folder."
            )
        config: Any = model if type(model) in _CLASSES else from_stock(model)
        return config, None
    if not str(model):
        raise ValueError("'': give the name of a preset, a config.json, or a folder.")
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if file.name == "config.json":
            raise ValueError(f"no such file: {file}")
        if "/" in str(model):
            raise ValueError(f"no such folder or file: {model}")
        return preset(str(model)), None
    content = read_json(file)
    try:
        config = from_stock(content)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{file}: {error}") from error
    has_weights = path.is_dir() and find_weights(path) is not None
    return config, path if has_weights else None


def build(config: LlamoeBaseConfig) -> nn.Module:
    """The model without weights."""
    with torch.device("meta"):
        return _CLASSES[type(config)](config)  # pyright: ignore[reportArgumentType]


def layer_names(model: Any) -> list[str]:
    """Names of the decoder's layers."""
    if isinstance(model, LlamoeVisionModel):
        return []
    names = {module: name for name, module in model.named_modules()}
    return [names[layer] for layer in model.get_decoder().layers]


def sizes_of(config: LlamoeBaseConfig, folder: Path | None, bits: int | None) -> Sizes:
    """The parts of a model and their bytes.

    Args:
        config: of any of our models.
        folder: whose files say the bytes, unless `bits` asks for others; None: computed from `bits`, 16 by default.
        bits: of a weight: 32, 16, or 8 or 4 of linear layers and routed experts as bitsandbytes stores them.

    Raises:
        ValueError: other bits, or any for weights that are stored in few bits already.
    """
    stored = getattr(config, "quantization_config", None)
    if bits is not None and (isinstance(bits, bool) or bits not in BITS):
        raise ValueError(f"bits={bits!r}: choose 32, 16, 8 or 4.")
    if stored and bits is not None:
        raise ValueError(f"bits={bits}: this model is stored in few bits already: leave bits out.")
    if stored and folder is None:
        raise ValueError(
            "This configuration is of weights in few bits, whose sizes only their files say: give the folder with "
            "the weights."
        )
    model: Any = build(config)
    text = config.get_text_config()
    chosen = text.num_experts_per_tok if getattr(text, "moe_layers", None) else 0
    units = list(_units(model))
    tied = _tied(model)
    if folder is not None and bits is None:
        headers = _headers(folder)
        held = _held_in_files(headers, units, tied)
        form = _form_of(headers, stored)
        element_size = 4 if form == "float32" else 2
    else:
        held = _computed(model, units, bits or 16)
        form = {32: "float32", 16: "bfloat16", 8: "int8", 4: "int4"}[bits or 16]
        element_size = 4 if bits == 32 else 2
    numbers = {name: tensor.numel() for name, tensor in model.named_parameters()}
    result, parts = [], {}
    for unit in units:
        own = [size for name, size in held[unit] if not _is_expert(name)]
        routed = [size for name, size in held[unit] if _is_expert(name)]
        experts_name = next((n for n in _modules_below(model, unit) if n.endswith(".experts")), "")
        result.append(
            Unit(
                unit,
                0 if unit in tied else sum(own),
                experts_name,
                sum(routed),
                model.get_submodule(experts_name).num_experts if experts_name else 0,
                # An embedding gives one row; as the head, too, it is read whole.
                is_read=not _is_passed_over(unit)
                or unit in tied.values()
                or isinstance(model, LlamoeVisionModel),
                tied_to=tied.get(unit, ""),
            )
        )
        for name, size in held[unit] if unit not in tied else ():
            part = part_of(name)
            count, total = parts.get(part, (0, 0))
            parts[part] = (count, total + size)
    for name, count in numbers.items():
        part = part_of(name)
        total_count, total = parts.get(part, (0, 0))
        parts[part] = (total_count + count, total)
    return Sizes(tuple(result), parts, form, element_size, chosen, _may_leave(stored, folder))


def _may_leave(quantization: Any, folder: Path | None) -> bool:
    if folder is not None and not all(
        str(file).endswith(".safetensors") for file in getattr(find_weights(folder), "files", ())
    ):
        return False
    return not quantization or _method(quantization) == METHOD


def _method(quantization: Any) -> str:
    content = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = content.get("quant_method", "")
    return str(getattr(method, "value", method))


def part_of(name: str) -> str:
    """The row of a table of parts that a parameter counts in."""
    parts = r"embed_tokens|lm_head|self_attn|feed_forward\.experts|mlp\.experts|feed_forward|mlp"
    name = re.sub(r"\.\d+\.", ".*.", name)
    if name.startswith(("vision_model.", "multi_modal_projector.")):
        return name.partition(".")[0]
    if "norm" in name:
        return "norms"
    found = re.match(rf".*?({parts})", name)
    return found[0] if found else name.partition(".")[0]


def _units(model: Any) -> Iterator[str]:
    """Names of the units, in the order in which they stand in the model."""
    layers = {
        name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules
    }

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, _ in module.named_parameters(prefix.removesuffix("."), recurse=False):
            yield name
        for own_name, child in module.named_children():
            name = prefix + own_name
            if name in layers or not any(layer.startswith(f"{name}.") for layer in layers):
                if any(True for _ in child.parameters()) or name in layers:
                    yield name
            else:
                yield from walk(child, f"{name}.")

    yield from walk(model, "")


def _tied(model: Any) -> dict[str, str]:
    """The head's unit to the embedding's, where they share their weights."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    embedding = None if head is None else model.get_input_embeddings()
    if embedding is None or not model.config.get_text_config().tie_word_embeddings:
        return {}
    names = {module: name for name, module in model.named_modules()}
    return {names[head]: names[embedding]}


def _is_passed_over(name: str) -> bool:
    return name.startswith(("vision_model.", "multi_modal_projector")) or name.endswith("embed_tokens")


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _modules_below(model: nn.Module, name: str) -> list[str]:
    try:
        module = model.get_submodule(name)
    except AttributeError:  # A parameter.
        return []
    return [f"{name}.{own}" for own, _ in module.named_modules() if own]


def _computed(model: Any, units: list[str], bits: int) -> dict[str, list[tuple[str, int]]]:
    """Unit to the names and bytes of its tensors, with so many bits."""
    size_of = _QUANTIZED.get(bits)
    plain = max(2, bits // 8)
    modules = dict(model.named_modules())
    held: dict[str, list[tuple[str, int]]] = {unit: [] for unit in units}
    for name, tensor in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        size = plain * tensor.numel()
        is_kept = owner is model.get_output_embeddings() or "patch_embedding" in name
        if size_of is not None and _is_expert(name):
            hidden, inner = owner.hidden_and_intermediate_size
            rows, matrices = (inner, 2) if name.endswith("gate_up_proj") else (hidden, 1)
            size = matrices * owner.num_experts * size_of(rows, hidden * inner)
        elif size_of is not None and isinstance(owner, nn.Linear) and name.endswith("weight") and not is_kept:
            size = size_of(len(tensor), tensor.numel())
        held[_owner(name, held)].append((name, size))
    return held


def _owner(name: str, units: Any) -> str:
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name


def _headers(folder: Path) -> dict[str, tuple[str, int]]:
    """Key to dtype and bytes, of all tensors in a folder's files."""
    found = {}
    for file in getattr(find_weights(folder), "files", ()):
        for key, header in read_header(file).items():
            found[key] = header.dtype, math.prod(header.shape) * DTYPE_BITS[header.dtype] // 8
    return found


def _held_in_files(
    headers: dict[str, tuple[str, int]], units: list[str], tied: dict[str, str]
) -> dict[str, list[tuple[str, int]]]:
    """Unit to the names and bytes of its tensors as they are stored; what fits no unit is nobody's."""
    by_stem = {_stem(unit): unit for unit in units}
    held: dict[str, list[tuple[str, int]]] = {unit: [] for unit in units}
    for key, (_, size) in headers.items():
        unit = by_stem.get(_owner(_stem(key), by_stem))
        if unit is not None and unit not in tied:
            # Under the model's own name of the unit, so that parts of a table are those of its parameters.
            stem = _stem(unit)
            held[unit].append((unit + _stem(key)[len(stem) :].replace(".block_sparse_moe.", ".mlp."), size))
    return held


def _stem(name: str) -> str:
    """A name without what a model with or without head puts before it; of the tower's names none begins so."""
    return re.sub(r"^(language_model\.|model\.)+", "", name)


def _form_of(headers: dict[str, tuple[str, int]], quantization: Any) -> str:
    if quantization:
        content = quantization if isinstance(quantization, dict) else quantization.to_dict()
        bits = 4 if content.get("load_in_4bit") else 8 if content.get("load_in_8bit") else ""
        return f"{_method(quantization)} {content.get('weights', bits)}".strip()
    sizes: dict[str, int] = {}
    for dtype, size in headers.values():
        sizes[dtype] = sizes.get(dtype, 0) + size
    largest = max(sizes, key=lambda dtype: sizes[dtype], default="BF16")
    return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(largest, largest)
