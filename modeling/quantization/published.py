"""Find the weights of a folder that another program has packed; `formats.packed` describes the layouts.

The files' headers show which layers are packed. While transformers' loader reads them, the rules in `reading` convert
them to int4; packed layers that int4 is not for, such as heads and routers, become 16-bit weights.
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

# Kinds of tensors of packed layers that are ignored: biases of 0, and scales of activations.
_IGNORED = ("bias", "input_scale", "output_scale", "input_zero_point", "activation_scale")
# Kinds of attention layers' scales for a quantized KV cache, which are ignored.
_OF_CACHE = ("k_scale", "v_scale", "kv_scale")


def layout_of(stored: Any) -> Layout | None:
    """Return the layout that a folder's `quantization_config`, an object or a dict, describes; None for other methods.

    Raises:
        ConfigurationError: the method is supported, but not with these settings.
    """
    content: Any = stored if isinstance(stored, dict) else stored.to_dict()
    method = content.get("quant_method")
    # The method may be a member of transformers' enum `QuantizationMethod`.
    maker = LAYOUTS.get(getattr(method, "value", method))
    return maker and maker(content)


def own_config(layout: Layout) -> QuantizationConfig:
    """Return llamoe's config with which a folder of this layout is loaded and saved."""
    return QuantizationConfig("int4", layout.group_size or 128)


Kinds = TypeVar("Kinds")
Matrices = dict[str, dict[str, dict[str, Stored]]]
"""For a weight's name in the model: for the name of each linear layer in the files, the tensors by kind."""


def by_expert(layers: Mapping[str, Kinds]) -> list[list[Kinds]]:
    """List each expert's linear layers, gate before up; empty if tensors hold all experts."""
    experts: dict[int, dict[int, Kinds]] = {}
    for layer, kinds in layers.items():
        if layer.endswith(".experts"):
            continue
        number, part = layer.split(".")[-2:]
        experts.setdefault(int(number), {})[PLACES[part][1]] = kinds
    return [[kinds for _, kinds in sorted(experts[number].items())] for number in sorted(experts)]


def of_stack(layers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors that hold all experts, by kind; empty if each expert has tensors of its own."""
    return next((kinds for layer, kinds in layers.items() if layer.endswith(".experts")), {})


def find_packed(
    model: PreTrainedModel, files: Iterable[str], layout: Layout, rules: Iterable[Any]
) -> Matrices:
    """Find the weights of a model that files store packed.

    Scales of activations are added to the names that the model ignores, and so are biases of 0, which GPTQ's programs
    write for layers without a bias.

    Args:
        model: the empty model, not yet packed.
        files: of the checkpoint.
        layout: of the packed matrices.
        rules: of transformers' loader, including those of `reading_rules`.

    Raises:
        CheckpointError: a bias that the model does not have is not 0.
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
        is_beside = kind in _OF_CACHE or (layer in packed and kind in _IGNORED)
        if not is_beside or name_in_model(stored.name) in state:
            continue
        if kind == "bias" and content(stored.origin)[stored.name][...].any():
            raise CheckpointError(f"{stored} is not 0, but this model's layer has no bias.")
        names = stored.name, name_in_model(stored.name)
        model._keys_passed_over = [*model._keys_passed_over, *(f"^{re.escape(name)}$" for name in names)]
    return matrices


def names_in_16_bit(modules: Iterable[str], packed: Iterable[str]) -> list[str]:
    """Return name suffixes that match the modules that are not packed, and no others.

    A suffix is the name after the layer's number. If that would match a packed module of another layer, it begins with
    "layers".
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
