"""Quantized models with compilers, experts implementations, devices, checkpoints, heads and pictures."""

import copy
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.few_bits import (
    CLOSE,
    distance,
    folder,
    load,
    logits,
    make,
    packed,
    route_by_position,
    save,
    token_ids,
)
from support.models import IMAGE_TOKEN, draw, stock_multimodal_config
from support.routing import recorded_choices, routed_to
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

import llamoe
from llamoe.configuration import from_stock
from llamoe.modeling.layers import Linear
from llamoe.modeling.quantization import QuantizedExperts, QuantizedLinear, packed_modules

# Compilers and tracers


@pytest.mark.parametrize(
    ("family", "weights", "part"),
    [
        ("mixtral", "int8", "model.layers.0.mlp"),
        pytest.param("text", "int4", "", marks=pytest.mark.slow),
    ],
)
def test_compiled_graphs_have_the_outputs_and_the_gradient_of_the_inputs(family, weights, part):
    model = packed(family, weights)
    embedded = model.get_input_embeddings()(token_ids()).detach()
    function = model.get_submodule(part) if part else lambda x: model(inputs_embeds=x).logits

    def both(function):
        x = embedded.clone().requires_grad_()
        found = function(x)
        found.float().square().mean().backward()
        return found.detach(), x.grad

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    # Some releases of torch add gradients in another order.
    (given, gradient), (expected, expected_gradient) = both(compiled), both(function)
    assert torch.equal(given, expected) and distance(gradient, expected_gradient) < CLOSE
    torch.compiler.reset()


@pytest.mark.slow
def test_export(monkeypatch):
    route_by_position(monkeypatch)
    model = packed("text", "int4")
    program = torch.export.export(model, (token_ids(),), dict(use_cache=False), strict=False)
    # Exported programs take torch's own products of bfloat16 on every processor.
    assert distance(program.module()(token_ids(), use_cache=False).logits, logits(model)) < CLOSE


# Experts


@pytest.mark.parametrize(
    ("name", "family", "weights"), [("grouped_mm", "text", "int4"), ("batched_mm", "mixtral", "int8")]
)
def test_experts_implementations(family, weights, name):
    """llamoe's implementations take packed stacks; transformers' are refused by name."""
    model = packed(family, weights)
    expected = logits(model)
    for own in ("eager", "llamoe"):
        model.set_experts_implementation(own)
        assert distance(logits(model), expected) < CLOSE
    refused = partial(pytest.raises, ValueError, match=f'^experts_implementation="{name}".*{weights}')
    with refused():
        model.set_experts_implementation(name)
    assert model.config._experts_implementation == "llamoe"
    with refused():
        load(folder(family), weights, experts_implementation=name)
    model.config._experts_implementation = name
    with refused():
        logits(model)


# Devices and processes


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("mixtral", dict(tp_size=2, ep_size=2)), ("text", dict(fsdp_size=2)), ("mixtral", dict(pp_size=2)),
    ],
)  # fmt: skip
def test_processes_do_not_share_packed_weights(family, sizes):
    """`from_pretrained` calls `maybe_distribute_model` with the empty model in each process."""
    model = packed(family, "int4")
    with pytest.raises(ValueError, match="^distributed_config: .* is quantized, and cannot be shared"):
        type(model).maybe_distribute_model(model, SimpleNamespace(**sizes), mesh=object())


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu", "model.layers.1": "cpu"}])
def test_device_maps(device_map):
    expected = logits(packed("text", "int8"))
    model = load(folder("text"), "int8", device_map=device_map)
    again = AutoModelForCausalLM.from_pretrained(save(model), device_map=device_map)
    assert torch.equal(logits(model), expected) and torch.equal(logits(again), expected)


@pytest.mark.parametrize(
    ("is_packed", "placed"),
    [
        (False, dict(device_map={"": "disk"})),
        (True, dict(device_map={"": "cpu", "model.layers.0": "disk"})),
        (True, dict(device_map="auto", max_memory={"cpu": "100KB"})),
    ],
    ids=["disk", "layer", "memory"],
)
def test_disks_hold_no_packed_weights(is_packed, placed, tmp_path):
    path = save(packed("text", "int8")) if is_packed else folder("text")
    fields = {} if is_packed else dict(quantization_config=llamoe.QuantizationConfig("int8"))
    with pytest.raises(ValueError, match=r'device_map .*disk.*\{"experts": "disk"\}'):
        AutoModelForCausalLM.from_pretrained(path, offload_folder=tmp_path, **placed, **fields)


