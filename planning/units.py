"""List a model's units with their bytes. A unit is never divided among devices.

It is a layer of a decoder or a vision tower, or a module outside of the layers. The routed experts of a mixture are
counted apart, as they may be offloaded.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ..configuration import LlamoeVisionConfig, QuantizationConfig
from ..configuration.base import LlamoeBaseConfig
from ..configuration.quantization import METHOD
from ..modeling.checkpoints import owner_of, sum_by_part
from ..modeling.formats import Bnb
from ..modeling.quantization import LlamoeQuantizer, QuantizedExperts, QuantizedLinear
from ..modeling.registration import empty_model
from .source import Source

# Dtype or format by the bits of a weight.
_FORMS = {32: "float32", 16: "bfloat16", 8: "int8", 4: "int4"}
# How bitsandbytes stores a linear layer, or a matrix of an expert, by the bits of a weight.
_FORMATS = {8: Bnb(torch.bfloat16, "int8"), 4: Bnb(torch.bfloat16, "nf4")}


@dataclass(frozen=True)
class Unit:
    """A part of the model that is placed on one device.

    Attributes:
        name: name of the module or parameter.
        weights: bytes of its weights without routed experts.
        experts_name: name of the module of its routed experts; "" if it has none.
        experts: bytes of all of its routed experts.
        num_experts: number of its routed experts.
        cache: bytes of its full KV cache.
        is_read: whether each generated token reads all of its weights; False for embeddings and vision towers.
        tied_to: name of the unit that shares its weights; "" if none does.
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
        parts: part of the model to its numbers of parameters and of bytes.
        form: dtype or format of the weights, as text.
        chosen: number of experts of a token in each mixture; 0 without mixtures.
        may_leave: whether routed experts can be offloaded: in safetensors files, plain, in llamoe's formats, or in a
            layout of `formats.packed` that stores each expert by itself.
        is_packed: whether weights are in llamoe's formats or a layout of `formats.packed`, which cannot stay on disk,
            except for experts.
    """

    units: tuple[Unit, ...]
    layers: tuple[str, ...]
    parts: dict[str, tuple[int, int]] = field(repr=False)
    form: str
    chosen: int
    may_leave: bool = True
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
    def least(self) -> int:
        """Return the bytes of one expert of each different size, together: the least size of an expert cache."""
        return sum({unit.one_expert for unit in self.units}) if self.may_leave else 0

    def with_cache(self, per_layer: list[int]) -> "Sizes":
        """Return a copy with the cache bytes of each decoder layer."""
        cache = dict(zip(self.layers, per_layer, strict=True))
        return replace(self, units=tuple(replace(unit, cache=cache.get(unit.name, 0)) for unit in self.units))


def sizes_of(source: Source, bits: int | None, quantization: QuantizationConfig | None = None) -> Sizes:
    """Compute the bytes of each part of a model.

    Args:
        source: the model. Without `bits` and `quantization` the bytes are those of its files, or computed for 16 bits
            if it has none.
        bits: bits of a weight: 32, 16, or 8 or 4, which bitsandbytes applies to linear layers and routed experts.
        quantization: one of llamoe's formats.

    Raises:
        ValueError: other bits, or any for weights that are quantized already; both arguments; a format that cannot
            store one of the weights.
    """
    if bits is not None and (isinstance(bits, bool) or bits not in _FORMS):
        raise ValueError(f"bits={bits!r}: choose 32, 16, 8 or 4.")
    if bits is not None and quantization is not None:
        raise ValueError(f"bits={bits} and quantization={quantization.weights!r}: give one of them.")
    if source.quantization and (bits or quantization):
        raise ValueError("This model is quantized already: leave bits and quantization out.")
    if source.quantization and source.stored is None:
        raise ValueError(
            "This configuration has quantized weights, and only files tell their sizes: give the folder with the "
            "weights."
        )
    model, text = source.model, source.config.get_text_config()
    if quantization is not None:
        form, sizes = f"{METHOD} {quantization.weights}", packed_bytes(source.config, quantization)
    elif source.stored is not None and bits is None:
        form, sizes = _form_of(source), {key: size for key, (_, size) in source.stored.items()}
    else:
        form, sizes = _FORMS[bits or 16], weight_bytes(model, bits or 16)
    tied, held = _tied(model), _held(sizes, _units(model))
    # A tied head adds no bytes, even if the files store it.
    held |= {unit: [] for unit in tied}
    is_tower = isinstance(source.config, LlamoeVisionConfig)
    names = {module: name for name, module in model.named_modules()}
    experts = {name: module for module, name in names.items() if name.endswith(".experts")}
    # Stacks of experts that are packed whole cannot be read expert by expert.
    reads_single_experts = source.layout is not None and not source.has_stacked_scales
    numbers = ((name, tensor.numel(), 0) for name, tensor in model.named_parameters())
    stored = ((name, 0, size) for tensors in held.values() for name, size in tensors)
    return Sizes(
        units=tuple(
            _unit(unit, tensors, experts, tied.get(unit, ""), is_tower or unit in tied.values())
            for unit, tensors in held.items()
        ),
        layers=() if is_tower else tuple(names[layer] for layer in model.get_decoder().layers),
        parts=sum_by_part([*numbers, *stored], is_tower),
        form=form,
        chosen=text.num_experts_per_tok if getattr(text, "moe_layers", None) else 0,
        may_leave=source.are_safetensors
        and (not source.quantization or source.method == METHOD or reads_single_experts),
        is_packed=bool(source.quantization or quantization) or bits in (4, 8),
    )


def weight_bytes(model: Any, bits: int) -> dict[str, int]:
    """Compute the bytes of each weight by name, in 32 or 16 bits, or in 8 or 4 bits of bitsandbytes' formats.

    bitsandbytes quantizes linear layers and routed experts. Embeddings, routers, norms, the head and the tower's patch
    embedding stay in 16 bits.
    """
    form = _FORMATS.get(bits)
    modules = dict(model.named_modules())
    sizes = {}
    for name, tensor in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        is_kept = owner is model.get_output_embeddings() or "patch_embedding" in name
        sizes[name] = max(2, bits // 8) * tensor.numel()
        if form is not None and _is_expert(name):
            stack = name.rpartition(".")[2]
            stack_format = replace(form, count=2 if stack == "gate_up_proj" else 1)
            sizes[name] = owner.num_experts * stack_format.nbytes(owner.sizes_of(stack))
        elif form is not None and isinstance(owner, nn.Linear) and name.endswith("weight") and not is_kept:
            sizes[name] = form.nbytes(tuple(tensor.shape))
    return sizes


def packed_bytes(
    config: LlamoeBaseConfig, quantization: QuantizationConfig, are_stored: bool = False
) -> dict[str, int]:
    """Compute the bytes of each weight by name in llamoe's formats; tied weights are counted once.

    Args:
        config: configuration of the model.
        quantization: format of the weights.
        are_stored: whether the weights are quantized already; it only changes the advice in errors.

    Raises:
        ValueError: the format cannot store one of the weights, or the model has none to quantize.
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
        # A step reads one embedding row, but a tied head whole.
        is_read=is_read
        or not name.startswith(("vision_model.", "multi_modal_projector"))
        and not name.endswith("embed_tokens"),
        tied_to=tied_to,
    )


