"""transformers' quantizers of bitsandbytes, which here quantize llamoe's routed experts too.

They replace transformers' own, and add to them: linear layers, other models and everything that is not said here are
transformers'. A name in `llm_int8_skip_modules` that means the experts, or the layer of a single expert as files name
it, leaves the experts of that mixture in 16 bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from .._private_api import replace_quantizer
from ..checkpoints import AtomicSaveMixin, fuse_in_place, is_of_experts
from ..formats import Bnb4Bit, Bnb8Bit
from ..layers import Linear
from ..moe import STACKS, Experts, Router
from .bnb_experts import BitsAndBytesExperts, packed_in
from .bnb_rules import reading_rules
from .packed import QuantizeWeight, check_scales, holds_packed

if TYPE_CHECKING:
    _Base = Bnb4BitHfQuantizer
else:
    _Base = object


class QuantizesExperts(_Base):
    """A mixin for both quantizers; name it before transformers' class."""

    def _format(self, dtype: torch.dtype) -> Bnb4Bit | Bnb8Bit:
        config = self.quantization_config
        if config.load_in_8bit:
            return Bnb8Bit(dtype)
        return Bnb4Bit(
            config.bnb_4bit_compute_dtype,
            quant_type=config.bnb_4bit_quant_type,
            is_nested=config.bnb_4bit_use_double_quant,
        )

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, device_map: Any = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        super()._process_model_before_weight_loading(
            model, device_map=device_map, checkpoint_files=checkpoint_files, **kwargs
        )
        if not isinstance(model, AtomicSaveMixin):
            return
        # Some folders hold the experts of some layers in 16 bit beside quantized ones.
        stored = packed_in(checkpoint_files) if self.pre_quantized and checkpoint_files else None
        for name, module in list(model.named_modules()):
            if not isinstance(module, Experts) or module.is_packed:
                continue
            with torch.device("meta"):
                packed = BitsAndBytesExperts(module, self._format(module.dtype))
            takes = self._takes(name, packed) if stored is None else name.rpartition("layers.")[2] in stored
            if takes:
                model.set_submodule(name, packed)

    def _takes(self, path: str, experts: BitsAndBytesExperts) -> bool:
        """Return True unless `llm_int8_skip_modules` names these experts or a part of them."""
        if self.quantization_config.load_in_8bit and self.quantization_config.llm_int8_has_fp16_weight:
            # Then linear layers keep their weights, too, and round them in each pass.
            return False
        layers = [
            experts.name_of_layer(path, stack, number, place)
            for stack in STACKS
            for number in range(experts.num_experts)
            for place in range(experts.formats[stack].count)
        ]
        return all(should_convert_module(name, self.modules_to_not_convert) for name in [path, *layers])

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Return True if loading quantizes this weight."""
        if holds_packed(model, param_name):
            return not self.pre_quantized
        return super().param_needs_quantization(model, param_name, **kwargs)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element: transformers takes what is to be quantized for numbers, not for codes."""
        if holds_packed(model, param_name):
            return param.element_size()
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that quantizes a weight: ours for experts, else transformers'."""
        return QuantizeWeight(super().get_quantize_ops())

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Return the loader's rules; for folders with experts in linear layers, those that read these."""
        rules = super().update_weight_conversions(weight_conversions, model)
        experts = next(iter(packed_experts(model).values()), None)
        if experts is None:
            return rules
        if not self.pre_quantized:
            return fuse_in_place(rules)
        rules = [rule for rule in rules if not is_of_experts(rule)]
        return [*reading_rules(experts.is_transposed, self), *rules]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        model = super()._process_model_after_weight_loading(model, **kwargs)
        if isinstance(model, AtomicSaveMixin):
            check_scales(model)
            _keep_codes_in_order(model)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any] | None, dict]:
        """Return the weights with packed experts un-fused, as in files; None without such experts."""
        packed = packed_experts(model)
        # Of a model with an adapter in it, the adapter alone is saved.
        if not packed or getattr(model, "_hf_peft_config_loaded", False):
            return super().get_state_dict_and_metadata(model)
        storage = getattr(self.quantization_config, "bnb_4bit_quant_storage", torch.uint8)
        weights: dict[str, Any] = {}
        for name, tensor in model.state_dict().items():
            path = name.rpartition(".")[0]
            if path not in packed:
                weights[name] = tensor
            elif f"{path}.{STACKS[0]}" == name:
                weights.update(packed[path].unfused(path, storage))
        return weights, {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        # Saving leaves a text in the configuration.
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name, experts in packed_experts(model).items():
            model.set_submodule(name, experts.dequantized(dtype or experts.weight_dtype))
        return super()._dequantize(model, dtype=dtype)


class BitsAndBytes4BitQuantizer(QuantizesExperts, Bnb4BitHfQuantizer):
    """`load_in_4bit=True`."""


class BitsAndBytes8BitQuantizer(QuantizesExperts, Bnb8BitHfQuantizer):
    """`load_in_8bit=True`."""


def packed_experts(model: nn.Module) -> dict[str, BitsAndBytesExperts]:
    """Return a model's experts in bitsandbytes' formats, by path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BitsAndBytesExperts)}


def _keep_codes_in_order(model: nn.Module) -> None:
    """Have layers of 4 bits leave their weights as they are.

    On a CPU with bfloat16 instructions, bitsandbytes changes a weight in its first pass without gradients: it orders
    the codes for a kernel and rounds the scales. If the model is saved then, the scales of weights without double
    quantization come out in another order, and stay so; backward passes end in an error; and layers whose outputs are
    no multiple of 32 do not run. Passes take longer without that kernel.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


@contextmanager
def naming_plain_layers(model: PreTrainedModel) -> Iterator[None]:
    """Context in which a model's configuration names all layers that bitsandbytes has not quantized.

    Other programs do not know which layers of ours are left out. Without a list they leave out heads alone, with one
    nothing else, so that it would quantize the new head of a classifier: llamoe's own folders have none.
    """
    if not isinstance(getattr(model, "hf_quantizer", None), QuantizesExperts):
        yield
        return
    config: Any = model.config.quantization_config
    kept = config.llm_int8_skip_modules
    plain = {
        # transformers 4 takes routers for linear layers, and has this name for Mixtral's mixture.
        name.replace(".mlp.gate", ".block_sparse_moe.gate")
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Linear)
        or isinstance(module, Router)
        or (isinstance(module, Experts) and not module.is_packed)
    }
    config.llm_int8_skip_modules = sorted(plain.union(kept or ()))
    try:
        yield
    finally:
        config.llm_int8_skip_modules = kept


def register_bitsandbytes() -> None:
    """Put these quantizers in the place of transformers'; called once, at the import."""
    replace_quantizer("bitsandbytes_4bit", BitsAndBytes4BitQuantizer)
    replace_quantizer("bitsandbytes_8bit", BitsAndBytes8BitQuantizer)
