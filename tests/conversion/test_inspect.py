"""What `inspect` says of a checkpoint is what the model has, and no weight is read for it."""

import dataclasses
import json

import pytest
from safetensors.torch import load_file
from support.models import dense_config, draw, multimodal_config, text_config, vision_config
from transformers import Llama4ForCausalLM, Llama4ForConditionalGeneration, LlamaForCausalLM

import llamoe
from llamoe.configuration import cache_bytes, count_parameters, preset, to_stock
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import quantize
from llamoe.conversion.inspect import inspect
from llamoe.conversion.io.read_files import FileTensor
from llamoe.planning import source

MODELS = {
    "dense": (LlamaForCausalLM, dense_config),
    "text": (Llama4ForCausalLM, text_config),
    "multimodal": (Llama4ForConditionalGeneration, multimodal_config),
    "tower": (None, vision_config),
}
FAMILIES = pytest.mark.parametrize("family", MODELS)


def stock_sized(family):
    """Return a configuration of a family that transformers can express."""
    return MODELS[family][1](**({"hidden_size": 84} if family == "dense" else {}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that gives a family's folder, saved by transformers in bfloat16, and its model."""
    root = tmp_path_factory.mktemp("saved")
    models = {}

    def folder(family):
        if family not in models:
            stock_class, config = MODELS[family][0], stock_sized(family)
            if stock_class is None:
                model = draw(llamoe.LlamoeVisionModel, config)
            else:
                stock = stock_class.config_class.from_dict(to_stock(config))
                model = draw(stock_class, stock)
            for parameter in model.parameters():  # not the complex buffers of transformers' tower
                parameter.data = parameter.data.bfloat16()
            models[family] = model
            model.save_pretrained(root / family, max_shard_size="100KB")
        return root / family, models[family]

    return folder


@pytest.fixture
def no_reading(monkeypatch):
    """Make reading weights an error."""

    def refuse(self, start, stop):
        raise AssertionError(f"{self.origin} was read")

    monkeypatch.setattr(FileTensor, "_read", refuse)


@FAMILIES
def test_the_description_is_that_of_the_model(family, saved, no_reading):
    folder, model = saved(family)
    config = stock_sized(family)
    inspection = inspect(folder)
    assert inspection.kind == "hf"
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert inspection.stored == inspection.parameters["total"] == numbers
    assert inspection.dtypes == {"bfloat16": (len(list(model.parameters())), 2 * numbers)}
    files = sorted(folder.glob("*.safetensors"))
    assert inspection.files == {file.name: file.stat().st_size for file in files} and len(files) > 1
    assert sum(size for _, size in inspection.parts.values()) == 2 * numbers
    sizes = inspection.sizes
    assert sizes["hidden_size"] == config.get_text_config().hidden_size
    if family in ("text", "multimodal"):
        experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
        assert inspection.parts["experts"][0] == sum(parameter.numel() for parameter in experts)
        assert sizes["num_local_experts"] == 5 and sizes["layers with experts"] == len(experts) // 2 == 2
        assert sizes["num_experts_per_tok"] == config.get_text_config().num_experts_per_tok
        assert sizes["attention_chunk_size"] == 16
        assert sizes["layers without rotation"] == 1
        one = sum(parameter.numel() // 5 for parameter in experts)
        assert inspection.parameters["active"] == numbers - (5 - sizes["num_experts_per_tok"]) * one
    if family in ("tower", "multimodal"):
        prefix = "" if family == "tower" else "vision "
        assert sizes[f"{prefix}image_size"] == 56 and sizes[f"{prefix}tokens_per_tile"] == 4
    words = {"dense": "dense", "text": "Llama 4 text", "multimodal": "Llama 4 multimodal", "tower": "tower"}
    assert words[family] in inspection.family


@pytest.mark.parametrize("name", ["llama-4-scout", "metaclip-b16"])
def test_a_preset_without_weights_says_what_it_would_need(name):
    inspection = inspect(name)
    config = preset(name)
    assert inspection.needs["bfloat16"] == 2 * inspection.parameters["total"]
    assert inspection.kind == "preset"
    assert (
        inspection.stored is None
        and not inspection.files
        and inspection.parameters["total"] == count_parameters(config).total
    )
    assert "weights" not in dict(inspection.sections())
    if name != "metaclip-b16":
        assert inspection.cache == sum(cache_bytes(config, inspection.context, piece=inspection.context))


@FAMILIES
def test_a_plan_is_that_of_the_library(family, saved, monkeypatch):
    folder, _ = saved(family)
    machine = {"gpus": 1, "gpu_memory": "6GB", "ram": "5GB"}
    expected = llamoe.plan_placement(folder, **machine)
    # `inspect` has opened the folder, so planning reads none of its files.
    monkeypatch.setattr(source, "read_header", None)
    monkeypatch.setattr(source, "read_json", None)
    inspection = inspect(folder, plan=True, **machine)
    assert inspection.placement == expected
    assert inspection.placement.device_map == {"": 0} and inspect(folder).placement is None
    rows = dict(inspection.sections())["plan"]
    assert ("from_pretrained", "device_map={'': 0}") in rows
    assert json.loads(json.dumps(dataclasses.asdict(inspection)))["placement"]["weights"] == {
        "0": inspection.stored * 2
    }


@pytest.mark.parametrize("kind", ["symmetric", "fp8"])
def test_a_plan_of_weights_that_others_packed_is_that_of_the_library(kind, tmp_path):
    published = pytest.importorskip("support.published")
    published.publish(tmp_path, "mixtral", kind, 32 if kind == "symmetric" else None)
    machine = {"gpus": 0, "ram": "5GB"}
    assert inspect(tmp_path, plan=True, **machine).placement == llamoe.plan_placement(tmp_path, **machine)
    # config.json alone does not show the bytes.
    with pytest.raises(ValueError, match="give the folder with the weights"):
        inspect(tmp_path / "config.json", plan=True, **machine)


def test_a_plan_of_a_preset_says_where_its_experts_are():
    machine = dict(gpus=1, gpu_memory="16GB", ram="64GB", quantization="int4:64", context=1024)
    inspection = inspect("llama-4-scout", plan=True, **machine)
    rows = dict(inspection.sections())["plan"]
    assert any("routed experts are in RAM" in text for _, text in rows)
    assert any("'experts': 'cpu'" in text and "experts_memory=" in text for _, text in rows)


def test_a_machine_without_a_plan_is_refused(saved, tmp_path):
    folder, _ = saved("dense")
    with pytest.raises(ValueError, match=r"gpus, ram: have an effect only with plan"):
        inspect(folder, gpus=1, ram="3GB")
    with pytest.raises(TypeError, match="unexpected keyword argument .gpu."):
        inspect(folder, plan=True, gpu=1)


def test_context_and_batch_count_in_the_cache_alone(saved):
    folder, _ = saved("text")
    plain, wide = inspect(folder, context=16), inspect(folder, context=200, batch=3)
    config = stock_sized("text")
    assert plain.cache == 2 * 2 * 2 * 20 * 16 * 5
    assert wide.cache == sum(cache_bytes(config, 200, 3, piece=200))
    assert wide.needs == plain.needs
    assert inspect(folder).context == 256  # the model's limit
    assert inspect(saved("tower")[0]).context is None
    for options, word in (({"context": 257}, "257"), ({"batch": 0}, "batch"), ({"context": True}, "context")):
        with pytest.raises(ValueError, match=word):
            inspect(folder, **options)


def test_a_format_that_cannot_store_a_model_has_no_packed_bytes(saved):
    """int4 needs a multiple of 16 outputs, and this model has 120."""
    assert inspect(saved("multimodal")[0]).needs.keys() == {"bfloat16", "int8"}


@FAMILIES
def test_a_configuration_without_weights_says_what_it_would_need(family, saved, tmp_path):
    folder, _ = saved(family)
    expected = inspect(folder)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for path in (tmp_path, tmp_path / "config.json"):
        bare = inspect(path)
        assert bare.kind == "configuration" and bare.stored is None
        assert bare.parameters == expected.parameters and bare.needs == expected.needs


def test_a_name_of_nothing_and_another_architecture_are_errors(tmp_path):
    with pytest.raises(
        CheckpointError, match="^'llama4-scout': no such folder or file, and no preset of that name.$"
    ):
        inspect("llama4-scout")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="gpt2"):
        inspect(tmp_path)


@pytest.mark.parametrize("to", ["int4", "int8"])
def test_packed_weights_are_described_with_their_bytes(to, tmp_path, monkeypatch):
    config = llamoe.LlamoeTextConfig(
        vocab_size=101, hidden_size=128, intermediate_size=64, intermediate_size_mlp=192, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, head_dim=16, num_local_experts=5, interleave_moe_layer_step=2,
    )  # fmt: skip
    draw(llamoe.LlamoeForCausalLM, config).bfloat16().save_pretrained(tmp_path / "model")
    report = quantize(tmp_path / "model", tmp_path / "packed", to=to)
    with monkeypatch.context() as patched:
        patched.setattr(FileTensor, "_read", lambda self, *_: pytest.fail(f"{self.origin} was read"))
        plain, packed = inspect(tmp_path / "model"), inspect(tmp_path / "packed")
    tensors = load_file(tmp_path / "packed/model.safetensors")
    assert packed.quantization["weights"] == to and plain.quantization is None
    for name in ("family", "sizes", "parameters", "stored"):
        assert getattr(packed, name) == getattr(plain, name)
    assert {
        part: (numbers, report.parts[part][1]) for part, (numbers, _) in plain.parts.items()
    } == packed.parts
    assert sum(size for _, size in packed.parts.values()) == sum(tensor.nbytes for tensor in tensors.values())
    assert dict(packed.dtypes).keys() == {"bfloat16", {"int4": "uint8", "int8": "int8"}[to]}
    assert packed.needs.keys() == {to} and packed.needs[to] == plain.needs[to] == report.bytes
    assert packed.cache == plain.cache
    assert any(row[0] == "format" and row[1].startswith(to) for _, rows in packed.sections() for row in rows)
    assert inspect(tmp_path / "packed/config.json").needs[to] == packed.needs[to]