def _units(model: Any) -> list[str]:
    """Return the names of the units in the model's order: layers, and modules or parameters outside of layers."""
    layers = [name for name, part in model.named_modules() if type(part).__name__ in model._no_split_modules]
    holders = {path for layer in layers for path in _paths(layer) if path != layer}
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return list(dict.fromkeys(next(path for path in _paths(name) if path not in holders) for name in names))


def _paths(name: str) -> Iterator[str]:
    """Yield the names of all parents of a module, outermost first, then its own name."""
    return accumulate(name.split("."), "{}.{}".format)


def _tied(model: Any) -> dict[str, str]:
    """Map the head's name to the embedding's if they share weights; else return an empty dictionary."""
    head = model.get_output_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return {}
    names = {module: name for name, module in model.named_modules()}
    return {names[head]: names[model.get_input_embeddings()]}


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _held(sizes: Mapping[str, int], units: list[str]) -> dict[str, list[tuple[str, int]]]:
    """Group the names and bytes of tensors by unit; tensors that fit no unit are left out."""
    by_stem = {_stem(unit): unit for unit in units}
    held: dict[str, list[tuple[str, int]]] = {unit: [] for unit in units}
    for key, size in sizes.items():
        stem = owner_of(_stem(key), by_stem)
        if unit := by_stem.get(stem):
            # Named as in the model, so that `sum_by_part` counts it in the same part as the model's parameters.
            held[unit].append((unit + _stem(key)[len(stem) :].replace(".block_sparse_moe.", ".mlp."), size))
    return held


def _stem(name: str) -> str:
    """Remove the prefixes that only models with a head or a tower have, to compare names of both."""
    return re.sub(r"^(language_model\.|model\.)+", "", name)


def _form_of(source: Source) -> str:
    if source.layout is not None:
        return f"{METHOD} int4" if source.layout.is_int4 else "bfloat16"
    if content := source.quantization:
        bits = 4 if content.get("load_in_4bit") else 8 if content.get("load_in_8bit") else ""
        return f"{source.method} {content.get('weights', bits)}".strip()
    sizes: Counter[str] = Counter()
    for dtype, size in (source.stored or {}).values():
        sizes[dtype] += size
    return max(sizes, key=sizes.__getitem__, default="bfloat16")
