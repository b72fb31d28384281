"""List a model's units with their bytes. A unit is a part of the model that is never divided among devices.

A unit is a layer of the decoder or of the vision tower, or a module outside the layers. The bytes of a layer's routed
experts are counted separately, because the experts may be offloaded while the rest of the layer is not.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from ..configuration import LlamoeVisionConfig, QuantizationConfig
from ..configuration.base import LlamoeBaseConfig
from ..configuration.quantization import METHOD
from ..modeling.checkpoints import owner_of, sum_by_part
from ..modeling.quantization import LlamoeQuantizer, QuantizedExperts, QuantizedLinear
from ..modeling.registration import empty_model
from .source import Source

# Dtype of a plain weight by its bits.
_DTYPES = {32: "float32", 16: "bfloat16"}


@dataclass(frozen=True)
class Unit:
    """A layer, or a module outside the layers, which is placed on one device.

    Attributes:
        name: name of the module or parameter.
        weights: bytes of its weights without routed experts.
        experts_name: name of the module with its routed experts; "" without experts.
        experts: bytes of all its routed experts.
        num_experts: number of its routed experts.
        cache: bytes of its KV cache when it is full.
        is_read: whether each generated token reads all of its weights; False for embeddings and vision towers.
        tied_to: name of the unit whose weights it shares (the embedding, for a tied output head); "" without one.
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
        """Return the bytes of one expert."""
        return -(-self.experts // self.num_experts) if self.num_experts else 0


@dataclass(frozen=True)
class Sizes:
    """The bytes of a model's parts.

    Attributes:
        units: in the order in which they run.
        layers: names of the units that are decoder layers.
        parts: name of each part of the model to its number of parameters and its bytes.
        form: dtype or format of the weights, as text.
        chosen: number of experts of a token in each mixture; 0 without mixtures.
        may_offload_experts: whether single experts can be read from the files. They can in safetensors files, if the
            weights are plain, in llamoe's formats, or packed by another program expert by expert.
        is_packed: whether the weights are quantized. Then nothing but experts may stay on disk.
    """

    units: tuple[Unit, ...]
    layers: tuple[str, ...]
    parts: dict[str, tuple[int, int]] = field(repr=False)
    form: str
    chosen: int
    may_offload_experts: bool = True
    is_packed: bool = False

    @property
    def element_size(self) -> int:
        """Return the bytes per element of the KV cache."""
        return 4 if self.form == "float32" else 2

    @property
    def experts(self) -> int:
        """Return the bytes of all routed experts."""
        return sum(unit.experts for unit in self.units)

    @property
    def smallest_cache(self) -> int:
        """Return the least bytes of a cache of offloaded experts: it holds one expert of each different size."""
        return sum({unit.one_expert for unit in self.units}) if self.may_offload_experts else 0

    def with_cache(self, per_layer: list[int]) -> "Sizes":
        """Return a copy with the KV cache bytes of each decoder layer."""
        cache = dict(zip(self.layers, per_layer, strict=True))
        return replace(self, units=tuple(replace(unit, cache=cache.get(unit.name, 0)) for unit in self.units))


def sizes_of(source: Source, bits: int | None, quantization: QuantizationConfig | None = None) -> Sizes:
    """Compute the bytes of each part of a model.

    Args:
        source: the model. Without `bits` and `quantization` the bytes are those of its files, or those of 16-bit
            weights if it has no files.
        bits: bits of a plain weight: 32 or 16.
        quantization: one of llamoe's formats.

    Raises:
        ValueError: the arguments are wrong or contradict each other, the model is quantized already or its quantized
            files are missing, or the format cannot store one of the weights.
    """
    if bits is not None and quantization is not None:
        raise ValueError(f"bits={bits} and quantization={quantization.weights!r}: give only one of them.")
    if bits is not None and bits not in _DTYPES:
        raise ValueError(f"bits={bits!r}: choose 32, 16, 8 or 4.")
    if source.quantization and (bits or quantization):
        raise ValueError("This model is quantized already: leave bits and quantization out.")
    if source.quantization and source.stored is None:
        raise ValueError(
            "This configuration is of quantized weights, whose sizes stand only in their files: give the folder with "
            "the weights."
        )
    model, text = source.model, source.config.get_text_config()
    if quantization is not None:
        form, sizes = f"{METHOD} {quantization.weights}", packed_bytes(source.config, quantization)
    elif source.stored is not None and bits is None:
        form, sizes = _form_of(source), {key: size for key, (_, size) in source.stored.items()}
    else:
        form, sizes = _DTYPES[bits or 16], weight_bytes(model, bits or 16)
    tied, tensors_of = _tied_head(model), _by_unit(sizes, _unit_names(model))
    # A tied head adds no bytes, even if the files store it.
    tensors_of |= {unit: [] for unit in tied}
    is_tower = isinstance(source.config, LlamoeVisionConfig)
    names = {module: name for name, module in model.named_modules()}
    experts = {name: module for module, name in names.items() if name.endswith(".experts")}
    has_single_experts = source.layout is not None and not source.has_stacked_scales
    numbers = ((name, tensor.numel(), 0) for name, tensor in model.named_parameters())
    stored = ((name, 0, size) for tensors in tensors_of.values() for name, size in tensors)
    return Sizes(
        units=tuple(
            _unit(unit, tensors, experts, tied.get(unit, ""), is_tower or unit in tied.values())
            for unit, tensors in tensors_of.items()
        ),
        layers=() if is_tower else tuple(names[layer] for layer in model.get_decoder().layers),
        parts=sum_by_part([*numbers, *stored], is_tower),
        form=form,
        chosen=text.num_experts_per_tok if getattr(text, "moe_layers", None) else 0,
        may_offload_experts=source.are_safetensors
        and (not source.quantization or source.method == METHOD or has_single_experts),
        is_packed=bool(source.quantization or quantization),
    )


def weight_bytes(model: Any, bits: int) -> dict[str, int]:
    """Compute the bytes of each plain weight by name, with `bits` bits for a number."""
    return {name: bits // 8 * tensor.numel() for name, tensor in model.named_parameters()}


def packed_bytes(
    config: LlamoeBaseConfig, quantization: QuantizationConfig, are_stored: bool = False
) -> dict[str, int]:
    """Compute the bytes of each weight by name in llamoe's formats; tied weights are counted once.

    Args:
        config: configuration of the model.
        quantization: format of the weights.
        are_stored: whether the weights are quantized already; this only changes the advice in error messages.

    Raises:
        ValueError: the format cannot store one of the weights, or the model has no weights to quantize.
    """
    model: Any = empty_model(config)
    LlamoeQuantizer(quantization, pre_quantized=are_stored).preprocess_model(model)
    packed = {
        name
        for name, module in model.named_modules()
        if isinstance(module, (QuantizedExperts, QuantizedLinear))
    }
    named = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return {
        name: tensor.numel() * (tensor.element_size() if name.rpartition(".")[0] in packed else 2)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if named[id(tensor)] == name
    }


def _unit(
    name: str, tensors: list[tuple[str, int]], experts: dict[str, Any], tied_to: str, is_read: bool
) -> Unit:
    routed = sum(size for tensor, size in tensors if _is_expert(tensor))
    experts_name = next((path for path in experts if path.startswith(f"{name}.")), "")
    return Unit(
        name,
        sum(size for _, size in tensors) - routed,
        experts_name,
        routed,
        experts[experts_name].num_experts if experts_name else 0,
        # A step reads one row of the embedding, or all of it if it is the tied output head, too.
        is_read=is_read
        or not name.startswith(("vision_model.", "multi_modal_projector"))
        and not name.endswith("embed_tokens"),
        tied_to=tied_to,
    )


def _unit_names(model: Any) -> list[str]:
    """Return the names of the units in the model's order: layers, and modules or parameters outside the layers."""
    layers = [
        name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules
    ]
    # Modules that contain layers may be divided, so each of their other children is a unit.
    holders = {path for layer in layers for path in _paths(layer) if path != layer}
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return list(dict.fromkeys(next(path for path in _paths(name) if path not in holders) for name in names))


def _paths(name: str) -> Iterator[str]:
    """Yield the names of all parents of a module, outermost first, and last the module's name."""
    return accumulate(name.split("."), "{}.{}".format)


def _tied_head(model: Any) -> dict[str, str]:
    """Map the output head's name to the embedding's if they share weights; else return an empty dictionary."""
    head = model.get_output_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return {}
    names = {module: name for name, module in model.named_modules()}
    return {names[head]: names[model.get_input_embeddings()]}


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _by_unit(sizes: Mapping[str, int], units: list[str]) -> dict[str, list[tuple[str, int]]]:
    """Group the names and bytes of tensors by unit; tensors that belong to no unit are left out."""
    by_stem = {_stem(unit): unit for unit in units}
    tensors_of: dict[str, list[tuple[str, int]]] = {unit: [] for unit in units}
    for key, size in sizes.items():
        stem = owner_of(_stem(key), by_stem)
        if unit := by_stem.get(stem):
            # The model's own name, so that `sum_by_part` adds the bytes to the part that has the parameter.
            name = unit + _stem(key)[len(stem) :].replace(".block_sparse_moe.", ".mlp.")
            tensors_of[unit].append((name, size))
    return tensors_of


def _stem(name: str) -> str:
    """Remove the prefixes that models with a head or a tower add, so that names of all model classes compare."""
    return re.sub(r"^(language_model\.|model\.)+", "", name)


def _form_of(source: Source) -> str:
    """Return the format of the files' weights, or the dtype that takes the most bytes in them."""
    if source.layout is not None:
        return f"{METHOD} int4" if source.layout.is_int4 else "bfloat16"
    if content := source.quantization:
        bits = 4 if content.get("load_in_4bit") else 8 if content.get("load_in_8bit") else ""
        return f"{source.method} {content.get('weights', bits)}".strip()
    sizes: Counter[str] = Counter()
    for dtype, size in (source.stored or {}).values():
        sizes[dtype] += size
    return max(sizes, key=sizes.__getitem__, default="bfloat16")
