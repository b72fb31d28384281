"""Experts in bitsandbytes' formats: each matrix is stored and computed as a linear layer of bitsandbytes."""

import peft
import pytest
import torch
from safetensors.torch import load_file
from support import programs
from support.bitsandbytes_models import (
    FAMILIES,
    IDS,
    METHODS,
    bitsandbytes_layer,
    bnb,
    folder_of,
    load,
    logits,
    matrices,
    published,
    same,
)
from support.few_bits import CLOSE, distance, save
from support.models import draw, max_abs, stock_dense_config, vision_config
from support.routing import recorded_choices, routed_to
from support.tables import in_turn
from torch import nn
from transformers import BitsAndBytesConfig, Llama4ForCausalLM, LlamaForCausalLM
from transformers.integrations.accelerate import compute_module_sizes

import llamoe
from llamoe.modeling.moe import Experts, Router
from llamoe.modeling.quantization import QuantizedExperts, packed_modules

for_pairs = pytest.mark.parametrize(("method", "family"), in_turn(METHODS, FAMILIES))
# Both kinds of 4 bits, nested scales and plain ones.
FEW = ["nf4", "fp4 nested", "8 bit"]


@for_pairs
def test_each_matrix_is_that_of_a_linear_layer(family, method, tmp_path):
    """Saved codes, scales and nested scales equal those of bitsandbytes' own layer bit by bit."""
    model = load(folder_of(family), family, method)
    plain = load(folder_of(family), family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    layers = matrices(plain.state_dict(), family)
    assert len(layers) == 5 * 3
    for name, weight in layers.items():
        # Our own folders have the names of our modules.
        name = name.replace(".block_sparse_moe.", ".mlp.")
        expected = bitsandbytes_layer(weight, method).state_dict(prefix=f"{name}.")
        for key, tensor in expected.items():
            assert same(saved.pop(key), tensor), key
    assert not [name for name in saved if ".experts." in name]
    experts = packed_modules(model)[0][1]
    assert isinstance(experts, QuantizedExperts) and not experts.gate_up_proj.requires_grad
    # Nothing else is quantized than before.
    kind = bnb.nn.Linear8bitLt if "8 bit" in method else bnb.nn.Linear4bit
    linears = [name for name, module in plain.named_modules() if isinstance(module, nn.Linear)]
    assert len(linears) > 4
    for name in linears:
        assert type(model.get_submodule(name)) is (nn.Linear if name == "lm_head" else kind)


@for_pairs
def test_saved_and_loaded_again(family, method, tmp_path):
    """Outputs are equal after a model is saved in shards and loaded, twice; a dequantized model is close."""
    model = load(folder_of(family), family, method)
    plain = logits(load(folder_of(family), family))
    expected = logits(model)
    error = (expected - plain).norm() / plain.norm()
    assert 0 < error < (0.1 if method == "8 bit" else 0.5)
    again = model
    for name in ("first", "second"):
        again.save_pretrained(tmp_path / name, max_shard_size="20kB")
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 3
        again = FAMILIES[family][0].from_pretrained(tmp_path / name)
        assert torch.equal(logits(again), expected)
        assert dict(packed_modules(again)).keys() == dict(packed_modules(model)).keys()
    assert again.generate(IDS[:, :5], max_new_tokens=3, do_sample=False).shape == (2, 8)
    unpacked = again.dequantize(dtype=torch.bfloat16)
    assert type(next(m for m in unpacked.modules() if isinstance(m, Experts))) is not QuantizedExperts
    assert not any(getattr(m, "is_packed", False) for m in unpacked.modules())
    # Weights are rounded to bfloat16 once more, in 8 bits rows no longer.
    assert (logits(unpacked) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("method", "family"), in_turn(FEW, FAMILIES))
def test_a_folder_keeps_its_dtype(family, method, dtype, tmp_path):
    """transformers loads plain weights in the files' dtype, so routers must not have the requested one."""
    model = load(folder_of(family), family, method)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, family, dtype=dtype)
    assert torch.equal(logits(again), logits(model))


