"""Build models with random weights without files, plain or with the quantizer that `from_pretrained` would use.

Only one matrix of each shape is quantized; all layers and experts get copies of its codes, experts with different
scales. So the model never exists in 16 bits, which might not fit into memory.
"""

from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

import llamoe
from llamoe.modeling.formats import Format
from llamoe.modeling.layers import RotaryEmbedding
from llamoe.modeling.quantization import LlamoeQuantizer, QuantizedExperts, QuantizedLinear
from llamoe.modeling.quantization.bnb import BitsAndBytes4BitQuantizer
from llamoe.modeling.registration import model_class

from .weights import Setting

STD = 0.02


def build(setting: Setting, config: Any, weights: str) -> PreTrainedModel:
    """Build a model with random weights in "bf16" (the setting's dtype), "int8", "int4" or "nf4"."""
    with torch.device("meta"):
        model = model_class(config)(config)
    quantizer: Any = None
    if weights == "nf4":
        fields = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        options: Any = BitsAndBytesConfig(**fields, bnb_4bit_compute_dtype=setting.dtype)
        quantizer = BitsAndBytes4BitQuantizer(options, pre_quantized=False)
    elif weights in ("int8", "int4"):
        quantizer = LlamoeQuantizer(llamoe.QuantizationConfig(weights=weights), pre_quantized=False)
    # Now, since quantized experts take their dtype from the weights.
    model.to(setting.dtype)
    if quantizer is not None:
        quantizer.preprocess_model(model, device_map=None)
    quantized: dict[Any, list[torch.Tensor]] = {}
    for module in model.modules():
        _fill(module, setting, quantized)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if quantizer is not None:
        quantizer.postprocess_model(model)
    return model.eval()


def _fill(module: nn.Module, setting: Setting, quantized: dict[Any, list[torch.Tensor]]) -> None:
    """Fill a module's weights with random numbers; `quantized` has one matrix of each format and shape so far."""

    def packed(name: str, form: Format, sizes: tuple[int, ...], count: int) -> None:
        if (form.key, sizes) not in quantized:
            quantized[form.key, sizes] = form.quantize(STD * setting.randn(*sizes))
        for suffix, part in zip(form.suffixes, quantized[form.key, sizes], strict=True):
            stack = part.expand(count, *part.shape).clone()
            if part.is_floating_point():
                # Scales and offsets get different factors for each expert.
                factors = torch.linspace(0.8, 1.2, count, device=part.device).to(part.dtype)
                stack *= factors.view(-1, *[1] * part.dim())
            tensor = stack if isinstance(module, QuantizedExperts) else stack[0]
            setattr(module, name + suffix, tensor if suffix else nn.Parameter(tensor, requires_grad=False))

    if isinstance(module, QuantizedExperts):
        for name, form in module.formats.items():
            packed(name, form, module.sizes[name], module.num_experts)
    elif isinstance(module, QuantizedLinear):
        packed("weight", module.format, (module.out_features, module.in_features), 1)
    elif isinstance(module, RotaryEmbedding):
        module.to_empty(device=setting.device)
    else:
        for name, old in module.named_parameters(recurse=False):
            shape = (module.out_features, module.in_features) if isinstance(module, nn.Linear) else old.shape
            noise = STD * setting.randn(*shape)
            number = noise if len(shape) > 1 else torch.ones_like(noise)
            # bitsandbytes quantizes its parameters when they move to a device.
            setattr(module, name, type(old)(number, requires_grad=False, **vars(old)).to(setting.device))
