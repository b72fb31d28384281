"""What transformers calls to load, save and dequantize models in llamoe's formats.

`QuantizationConfig` and this quantizer are registered with transformers under the method `llamoe`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from ...configuration import LlamoeVisionConfig
from ...configuration.checks import listed
from ...configuration.errors import ConfigurationError
from ...configuration.hub import is_ours, is_saving_stock
from ...configuration.quantization import METHOD, QuantizationConfig
from ..checkpoints import current_loading
from ..formats import BLOCK, Format, format_of, torchs_block
from ..kernels import why_no_cpp_kernels, why_no_gpu_kernel
from ..layers import Linear
from ..moe import STACKS, Experts
from .experts import QuantizedExperts
from .linear import QuantizedLinear
from .packed import QuantizeWeight, check_scales, holds_packed, packed_modules

logger = logging.get_logger("llamoe")

_OF_MODULES = ("experts", "linears", "modules_to_not_convert")


def format_for(config: QuantizationConfig) -> Format:
    """The format that a config asks for."""
    form: Any = format_of(
        config.weights if config.group_size is None else f"{config.weights}:{config.group_size}"
    )
    chosen = {"search": config.search, "in_bytes": config.activations == "int8"}
    return replace(form, **{name: value for name, value in chosen.items() if hasattr(form, name)})


def take_activations(stored: Any, options: dict[str, Any]) -> str | None:
    """The `activations` that a user chooses for a folder whose weights are packed already; None for the folder's own.

    transformers takes the folder's config for all else, and warns of that: a request for nothing else is taken out of
    the options.

    Args:
        stored: the folder's config or its dict, or None.
        options: of `from_pretrained`.

    Raises:
        ConfigurationError: both configs are of llamoe's formats, and they differ in what is stored.
    """
    requested: Any = options.get("quantization_config")
    both = [
        each if isinstance(each, dict) or each is None else each.to_dict() for each in (stored, requested)
    ]
    if any(each is None or each.get("quant_method") != METHOD for each in both):
        return None
    holds, asked = (QuantizationConfig(**each) for each in both)
    given = asked.given if isinstance(requested, dict) else requested.given
    for field in ("weights", "group_size"):
        if field in given and getattr(holds, field) != getattr(asked, field):
            raise ConfigurationError(
                f"quantization_config asks for {field}={getattr(asked, field)!r}, but this folder is stored with "
                f"{field}={getattr(holds, field)!r}: leave it out, or quantize the 16-bit checkpoint. Only "
                "activations can be chosen for a folder that is quantized already."
            )
    if all(getattr(holds, name) == getattr(asked, name) for name in _OF_MODULES):
        del options["quantization_config"]
    return asked.activations if "activations" in given else None


class LlamoeQuantizer(HfQuantizer):
    """Loads, saves and dequantizes models in llamoe's formats."""

    quantization_config: QuantizationConfig
    checks_shapes = True
    """Tells `checkpoints` that the model's modules say what files hold."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what no packed weight can follow; say once that a CPU has no kernel.

        Raises:
            ValueError: modules on disk.
        """
        places = device_map.items() if isinstance(device_map, dict) else ()
        if on_disk := [name or "the whole model" for name, place in places if place == "disk"]:
            raise ValueError(
                f"device_map puts {listed(map(repr, on_disk))} on disk, from where packed weights are not read. Routed "
                'experts alone can stay there, by this name: device_map={"experts": "disk"}. Put all else on "cpu".'
            )
        if self.quantization_config.weights == "int4" and torchs_block() != BLOCK and why_no_cpp_kernels():
            why, remedy = why_no_cpp_kernels() or ("", "")
            logger.warning_once(
                f"This CPU has no compiled kernels for int4 ({why}): int4 saves memory here, no time."
                f"{remedy and f' To change that, {remedy}.'}"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """bfloat16, whatever was asked for; says so."""
        if dtype != torch.bfloat16:
            logger.warning(
                "%s weights are multiplied in bfloat16: the model is cast from %s.",
                self.quantization_config.weights,
                str(dtype).removeprefix("torch."),
            )
        return torch.bfloat16

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config = self.quantization_config
        if not any(map(is_ours, type(model).__mro__)):
            raise ConfigurationError(
                f"{type(model).__name__} is transformers' own class or another's, which llamoe's quantization does not "
                "know. Call llamoe.adopt() before from_pretrained, so that the Auto classes give llamoe's."
            )
        if self.pre_quantized and (activations := current_loading().activations):
            config.activations = activations
        form = format_for(config)
        kept = self.get_modules_to_not_convert(
            model, list(config.modules_to_not_convert or ()), add_default_skips=True
        )
        is_found, refused = self.pre_quantized, dict[str, str]()
        # Heads are outside of the decoder, and so are tower and projector. A tower takes itself for a decoder.
        has_decoder = not isinstance(model.config, LlamoeVisionConfig)
        inside = {id(module) for module in model.get_decoder().modules()} if has_decoder else ()
        for name, module in list(model.named_modules()):
            is_experts = isinstance(module, Experts)
            is_asked = (
                config.experts if is_experts else config.linears and type(module) in (nn.Linear, Linear)
            )
            if not is_asked or id(module) not in inside or not should_convert_module(name, kept):
                continue
            sizes = (
                {f"{name}.{stack}": module.sizes_of(stack) for stack in STACKS}
                if is_experts
                else {f"{name}.weight": (module.out_features, module.in_features)}
            )
            refused |= {weight: why for weight, each in sizes.items() if (why := form.refusal(each))}
            if refused:
                continue
            with torch.device("meta"):
                packed = (QuantizedExperts if is_experts else QuantizedLinear)(module, form)
            model.set_submodule(name, packed)
            is_found = True
        if refused:
            weight, why = next(iter(refused.items()))
            ends = dict.fromkeys(name.split(".")[-2] for name in refused)
            raise ConfigurationError(
                f"{weight} cannot be stored as {form.exact.key}: {why}. Choose another format or group_size, or name "
                f"{listed(map(repr, ends), 9)} in modules_to_not_convert. If the folder is packed already, "
                "quantization_config in its config.json is not that of its weights."
            )
        # The tower of a packed folder is not packed.
        if not is_found:
            raise ConfigurationError(
                f"quantization_config finds nothing in this {type(model).__name__} that it could quantize: "
                "leave it out."
            )

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether a weight is quantized when it is loaded."""
        return not self.pre_quantized and holds_packed(model, param_name)

    def get_quantize_ops(self) -> QuantizeWeight:
        """The operation that quantizes a weight."""
        return QuantizeWeight()

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        check_scales(model)
        if self.pre_quantized:
            _align_codes(model)
        warn_without_gpu_kernel(model)

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any] | None, dict]:
        """In transformers' layout the weights that the packed ones mean."""
        if not is_saving_stock():
            return None, {}
        weights = dict(model.state_dict())
        for path, module in _packed_modules(model, 'save_pretrained(layout="stock")'):
            for name in STACKS if isinstance(module, QuantizedExperts) else ("weight",):
                for suffix in module.format.suffixes:
                    del weights[f"{path}.{name}{suffix}"]
                weights[f"{path}.{name}"] = module.dequantized_weight(name, torch.bfloat16)
        return weights, {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        # A save leaves the dtype's name in the config.
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.bfloat16
        packed = dict(_packed_modules(model, "dequantize"))
        for name, module in packed.items():
            model.set_submodule(name, module.dequantized(dtype))
        # Layers multiply in one dtype; adapters have their own.
        for module in _without_adapters(model):
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
        return model

    def is_serializable(self) -> bool:
        """Packed weights are saved as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters beside packed weights train."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Products are operators in a graph."""
        return True


def _align_codes(model: nn.Module) -> None:
    """Copy codes that are mapped from a file to addresses where torch's kernels cannot read them."""
    for _, module in packed_modules(model):
        for parameter in module._parameters.values():
            is_code = parameter is not None and not parameter.is_floating_point() and parameter.is_cpu
            if is_code and parameter.data_ptr() % module.format.alignment:
                parameter.data = parameter.data.clone()


def _packed_modules(model: PreTrainedModel, asked: str) -> list[tuple[str, Any]]:
    packed = packed_modules(model)
    for name, module in packed:
        if any(parameter.is_meta for parameter in module.parameters()):
            raise ValueError(
                f"{asked}: {name} is offloaded, and has no numbers in memory: load the model without device_map."
            )
    return packed


def _without_adapters(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all modules in it but those that peft has added."""
    yield module
    for child in [module.base_layer] if hasattr(module, "base_layer") else module.children():
        yield from _without_adapters(child)


def warn_without_gpu_kernel(model: PreTrainedModel) -> None:
    """Say once for each GPU with packed weights that has no kernel for them why, and what serves it better."""
    tensors = (tensor for _, module in packed_modules(model) for tensor in module.parameters())
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        if device.type == "cuda" and (reason := why_no_gpu_kernel(device)):
            logger.warning_once(f"{device}: {reason}")


def register_quantizers() -> None:
    """Register config and quantizer with transformers; called once, at the import."""
    register_quantization_config(METHOD)(QuantizationConfig)
    register_quantizer(METHOD)(LlamoeQuantizer)