def test_a_tower_keeps_its_dtype(tmp_path):
    """Weights of norms keep the files' dtype in transformers, so their biases must keep it, too."""
    folder = save(draw(llamoe.LlamoeVisionModel, vision_config()).bfloat16())
    quantization = BitsAndBytesConfig(load_in_4bit=True)
    model = llamoe.LlamoeVisionModel.from_pretrained(folder, quantization_config=quantization)
    model.save_pretrained(tmp_path)
    again = llamoe.LlamoeVisionModel.from_pretrained(tmp_path, dtype=torch.float16)
    pixels = torch.randn(1, 3, 56, 56)
    assert torch.equal(again(pixels).last_hidden_state, model(pixels).last_hidden_state)


@pytest.mark.parametrize("method", FEW)
def test_stock_classes_load_the_stock_layout(method, tmp_path):
    """transformers' Llama 4 makes linear layers of experts if a folder is quantized by bitsandbytes."""
    model = load(folder_of("llama4"), "llama4", method)
    model.save_pretrained(tmp_path, layout="stock")
    stock, info = Llama4ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    experts = stock.model.layers[1].feed_forward.experts
    assert isinstance(experts[4].up_proj, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)
    for module in stock.modules():
        # If this is True, 4-bit layers compute with rounded scales and in another dtype on some CPUs.
        module.support_avx512bf16_for_cpu = False
    with recorded_choices(stock) as chosen:
        expected = logits(stock)
    with routed_to(model, chosen):
        # Stock rounds rows to 8 bits, and casts between an expert's products if it computes them in float32.
        assert distance(logits(model), expected) < CLOSE
    assert llamoe.from_stock(stock.config).quantization_config is not None
    with llamoe.adopt("llama4_text"):
        again = load(tmp_path, "llama4")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(("method", "family"), in_turn(FEW, FAMILIES))
def test_folders_that_others_have_quantized(family, method, tmp_path):
    """The model equals one that llamoe quantizes, except for routers, which transformers 4 quantized, too."""
    published(tmp_path / "published", folder_of(family), family, method)
    model = load(tmp_path / "published", family)
    own = load(folder_of(family), family, method)
    for path, router in own.named_modules():
        if isinstance(router, Router):
            layer = bitsandbytes_layer(router.weight.detach(), method)
            if method == "8 bit":
                weight = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
            else:
                weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            assert not torch.equal(router.weight, weight.to(router.weight.dtype))
            router.weight = nn.Parameter(weight.to(router.weight.dtype))
            assert torch.equal(model.get_submodule(path).weight, router.weight)
    assert torch.equal(logits(model), logits(own))
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(FAMILIES[family][0].from_pretrained(tmp_path / "again")), logits(own))
    # Experts that stay in the files give equal outputs, too.
    offloaded = load(tmp_path / "published", family, experts_memory="200KB")
    assert offloaded.experts_statistics() and torch.equal(logits(offloaded), logits(own))


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("family", "method", "skip"),
    [
        *(("mixtral", method, LINEARS) for method in FEW),
        ("llama4", "nf4", ["experts"]),
        ("llama4", "nf4", ["model.layers.1"]),
        ("llama4", "nf4", [r".*\.3\.up_proj"]),
        ("llama4", "nf4", ["feed_forward.experts.0.gate_proj"]),
    ],
)
def test_names_to_skip_leave_layers_or_experts_alone(family, method, skip, tmp_path):
    model = load(folder_of(family), family, method, quantize={"llm_int8_skip_modules": ["lm_head", *skip]})
    linears = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)]
    assert bool(linears) != bool(packed_modules(model)) == (skip == LINEARS)
    if linears:
        plain, state = load(folder_of(family), family).state_dict(), model.state_dict()
        assert all(torch.equal(state[name], plain[name]) for name in plain if ".experts." in name)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, family)
    assert torch.equal(logits(again), expected)
    unpacked = again.dequantize(dtype=torch.bfloat16)
    assert not packed_modules(unpacked) and distance(logits(unpacked), expected) < CLOSE


def test_experts_keep_16_bits_as_linear_layers_do_with_has_fp16_weight():
    quantize = {"llm_int8_has_fp16_weight": True}
    model = load(folder_of("mixtral"), "mixtral", "8 bit", quantize=quantize)
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, bnb.nn.Linear8bitLt) and not packed_modules(model)
    assert layer.mlp.experts.down_proj.is_floating_point()


