"""Small mixtures that bitsandbytes quantizes, and bitsandbytes' own layers for their matrices, as the reference."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig

import llamoe

from .few_bits import save
from .models import draw, mixtral_config, text_config
from .published import named_matrices

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")

# An expert's matrices are 52 x 72, or 58 and a half blocks of 64 numbers: a block that spans gate and up is wrong.
FAMILIES = {
    "llama4": (llamoe.LlamoeForCausalLM, lambda: text_config(num_hidden_layers=2, moe_layers=[1])),
    "mixtral": (llamoe.LlamoeMixtralForCausalLM, lambda: mixtral_config(num_hidden_layers=1)),
}
METHODS = {
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
    "nf4 nested": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "fp4 nested": dict(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    ),
    "8 bit": dict(load_in_8bit=True),
}
IDS = torch.arange(3, 49).view(2, 23)


@cache
def folder_of(family):
    """Save a family's model in bfloat16 once, and return its folder, which tests must not change."""
    model_class, make_config = FAMILIES[family]
    return save(draw(model_class, make_config()).bfloat16(), layout="stock")


def load(folder, family, method=None, **options):
    """Load a folder, quantized by an entry of `METHODS` if `method` is given."""
    config = options.pop("config", None) or llamoe.from_stock(
        FAMILIES[family][0].config_class.from_pretrained(folder)
    )
    if method is not None:
        options["quantization_config"] = BitsAndBytesConfig(**METHODS[method], **options.pop("quantize", {}))
    return FAMILIES[family][0].from_pretrained(folder, config=config, **options)


def logits(model):
    """Return the logits of `IDS` in float32, `[2, 23, vocabulary]`."""
    with torch.no_grad():
        return model(IDS).logits.float()


def bitsandbytes_layer(weight, method):
    """Return bitsandbytes' own linear layer with this weight, `[out, in]`, quantized."""
    options = METHODS[method]
    size_out, size_in = weight.shape
    if "load_in_8bit" in options:
        layer = bnb.nn.Linear8bitLt(size_in, size_out, bias=False, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(weight.clone(), requires_grad=False)
        return layer.to("cpu")
    layer = bnb.nn.Linear4bit(
        size_in,
        size_out,
        bias=False,
        compute_dtype=options.get("bnb_4bit_compute_dtype", torch.float32),
        compress_statistics=options.get("bnb_4bit_use_double_quant", False),
        quant_type=options["bnb_4bit_quant_type"],
        quant_storage=options.get("bnb_4bit_quant_storage", torch.uint8),
    )
    layer.weight = bnb.nn.Params4bit(weight.clone(), **vars(layer.weight))
    layer.weight.module = layer
    return layer.to("cpu")


def matrices(state, family):
    """Return each matrix of each expert in a state dict, `[out, in]`, by its name in stock's folders."""
    stacks = {name: tensor for name, tensor in state.items() if ".experts." in name}
    pairs = [pair for item in stacks.items() for pair in named_matrices(family, *item)]
    return {layer: matrix.contiguous() for layer, matrix in pairs}


def same(given, expected):
    """Return True if two tensors have equal dtypes, shapes and bytes."""
    # Compare bytes: codes that are stored as another dtype may read as NaN, which equals nothing.
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (given, expected)]
    return given.dtype == expected.dtype and given.shape == expected.shape and torch.equal(*bits)


def published(folder, source, family, method):
    """Write a folder as transformers 4 does: bitsandbytes' layers for linear layers, routers and each expert.

    Return the tensors of its file by name.
    """
    saved = {}
    for name, tensor in load(source, family).state_dict().items():
        is_plain = tensor.ndim < 2 or name.endswith(("embed_tokens.weight", "lm_head.weight"))
        for layer, matrix in named_matrices(family, name, tensor):
            if is_plain:
                saved[name] = tensor
            else:
                saved |= bitsandbytes_layer(matrix.contiguous(), method).state_dict(prefix=f"{layer}.")
    folder.mkdir()
    content = json.loads((source / "config.json").read_text())
    content["quantization_config"] = BitsAndBytesConfig(**METHODS[method]).to_dict()
    (folder / "config.json").write_text(json.dumps(content))
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    return saved
