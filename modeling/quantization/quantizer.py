"""What transformers calls to load, save and dequantize models in llamoe's formats.

`QuantizationConfig` and this quantizer are registered with transformers under the method `llamoe`.
"""

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from ...configuration.errors import ConfigurationError
from ...configuration.quantization import METHOD, QuantizationConfig
from .._private_api import forget_conversions
from ..moe import Experts
from .experts import STACKS, QuantizedExperts
from .formats import Format, Int4, Int8, reads_int4_layout
from .linear import QuantizedLinear
from .loading import Quantize, align_codes, check_scales, in_place_of_fusing

logger = logging.getLogger("llamoe")

# What stays in 16 bit beside embeddings, output head and routers, which are no linear layers or stand last.
_PARTS_IN_16_BIT = ["vision_model", "multi_modal_projector"]

# Whether weights are being saved as what they mean.
_saves_dequantized: ContextVar[bool] = ContextVar("llamoe_saves_dequantized", default=False)


def format_for(config: QuantizationConfig) -> Format:
    """The format that a config asks for."""
    return Int4(config.group_size, config.search) if config.weights == "int4" else Int8(config.search)


class LlamoeQuantizer(HfQuantizer):
    """Loads, saves and dequantizes models in llamoe's formats."""

    quantization_config: QuantizationConfig

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what no packed weight can follow; say once that a CPU has no kernel.

        Raises:
            ValueError: modules on disk.
        """
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                'device_map puts modules on disk, from where packed weights are not read: put them on "cpu".'
            )
        if self.quantization_config.weights == "int4" and not reads_int4_layout():
            _say_once(
                "This CPU has no AVX-512, which torch's 4-bit kernel needs for this layout: on the CPU, int4 weights "
                "are unpacked for each product, which saves memory, and no time."
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
        config, form = self.quantization_config, format_for(self.quantization_config)
        named = config.modules_to_not_convert
        kept = self.get_modules_to_not_convert(
            model, [*_PARTS_IN_16_BIT, *(named or ())], add_default_skips=True
        )
        for name, module in list(model.named_modules()):
            is_experts, is_linear = isinstance(module, Experts), type(module) is nn.Linear
            if not (is_experts and config.experts or is_linear and config.linears):
                continue
            if not should_convert_module(name, kept):
                continue
            sizes = (
                {f"{name}.{stack}": tuple(module.input_first(stack).shape[:0:-1]) for stack in STACKS}
                if is_experts
                else {f"{name}.weight": (module.out_features, module.in_features)}
            )
            for weight, each in sizes.items():
                if refusal := form.refusal(each):
                    raise ConfigurationError(
                        f"{weight} cannot be stored as {form.key}: {refusal}. Choose another format or group_size, or "
                        f"name {name!r} in modules_to_not_convert."
                    )
            with torch.device("meta"):
                model.set_submodule(name, _packed(module, form))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self.pre_quantized:
            check_scales(model)
            align_codes(model)
        forget_conversions(model)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether a name is a packed weight's."""
        module, name = get_module_from_name(model, param_name)
        return (
            isinstance(module, QuantizedExperts)
            and name in STACKS
            or (isinstance(module, QuantizedLinear) and name == "weight")
        )

    def dtypes_of_codes(self, model: PreTrainedModel) -> dict[str, str]:
        """Names of packed weights in files that are packed, and safetensors' name of their dtype."""
        if not self.pre_quantized:
            return {}
        return {
            name: {torch.uint8: "U8", torch.int8: "I8"}[parameter.dtype]
            for name, parameter in model.named_parameters()
            if self.param_needs_quantization(model, name)
        }

    def get_quantize_ops(self) -> Quantize:
        """What makes the parts of a weight."""
        return Quantize()

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Transformers' rules of loading, which quantize experts that are stored one by one."""
        return in_place_of_fusing(weight_conversions, model) if not self.pre_quantized else weight_conversions

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any] | None, dict]:
        """Inside of `saving_dequantized` the weights that the packed ones mean."""
        if not _saves_dequantized.get():
            return None, {}
        weights = dict(model.state_dict())
        for path, module in model.named_modules():
            names = STACKS if isinstance(module, QuantizedExperts) else ("weight",)
            if isinstance(module, QuantizedExperts | QuantizedLinear):
                for name in names:
                    for suffix in module.format.suffixes:
                        del weights[f"{path}.{name}{suffix}"]
                    weights[f"{path}.{name}"] = module.dequantized_weight(name, torch.bfloat16)
        return weights, {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        dtype = torch.bfloat16 if dtype is None else dtype
        for name, module in list(model.named_modules()):
            if isinstance(module, QuantizedExperts | QuantizedLinear):
                model.set_submodule(name, module.dequantized(dtype))
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


def _packed(module: Any, form: Format) -> nn.Module:
    if isinstance(module, Experts):
        return QuantizedExperts(module, form)
    dtype = torch.bfloat16
    return QuantizedLinear(module.in_features, module.out_features, module.bias is not None, form, dtype)


@contextmanager
def saving_dequantized(is_wanted: bool):
    """Context in which `save_pretrained` writes the weights that packed ones mean, if that is wanted."""
    token = _saves_dequantized.set(is_wanted)
    try:
        yield
    finally:
        _saves_dequantized.reset(token)


_said: set[str] = set()


def _say_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        logger.warning(sentence)


def register_quantizers() -> None:
    """Register config and quantizer with transformers; called once, at the import."""
    register_quantization_config(METHOD)(QuantizationConfig)
    register_quantizer(METHOD)(LlamoeQuantizer)