def test_parts_of_a_folder_are_read(tmp_path):
    load(folder_of("llama4"), "llama4", "fp4").save_pretrained(tmp_path)
    assert packed_modules(llamoe.LlamoeTextModel.from_pretrained(tmp_path))
    classifier = llamoe.LlamoeForSequenceClassification.from_pretrained(tmp_path)
    assert packed_modules(classifier) and type(classifier.score) is nn.Linear


def test_what_bitsandbytes_does_to_layers_on_a_cpu_is_kept_away(tmp_path):
    """Its kernel for CPUs with bfloat16 changes weights in a forward; then saving, training and odd sizes fail."""
    model = load(folder_of("llama4"), "llama4", "nf4")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = logits(model)
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(same(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(logits(model), first)
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embeds).logits.float().square().mean().backward()
    assert embeds.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("family", "method"), [("llama4", "fp4"), ("mixtral", "nf4 nested"), ("mixtral", "8 bit")]
)
def test_gradients_are_those_of_unpacked_weights(family, method):
    """Compares the gradients of inputs and of LoRA factors."""
    given = []
    for is_packed in (True, False):
        model = load(folder_of(family), family, method, dtype=torch.float32)
        model = model if is_packed else model.dequantize(dtype=torch.float32)
        experts = next(module for module in model.modules() if isinstance(module, Experts))
        config = peft.LoraConfig(
            r=3, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
        )
        torch.manual_seed(7)
        adapted = peft.get_peft_model(model, config)
        factors = {name: p for name, p in adapted.named_parameters() if "lora_" in name}
        with torch.no_grad():
            for factor in factors.values():
                factor.normal_(std=0.1)
        embeds = torch.randn(*IDS.shape, 72).requires_grad_()
        adapted(inputs_embeds=embeds, labels=IDS).loss.backward()
        assert experts.is_packed == is_packed and len(factors) == 4
        given.append([embeds.grad, *(factor.grad for factor in factors.values())])
    # Weights are unpacked to float32, and sums are in another order; measured are 4e-6. In 8 bits bitsandbytes' linear
    # layers round their rows, too.
    allowed = 0.03 if method == "8 bit" else 1e-4
    for ours, expected in zip(*given, strict=True):
        assert ours.abs().max() > 0 and max_abs(ours, expected) < allowed * expected.abs().max()


def test_adapters_are_merged_as_the_refusal_says(tmp_path):
    model = load(folder_of("mixtral"), "mixtral", "nf4")
    config = llamoe.lora_config(model, r=3, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path)
    expected = logits(adapted)
    with pytest.raises(ValueError, match=r"PeftModel.from_pretrained\(model.dequantize\(\), adapter\)"):
        adapted.merge_and_unload()
    unpacked = load(folder_of("mixtral"), "mixtral", "nf4").dequantize()
    merged = peft.PeftModel.from_pretrained(unpacked, tmp_path).merge_and_unload()
    assert distance(logits(merged), expected) < CLOSE


def test_sizes_for_device_maps_are_those_in_memory():
    model = load(folder_of("llama4"), "llama4", "nf4")
    sizes, _ = compute_module_sizes(model, model.hf_quantizer)
    for path, experts in packed_modules(model):
        held = sum(tensor.nbytes for tensor in experts.state_dict().values())
        assert sizes[path] == held
        # Half a byte and a sixteenth for the scale; the last blocks of 5 x 3 matrices are not full.
        assert held / (5 * 3 * 52 * 72) == pytest.approx(0.5625, rel=0.01)
    auto = load(folder_of("llama4"), "llama4", "nf4", device_map="auto")
    assert torch.equal(logits(auto), logits(model))


def test_other_models_are_as_transformers_has_them(tmp_path):
    draw(LlamaForCausalLM, stock_dense_config()).bfloat16().save_pretrained(tmp_path)
    config = BitsAndBytesConfig(**METHODS["nf4"])
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.support_avx512bf16_for_cpu == bnb.nn.Linear4bit(4, 4).support_avx512bf16_for_cpu
    assert model.hf_quantizer.get_state_dict_and_metadata(model) == (None, {})
    assert model._weight_conversions is not None
    assert model.config.quantization_config.llm_int8_skip_modules is None


@pytest.mark.slow
def test_bitsandbytes_is_imported_when_it_is_used():
    script = "import sys, llamoe; llamoe.LlamoeForCausalLM; sys.exit('bitsandbytes' in sys.modules)"
    assert programs.run(["-c", script], timeout=120).returncode == 0
