"""The quantizer that transformers calls to load, save and dequantize models in llamoe's formats.

transformers finds it, and `QuantizationConfig`, by `quant_method="llamoe"`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...configuration import LlamoeVisionConfig
from ...configuration.errors import ConfigurationError
from ...configuration.hub import is_ours, is_saving_stock
from ...configuration.quantization import METHOD, QuantizationConfig
from ..checkpoints import current_loading
from ..formats import Format, format_of
from ..formats.packed import Layout
from ..layers import Linear
from ..moe import Experts
from .packed import QuantizedExperts, QuantizedLinear, packed_modules
from .packed_quantizer import PackedQuantizer
from .published import Matrices, find_packed, names_in_16_bit

# What classes with a head, and multimodal ones, put in front of the names of layers.
_PREFIX = re.compile(r"^(language_model\\?\.)?(model\\?\.)?(?=layers\\?\.)")


def format_for(config: QuantizationConfig) -> Format:
    """Return the format that a config describes."""
    size = "" if config.group_size is None else f":{config.group_size}"
    form: Any = format_of(config.weights + size)
    chosen = {"search": config.search, "in_bytes": config.activations == "int8"}
    return replace(form, **{name: value for name, value in chosen.items() if hasattr(form, name)})


def take_activations(stored: Any, options: dict[str, Any]) -> str | None:
    """Return the `activations` that a user requests for a packed folder; None means those of the folder.

    transformers warns that it ignores a `quantization_config` if the folder has one. If the two agree except for
    `activations`, the user's is removed from `options`, the arguments of `from_pretrained`, to avoid this warning.
    """
    own, asked = (
        QuantizationConfig(**config)
        if isinstance(config, dict) and config.get("quant_method") == METHOD
        else config
        for config in (stored, options.get("quantization_config"))
    )
    if not isinstance(own, QuantizationConfig) or not isinstance(asked, QuantizationConfig):
        return None
    fields = ["experts", "linears", "modules_to_not_convert", *asked.given - {"activations"}]
    if all(getattr(own, field) == getattr(asked, field) for field in fields):
        del options["quantization_config"]
    return asked.activations if "activations" in asked.given else None


class LlamoeQuantizer(PackedQuantizer):
    """The quantizer for llamoe's formats, as which it also loads folders of other programs (`published`)."""

    quantization_config: QuantizationConfig
    # Adapters can be trained beside packed weights, whose products are custom operators for torch.compile.
    is_trainable = True  # pyright: ignore[reportAssignmentType]
    is_compileable = True  # pyright: ignore[reportAssignmentType]

    @property
    def checks_shapes(self) -> bool:
        """True if `checkpoints` shall compare the files' tensors with the model's: not if files are converted."""
        return self.layout is None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise a `ValueError` if a device map puts modules on disk: they would be read without being quantized."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map puts quantized modules on disk, from where only routed experts can be read: write "
                'device_map={"experts": "disk"}, or put the modules on "cpu".'
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return bfloat16, in which products are computed; the given dtype if the folder becomes plain weights."""
        layout = current_loading().layout
        return torch.bfloat16 if layout is None or layout.is_int4 else dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config = self.quantization_config
        if not any(map(is_ours, type(model).__mro__)):
            raise ConfigurationError(
                f"{type(model).__name__} is transformers' own class, whose experts llamoe does not quantize. Call "
                "llamoe.adopt() before from_pretrained: the Auto classes then return llamoe's classes."
            )
        if self.pre_quantized and (activations := current_loading().activations):
            config.activations = activations
        candidates = dict(self._candidates(model))
        if layout := current_loading().layout:
            matrices = self.read_published(model, kwargs.get("checkpoint_files") or (), layout)
            current_loading().matrices = matrices
            if not layout.is_int4:
                # transformers then removes config and quantizer after loading, since the model is plain.
                config.dequantize = True  # pyright: ignore[reportAttributeAccessIssue]
                return
        form = format_for(config)
        for name, module in candidates.items():
            if is_kept(name, config.modules_to_not_convert or ()):
                continue
            with torch.device("meta"):
                packed = (QuantizedExperts if isinstance(module, Experts) else QuantizedLinear)(module, form)
            for weight, sizes in packed.sizes.items():
                if why := form.refusal(sizes):
                    raise ConfigurationError(
                        f"{name}.{weight} cannot be stored as {form.exact.key}: {why}. Choose int8, or name "
                        f"{name.rpartition('.')[2]!r} in modules_to_not_convert."
                    )
            model.set_submodule(name, packed)

    def read_published(self, model: PreTrainedModel, files: Iterable[str], layout: Layout) -> Matrices:
        """Return the tensors that another program has packed, by an empty model's weights; adapt the config to them."""
        self.layout = layout
        rules = get_model_conversion_mapping(model, hf_quantizer=self)
        matrices = find_packed(model, files, layout, rules)
        candidates = dict(self._candidates(model))
        packed = candidates.keys() & {weight.rpartition(".")[0] for weight in matrices}
        self.quantization_config.modules_to_not_convert = names_in_16_bit(candidates, packed) or None
        return matrices

    def _candidates(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        """Yield names and modules that shall be packed unless `modules_to_not_convert` names them."""
        config = self.quantization_config
        # Heads, vision tower and projector are not inside of the decoder. `get_decoder` of a tower is the tower.
        has_decoder = not isinstance(model.config, LlamoeVisionConfig)
        inside = {id(module) for module in model.get_decoder().modules()} if has_decoder else ()
        for name, module in model.named_modules():
            is_experts = isinstance(module, Experts)
            is_linear = type(module) in (nn.Linear, Linear)
            if id(module) in inside and (is_experts and config.experts or is_linear and config.linears):
                yield name, module

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any] | None, dict]:
        """Return a state dict of dequantized weights if the model is saved in stock's layout."""
        if not is_saving_stock():
            return None, {}
        weights = dict(model.state_dict())
        for path, module in packed_modules(model):
            for name in module.sizes:
                for part in module.part_shapes(name):
                    del weights[f"{path}.{part}"]
                weights[f"{path}.{name}"] = module.dequantized_weight(name, torch.bfloat16)
        return weights, {}

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        # Adapters keep their dtype, which may differ from that of the weights.
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and "lora_" not in name:
                parameter.data = parameter.data.to(dtype)
        return model

    def is_serializable(self) -> bool:
        """Return True: packed weights can be saved."""
        return True


def is_kept(name: str, kept: Iterable[str]) -> bool:
    """Return True if one of the names in `kept` matches a module's name.

    Prefixes of model classes do not count, since another class may load a folder than has saved it.
    """
    names = [name, _PREFIX.sub("", name)]
    patterns = [*kept, *(_PREFIX.sub("", pattern) for pattern in kept)]
    return not all(should_convert_module(name, patterns) for name in names)


def register_quantizers() -> None:
    """Register config and quantizer with transformers; called once, when llamoe is imported."""
    register_quantization_config(METHOD)(QuantizationConfig)
    register_quantizer(METHOD)(LlamoeQuantizer)
