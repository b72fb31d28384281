"""Base class of the quantizers for packed modules, which transformers calls to load and to dequantize a model."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer

from ...configuration.errors import CheckpointError
from ..formats import Bnb
from ..formats.packed import Layout
from ..moe import Experts
from .packed import Packed, holds_packed
from .reading import reading_rules


class QuantizeWeight(ConversionOps):
    """The operation by which transformers' loader quantizes each weight as soon as it has read it."""

    def __init__(self, operation_of_others: Callable[[], ConversionOps]):
        self._operation_of_others = operation_of_others

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> Any:
        """Return the parts of one weight by their names in the model.

        Raises:
            CheckpointError: the weight does not have the shape of the model's.
        """
        path, _, name = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        if not holds_packed(model, full_layer_name):
            operation = self._operation_of_others()
            return operation.convert(input_dict, full_layer_name=full_layer_name, model=model, **kwargs)
        [weight] = input_dict.values()
        weight = weight[0] if isinstance(weight, list) else weight
        # transformers does not check the shapes of weights that it quantizes.
        wanted = module.weight_shape(name)
        if tuple(weight.shape) != wanted:
            raise CheckpointError(
                f"{full_layer_name} has shape {[*weight.shape]}, but the model that config.json describes has "
                f"{[*wanted]}."
            )
        return {f"{path}.{part}": tensor for part, tensor in module.quantize(weight, name).items()}


class PackedQuantizer(HfQuantizer):
    """A mixin for quantizers of llamoe's packed modules; name it before transformers' quantizer class."""

    layout: Layout | Bnb | None = None
    """The layout of packed linear layers in files; None if files hold the parts of packed modules themselves."""
    layers_in_files: tuple[str, ...] = ("",)
    """Ends of the names of linear layers that `layout` reads, beside those of experts; "" matches every layer."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Return True if the loader must quantize this weight after reading it."""
        if holds_packed(model, param_name):
            return not self.pre_quantized
        return super().param_needs_quantization(model, param_name, **kwargs)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Return the bytes per element; transformers would count half a byte for each byte of codes."""
        if holds_packed(model, param_name):
            return param.element_size()
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that quantizes packed modules, and leaves other modules to transformers' operation."""
        return QuantizeWeight(super().get_quantize_ops)

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Return the loader's rules: first those of `layout`, then all others that do not read the same names."""
        rules = super().update_weight_conversions(weight_conversions, model)
        if self.layout is not None:
            first = reading_rules(self.layout, self.layers_in_files)
            names = {name for rule in first for name in rule.source_patterns}
            return [*first, *(rule for rule in rules if names.isdisjoint(rule.source_patterns))]
        return rules

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        model = super()._process_model_after_weight_loading(model, **kwargs)
        self.layout = None
        for path, module in model.named_modules():
            if isinstance(module, Packed):
                _check_scales(path, module)
        return model

    def dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        """Replace packed modules by plain ones; then transformers does so with its own.

        Raises:
            ValueError: weights are offloaded, so they are not in memory.
        """
        dtype = dtype or model.config.dtype or model.dtype
        # After `save_pretrained` the config holds the dtype's name.
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name, module in list(model.named_modules()):
            is_offloaded = isinstance(module, Experts) and module.is_packed and module.is_offloaded
            if is_offloaded or (isinstance(module, Packed) and any(p.is_meta for p in module.parameters())):
                raise ValueError(f"dequantize: {name} is offloaded: load the model without device_map.")
            if isinstance(module, Packed):
                model.set_submodule(name, module.dequantized(dtype))
        return super().dequantize(model, dtype)


def _check_scales(path: str, module: torch.nn.Module) -> None:
    """Raise a `CheckpointError` if scales are NaN or infinite: attention on a CPU can hide NaN in keys."""
    for name, scales in module.named_buffers(recurse=False):
        if scales.is_meta or not scales.is_floating_point():
            continue
        # Minimum and maximum need no memory for a mask, and are NaN if any scale is.
        if not torch.stack(scales.aminmax()).isfinite().all():
            raise CheckpointError(
                f"{path}.{name} has scales that are NaN or infinite. The checkpoint is damaged, or its weights "
                "overflowed: quantize the original one."
            )
