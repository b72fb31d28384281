"""Quantizers of transformers on a CPU: which layers they replace, and which they leave as they are.

A case is skipped if the library that it needs is not installed.
"""

import pytest
import torch
from support.models import (
    IMAGE_TOKEN,
    SHALLOW,
    SHALLOW_VISION,
    TOKENS_PER_TILE,
    make_asymmetric,
    max_abs,
    stock_multimodal_config,
)
from support.tables import in_turn
from torch import nn
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

import llamoe

# All widths but that of the patches (588) are multiples of 64: quanto's int8 kernel reads beyond others.
TEXT = dict(
    **SHALLOW,
    hidden_size=192,
    intermediate_size=64,
    intermediate_size_mlp=320,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    num_experts_per_tok=2,
)
VISION = dict(
    **SHALLOW_VISION,
    hidden_size=128,
    num_attention_heads=2,
    intermediate_size=512,
    projector_input_dim=64,
    projector_output_dim=64,
    vision_output_dim=64,
)
PATCHES = "vision_model.patch_embedding.linear"


def bitsandbytes(**options):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    return lambda skip=None: BitsAndBytesConfig(llm_int8_skip_modules=skip, **options)


def quanto(weights):
    pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
    return lambda skip=None: QuantoConfig(weights=weights, modules_to_not_convert=skip)


def torchao():
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    return lambda skip=None: TorchAoConfig(quantization.Int8WeightOnlyConfig(), modules_to_not_convert=skip)


METHODS = {
    "bitsandbytes 4 bit": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
    "bitsandbytes 4 bit, scales too": lambda: bitsandbytes(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
    "bitsandbytes 8 bit": lambda: bitsandbytes(load_in_8bit=True),
    "quanto 8 bit": lambda: quanto("int8"),
    "quanto 4 bit": lambda: quanto("int4"),
    "torchao 8 bit": torchao,
}
EVERY = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model = llamoe.LlamoeForConditionalGeneration(stock_multimodal_config(TEXT, VISION))
    make_asymmetric(model).bfloat16().save_pretrained(folder)
    return folder


def load(folder, method, skip=None, cls=llamoe.LlamoeForConditionalGeneration, **options):
    config = METHODS[method]()(skip)
    return cls.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16, **options)


def inputs():
    ids = torch.randint(3, 90, (2, 23), generator=torch.Generator().manual_seed(1))
    ids[1, 2 : 2 + TOKENS_PER_TILE] = IMAGE_TOKEN
    pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def is_quantized(module):
    return type(module) is not nn.Linear or type(module.weight) is not nn.Parameter


def linear_layers(model):
    return {name: module for name, module in model.named_modules() if hasattr(module, "in_features")}


@EVERY
def test_patches_stay_as_they_are_and_the_model_runs(method, folder):
    """The patch embedding stays in 16 bits; logits are near the plain model's, and the model generates."""
    plain = llamoe.LlamoeForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    model = load(folder, method)
    layers = linear_layers(model)
    assert {name for name, layer in layers.items() if not is_quantized(layer)} == {
        PATCHES,
        "language_model.lm_head",
    }
    kept = layers[PATCHES].weight
    assert kept.dtype is torch.bfloat16 and torch.equal(kept, plain.get_submodule(PATCHES).weight)
    with torch.no_grad():
        given, expected = model(**inputs()).logits.float(), plain(**inputs()).logits.float()
    # Rounding to 4 bits changes logits by about a third of their deviation; wrong weights change them by more than it.
    assert given.isfinite().all() and (given - expected).std() < 0.6 * expected.std()
    assert model.generate(**inputs(), max_new_tokens=4, do_sample=False, eos_token_id=-1).shape == (2, 27)
    tower = load(folder, method, cls=llamoe.LlamoeVisionModel)
    assert not is_quantized(tower.patch_embedding.linear) and is_quantized(tower.model.layers[0].mlp.fc1)


@pytest.mark.parametrize(
    ("method", "skip"), in_turn(METHODS, [["lm_head"], [r".*q_proj", r".*lm_head"], []]), ids=str
)
def test_patches_stay_whatever_the_user_lists(method, skip, folder):
    layers = linear_layers(load(folder, method, skip=skip))
    assert not is_quantized(layers[PATCHES])
    queries = [layer for name, layer in layers.items() if name.endswith("q_proj")]
    assert all(is_quantized(layer) == (len(skip) < 2) for layer in queries) and len(queries) == 4


@pytest.mark.parametrize("method", [method for method in METHODS if not method.startswith("quanto")])
def test_saved_and_loaded_again(method, folder, tmp_path):
    model = load(folder, method)
    with torch.no_grad():
        expected = model(**inputs()).logits
    model.save_pretrained(tmp_path)
    again = llamoe.LlamoeForConditionalGeneration.from_pretrained(tmp_path)
    assert not is_quantized(linear_layers(again)[PATCHES])
    with torch.no_grad():
        assert max_abs(again(**inputs()).logits, expected) == 0
    assert again.generate(**inputs(), max_new_tokens=3, do_sample=False, eos_token_id=-1).shape == (2, 26)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_without_a_quantizer_patches_have_the_dtype_that_is_asked_for(dtype, folder):
    """`_keep_in_fp32_modules`, which names the patches for quantizers, would make transformers load them in float32."""
    model = llamoe.LlamoeForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
