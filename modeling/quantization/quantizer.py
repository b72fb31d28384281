"""llamoe's quantizer, which transformers calls to load, save and dequantize models in llamoe's formats.

`QuantizationConfig` and this quantizer are registered with transformers under the method `llamoe`.
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
from .published import Matrices, find_packed, follow_files, warn_of_unpacked

# Prefixes of layer names in classes with a head and in multimodal classes.
_PREFIX = re.compile(r"^(language_model\\?\.)?(model\\?\.)?(?=layers\\?\.)")


def format_for(config: QuantizationConfig) -> Format:
    """Return the format that a config selects."""
    size = "" if config.group_size is None else f":{config.group_size}"
    form: Any = format_of(config.weights + size)
    chosen = {"search": config.search, "in_bytes": config.activations == "int8"}
    return replace(form, **{name: value for name, value in chosen.items() if hasattr(form, name)})


def take_activations(stored: Any, options: dict[str, Any]) -> str | None:
    """Return the `activations` that the user requests for a packed folder; None keeps the folder's own.

    transformers takes everything else from the folder's config, and warns of that. A request that agrees with the
    folder's config is removed from the options, the keyword arguments of `from_pretrained`, and so from the warning.
    """
    folders, asked = (
        QuantizationConfig(**config)
        if isinstance(config, dict) and config.get("quant_method") == METHOD
        else config
        for config in (stored, options.get("quantization_config"))
    )
    if not isinstance(folders, QuantizationConfig) or not isinstance(asked, QuantizationConfig):
        return None
    fields = ["experts", "linears", "modules_to_not_convert", *asked.given - {"activations"}]
    if all(getattr(folders, field) == getattr(asked, field) for field in fields):
        del options["quantization_config"]
    return asked.activations if "activations" in asked.given else None


class LlamoeQuantizer(PackedQuantizer):
    """Loads, saves and dequantizes models in llamoe's formats; loads other programs' folders as int4."""

    quantization_config: QuantizationConfig
    # Adapters train on packed weights, and compilers know their products as custom operators.
    is_trainable = True  # pyright: ignore[reportAssignmentType]
    is_compileable = True  # pyright: ignore[reportAssignmentType]

    @property
    def checks_shapes(self) -> bool:
        """True if files must hold the shapes of the model's modules, which `checkpoints` then checks."""
        return self.layout is None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise a `ValueError` if a device map puts modules on disk, where they would not be packed."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map puts modules on disk, from where packed weights are not read. Routed experts alone can "
                'stay there, by this name: device_map={"experts": "disk"}. Put all else on "cpu".'
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return bfloat16, the dtype of the products; keep the dtype if the folder becomes plain weights."""
        layout = current_loading().layout
        return torch.bfloat16 if layout is None or layout.is_int4 else dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config = self.quantization_config
        if not any(map(is_ours, type(model).__mro__)):
            raise ConfigurationError(
                f"{type(model).__name__} is transformers' own class or another's, which llamoe's quantization does not "
                "know. Call llamoe.adopt() before from_pretrained, so that the Auto classes give llamoe's."
            )
        if self.pre_quantized and (activations := current_loading().activations):
            config.activations = activations
        candidates = dict(self._candidates(model))
        if layout := current_loading().layout:
            matrices = self.read_published(model, kwargs.get("checkpoint_files") or (), layout)
            current_loading().matrices = matrices
            if not layout.is_int4:
                # After dequantization the model is plain: transformers removes its config and quantizer.
                config.dequantize = True  # pyright: ignore[reportAttributeAccessIssue]
                return
            warn_of_unpacked(candidates, matrices)
        form = format_for(config)
        for name, module in candidates.items():
            if is_kept(name, config.modules_to_not_convert or ()):
                continue
            with torch.device("meta"):
                packed = (QuantizedExperts if isinstance(module, Experts) else QuantizedLinear)(module, form)
            for weight, sizes in packed.sizes.items():
                if why := form.refusal(sizes):
                    raise ConfigurationError(
                        f"{name}.{weight} cannot be stored as {form.exact.key}: {why}. Choose another format or "
                        f"group_size, or name {name.rpartition('.')[2]!r} in modules_to_not_convert. If the folder is "
                        "packed already, quantization_config in its config.json is not that of its weights."
                    )
            model.set_submodule(name, packed)

    def read_published(self, model: PreTrainedModel, files: Iterable[str], layout: Layout) -> Matrices:
        """Find the weights of an empty model that another program has packed, and adapt the config to them."""
        self.layout = layout
        rules = get_model_conversion_mapping(model, hf_quantizer=self)
        matrices = find_packed(model, files, layout, rules)
        follow_files(self.quantization_config, layout, dict(self._candidates(model)), matrices)
        return matrices

    def _candidates(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules, with their names, that are packed unless `modules_to_not_convert` names them."""
        config = self.quantization_config
        # Pack only modules of the decoder, not heads, vision tower or projector. A tower alone is its own `base_model`.
        has_decoder = not isinstance(model.config, LlamoeVisionConfig)
        inside = {id(module) for module in model.get_decoder().modules()} if has_decoder else ()
        for name, module in model.named_modules():
            is_experts = isinstance(module, Experts)
            is_asked = (
                config.experts if is_experts else config.linears and type(module) in (nn.Linear, Linear)
            )
            if is_asked and id(module) in inside:
                yield name, module

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any] | None, dict]:
        """Return the dequantized weights when saving in transformers' layout."""
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
        # Adapters may have another dtype than the packed layers.
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and "lora_" not in name:
                parameter.data = parameter.data.to(dtype)
        return model

    def is_serializable(self) -> bool:
        """True: packed weights can be saved."""
        return True


def is_kept(name: str, kept: Iterable[str]) -> bool:
    """Return True if one of these names matches the module, whatever prefix its model class adds."""
    # A folder may be loaded by another class than the one that saved it, with another prefix.
    names = [name, _PREFIX.sub("", name)]
    patterns = [*kept, *(_PREFIX.sub("", pattern) for pattern in kept)]
    return not all(should_convert_module(name, patterns) for name in names)


def register_quantizers() -> None:
    """Register config and quantizer with transformers; called once, at import."""
    register_quantization_config(METHOD)(QuantizationConfig)
    register_quantizer(METHOD)(LlamoeQuantizer)
