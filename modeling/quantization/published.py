"""Loading of folders that other programs have packed, as int4; `formats.packed` describes their layouts.

The loader's rules for the conversion are in `reading`. The files' headers show which layers are packed. Packed layers
that stay plain here, such as heads and routers, are unpacked to 16 bits.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict

from ...configuration.errors import CheckpointError
from ...configuration.quantization import QuantizationConfig
from ..checkpoints import Stored, headers_of
from ..formats.packed import LAYOUTS, Layout
from ..moe import PLACES

# Tensors beside a packed layer that are ignored: biases of 0, and scales of activations.
_PASSED_OVER = ("bias", "input_scale", "output_scale", "input_zero_point", "activation_scale")
# Scales of a quantized KV cache, beside the attention layers.
_OF_CACHE = ("k_scale", "v_scale", "kv_scale")


def layout_of(stored: Any) -> Layout | None:
    """Return the layout that a folder's `quantization_config` (or its dict) describes; None for other methods.

    Raises:
        ConfigurationError: the method is supported, but not with these settings.
    """
    content: Any = stored if isinstance(stored, dict) else stored.to_dict()
    method = content.get("quant_method")
    # The method may be a member of transformers' enum `QuantizationMethod`.
    maker = LAYOUTS.get(getattr(method, "value", method))
    return maker and maker(content)


def own_config(layout: Layout) -> QuantizationConfig:
    """Return llamoe's config with which such a folder is loaded and saved."""
    return QuantizationConfig("int4", layout.group_size or 128)


Kinds = TypeVar("Kinds")
Matrices = dict[str, dict[str, dict[str, Stored]]]
"""By a weight's name in the model, and by the names of its linear layers in files, the tensors by kind."""


def by_expert(layers: Mapping[str, Kinds]) -> list[list[Kinds]]:
    """List the tensors of a stack's linear layers for each expert, gate before up; empty if none is one by one."""
    experts: dict[int, dict[int, Kinds]] = {}
    for layer, kinds in layers.items():
        if layer.endswith(".experts"):
            continue
        number, part = layer.split(".")[-2:]
        experts.setdefault(int(number), {})[PLACES[part][1]] = kinds
    return [[kinds for _, kinds in sorted(experts[number].items())] for number in sorted(experts)]


def of_stack(layers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors, by kind, that hold all experts of a stack; empty if all are of single experts."""
    return next((kinds for layer, kinds in layers.items() if layer.endswith(".experts")), {})


def find_packed(
    model: PreTrainedModel, files: Iterable[str], layout: Layout, rules: Iterable[Any]
) -> Matrices:
    """Find the model's weights that files store packed.

    Biases that GPTQ's programs write for layers without one are ignored, and so are scales of activations.

    Args:
        model: empty, without packed modules.
        files: of the checkpoint.
        layout: of the packed matrices.
        rules: of transformers' loader, with those of `reading_rules`.

    Raises:
        CheckpointError: an ignored bias is not 0.
    """
    rules, state, headers = list(rules), model.state_dict(), headers_of(files)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def name_in_model(name: str) -> str:
        return rename_source_key(name, renamings, converters, model.base_model_prefix, state)[0]

    matrices: Matrices = {}
    packed = set()
    for stored in headers:
        layer, _, kind = stored.name.rpartition(".")
        if layout.holds(kind, stored.dtype) and (weight := name_in_model(stored.name)) in state:
            matrices.setdefault(weight, {}).setdefault(layer, {})[kind] = stored
            packed.add(layer)
    content = cache(load_state_dict)
    for stored in headers:
        layer, _, kind = stored.name.rpartition(".")
        is_beside = kind in _OF_CACHE or (layer in packed and kind in _PASSED_OVER)
        if not is_beside or name_in_model(stored.name) in state:
            continue
        if kind == "bias" and content(stored.origin)[stored.name][...].any():
            raise CheckpointError(f"{stored} is not 0, but this model's layer has no bias.")
        names = stored.name, name_in_model(stored.name)
        model._keys_passed_over = [*model._keys_passed_over, *(f"^{re.escape(name)}$" for name in names)]
    return matrices


def names_in_16_bit(modules: Iterable[str], packed: Iterable[str]) -> list[str]:
    """Return name suffixes that match exactly the modules that are not packed.

    A suffix is what follows the layer's number, or the full name if that would match a packed module of another layer.
    """
    packed = {*packed}
    ends_packed = {_in_layer(name) for name in packed}
    ends = (
        name[name.find("layers.") :] if _in_layer(name) in ends_packed else _in_layer(name)
        for name in modules
        if name not in packed
    )
    return [*dict.fromkeys(ends)]


def _in_layer(name: str) -> str:
    return re.sub(r".*layers\.\d+\.", "", name)