def test_offloaded_weights_compute_but_are_not_unpacked(weights):
    accelerate = pytest.importorskip("accelerate")
    model = packed("mixtral", weights)
    expected = logits(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(logits(model), expected)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj is offloaded"):
        model.dequantize()


# Checkpoints


@pytest.mark.parametrize(
    ("family", "dtype", "weights"),
    [("dense", torch.float32, "int8"), ("text", torch.bfloat16, "int4"), ("mixtral", torch.float16, "int8")],
)
def test_checkpoints_of_each_dtype(family, weights, dtype, monkeypatch):
    route_by_position(monkeypatch)
    plain = AutoModelForCausalLM.from_pretrained(folder(family, dtype), dtype=torch.float32)
    model = load(folder(family, dtype), weights)
    assert model.dtype == torch.bfloat16
    error = distance(logits(model), logits(plain))
    assert {"int4": 0.05, "int8": 0.005}[weights] < error < {"int4": 0.25, "int8": 0.03}[weights]


@pytest.mark.parametrize(
    ("family", "weights", "is_packed"),
    [("mixtral", "int4", True), ("text", "int8", False)],
)
def test_bin_checkpoints(family, weights, is_packed, tmp_path):
    model = packed(family, weights) if is_packed else AutoModelForCausalLM.from_pretrained(folder(family))
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    fields = {} if is_packed else dict(quantization_config=llamoe.QuantizationConfig(weights))
    found = AutoModelForCausalLM.from_pretrained(tmp_path, **fields)
    assert torch.equal(logits(found), logits(packed(family, weights)))


def test_a_saved_model_is_unpacked(model):
    """After `save_pretrained` the config has the dtype as a text, which `dequantize` must read."""
    expected = logits(model)
    save(model)
    unpacked = model.dequantize()
    assert not unpacked.is_quantized and {p.dtype for p in unpacked.parameters()} == {torch.bfloat16}
    assert not any(isinstance(module, QuantizedExperts | QuantizedLinear) for module in unpacked.modules())
    error = (logits(unpacked) - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert error.median() < CLOSE
    again = AutoModelForCausalLM.from_pretrained(save(unpacked))
    assert torch.equal(logits(again), logits(unpacked))


@pytest.mark.parametrize(("family", "weights"), [("dense", "int8"), ("text", "int4"), ("mixtral", "int8")])
def test_stock_folders_are_packed_and_written_as_stocks(family, weights, tmp_path):
    make(family).bfloat16().save_pretrained(tmp_path / "plain", layout="stock")
    with llamoe.adopt("llama", "llama4", "mixtral"):
        plain, model = (
            AutoModelForCausalLM.from_pretrained(tmp_path / "plain"),
            load(tmp_path / "plain", weights),
        )
    assert torch.equal(logits(model), logits(packed(family, weights)))
    assert model.get_memory_footprint() < {"int4": 0.45, "int8": 0.6}[weights] * plain.get_memory_footprint()
    model.save_pretrained(tmp_path / "stock", layout="stock")
    assert "quantization_config" not in (tmp_path / "stock/config.json").read_text()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(stock).__module__.startswith("transformers.")
    with recorded_choices(stock) as chosen:
        expected = logits(stock)
    with routed_to(unpacked := model.dequantize(), chosen):
        # Two implementations in bfloat16.
        assert distance(logits(unpacked), expected) < CLOSE


# Other models


@pytest.mark.parametrize(
    ("auto", "fields", "heads", "family", "weights", "is_packed"),
    [
        (AutoModelForSequenceClassification, dict(num_labels=3), ["score"], "text", "int4", False),
        (AutoModelForQuestionAnswering, {}, ["qa_outputs"], "dense", "int4", True),
        (AutoModel, {}, [], "mixtral", "int8", True),
    ],
)
def test_heads_stay_in_sixteen_bit(auto, fields, heads, family, weights, is_packed, monkeypatch):
    route_by_position(monkeypatch)
    path = save(packed(family, weights)) if is_packed else folder(family)
    config = {} if is_packed else dict(quantization_config=llamoe.QuantizationConfig(weights))
    model = auto.from_pretrained(path, **config, **fields).eval()
    plain = [name for name, module in model.named_modules() if type(module) in (nn.Linear, Linear)]
    assert plain == heads
    again = auto.from_pretrained(save(model)).eval()
    unpacked = copy.deepcopy(model).dequantize()
    with torch.no_grad():
        found, read, expected = (each(token_ids())[0] for each in (model, again, unpacked))
    assert torch.equal(read, found)
    # New heads have few outputs, and their errors do not average.
    assert distance(found, expected) < 2 * CLOSE


@pytest.fixture(scope="module")
def pictures():
    fields = dict(
        hidden_size=128, intermediate_size=64, intermediate_size_mlp=320, num_attention_heads=8, head_dim=24,
        num_hidden_layers=2, moe_layers=[1], no_rope_layers=[1, 0],
    )  # fmt: skip
    config = from_stock(stock_multimodal_config(text=fields))
    return save(draw(llamoe.LlamoeForConditionalGeneration, config).bfloat16())


def test_pictures(pictures, weights, monkeypatch):
    route_by_position(monkeypatch)
    ids = token_ids(1, 14).clamp(max=IMAGE_TOKEN - 1)
    ids[0, 2:6] = IMAGE_TOKEN
    pixels = torch.randn(1, 3, 56, 56).bfloat16()
    plain = AutoModelForImageTextToText.from_pretrained(pictures)
    model = AutoModelForImageTextToText.from_pretrained(
        pictures, quantization_config=llamoe.QuantizationConfig(weights)
    )
    inside = "language_model.model.layers."
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExperts | QuantizedLinear) or type(module) is Linear:
            assert (type(module) is Linear) != name.startswith(inside), name
    found, expected = (logits(each, ids, pixel_values=pixels) for each in (model, plain))
    assert 0 < distance(found, expected) < {"int4": 0.3, "int8": 0.05}[weights]
    path, expected = save(model), logits(model)
    again = AutoModelForImageTextToText.from_pretrained(path)
    assert torch.equal(logits(again, ids, pixel_values=pixels), found)
    unpacked = again.dequantize()
    assert distance(logits(unpacked, ids, pixel_values=pixels), found) < CLOSE
    # Parts of the folder.
    assert torch.equal(logits(llamoe.LlamoeForCausalLM.from_pretrained(path)), expected)
    part = llamoe.LlamoeTextModel.from_pretrained(path)
    assert any(isinstance(module, QuantizedExperts) for module in part.modules())
    tower = llamoe.LlamoeVisionModel.from_pretrained(path)
    expected = model.vision_model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tower.state_dict().items())


@pytest.mark.parametrize(
    ("family", "weights", "chosen", "kept"),
    [
        ("text", "int4", dict(experts=False), r"experts$"),
        ("mixtral", "int8", dict(linears=False), r"_proj$"),
        ("text", "int8", dict(modules_to_not_convert=[r"model\.layers\.\d\..*_proj"]), r"_proj$"),
        (
            "mixtral",
            "int4",
            dict(modules_to_not_convert=["model.layers.0.mlp", "layers.1.self_attn", "o_proj"]),
            r"^(0\.mlp|1\.self_attn|0\.self_attn\.o_proj)",
        ),
    ],
)
def test_a_part_of_the_layers(family, weights, chosen, kept):
    """The same layers stay plain if a class loads the folder whose names have another prefix."""

    def names(model):
        return {name.partition("layers.")[2] for name, _ in packed_modules(model)}

    model = load(folder(family), weights, **chosen)
    expected = {name for name in names(packed(family, weights)) if not re.search(kept, name)}
    assert names(model) == expected != set()
    path = save(model)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(path)), logits(model))
    assert names(AutoModel.from_pretrained(path)) == expected
