"""Base class of quantizers of packed modules, called by transformers' loader to quantize, read, check and unpack."""

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
from .packed import holds_packed, packed_modules
from .reading import reading_rules


class QuantizeWeight(ConversionOps):
    """The operation by which transformers' loader quantizes a weight that it has read, before it reads the next."""

    def __init__(self, of_other_modules: Callable[[], ConversionOps]):
        self._of_other_modules = of_other_modules

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> Any:
        """Return the parts of one weight by their names in the model.

        Raises:
            CheckpointError: it has another shape than the model's.
        """
        path, _, name = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        if not holds_packed(model, full_layer_name):
            operation = self._of_other_modules()
            return operation.convert(input_dict, full_layer_name=full_layer_name, model=model, **kwargs)
        [weight] = input_dict.values()
        weight = weight[0] if isinstance(weight, list) else weight
        # transformers does not check the shapes of quantized weights.
        wanted = module.weight_shape(name)
        if tuple(weight.shape) != wanted:
            raise CheckpointError(
                f"{full_layer_name} has shape {[*weight.shape]}, but the model that config.json describes has "
                f"{[*wanted]}."
            )
        return {f"{path}.{part}": tensor for part, tensor in module.quantize(weight, name).items()}


class PackedQuantizer(HfQuantizer):
    """A mixin that quantizes llamoe's packed modules; name it before transformers' quantizer class."""

    layout: Layout | Bnb | None = None
    """The layout of a folder with packed linear layers; None for llamoe's own folders, which have stacks."""
    layers_in_files: tuple[str, ...] = ("",)
    """Ends of the names of linear layers that are read by `layout`."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Return True if loading quantizes this weight."""
        if holds_packed(model, param_name):
            return not self.pre_quantized
        return super().param_needs_quantization(model, param_name, **kwargs)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Return the bytes per element; transformers would use the plain dtype's for weights yet to be quantized."""
        if holds_packed(model, param_name):
            return param.element_size()
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that quantizes a weight: ours for packed modules, else transformers'."""
        return QuantizeWeight(super().get_quantize_ops)

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Return the loader's rules: first those of the layout, which replace any other rule for the same names."""
        rules = super().update_weight_conversions(weight_conversions, model)
        if self.layout is not None:
            first = reading_rules(self.layout, self.layers_in_files)
            names = {name for rule in first for name in rule.source_patterns}
            return [*first, *(rule for rule in rules if names.isdisjoint(rule.source_patterns))]
        return rules

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        model = super()._process_model_after_weight_loading(model, **kwargs)
        self.layout = None
        return model

    def dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        """Replace llamoe's packed modules by plain ones, and transformers' as transformers does.

        Raises:
            ValueError: a module is offloaded, so its weights are not in memory.
        """
        dtype = dtype or model.config.dtype or model.dtype
        # Saving replaces the config's dtype by its name.
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name, module in model.named_modules():
            if isinstance(module, Experts) and module.is_offloaded and module.is_packed:
                raise ValueError(f"dequantize: {name} is {module.storage}: load the model into memory.")
        for name, module in packed_modules(model):
            if any(parameter.is_meta for parameter in module.parameters()):
                raise ValueError(f"dequantize: {name} is offloaded: load the model without device_map.")
            model.set_submodule(name, module.dequantized(dtype))
        return super().dequantize(model, dtype)
