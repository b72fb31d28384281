"""What `inspect` says of a checkpoint, against the models themselves, and how soon it says it."""

import dataclasses
import json
import math
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.counting import calls_of
from support.lazy_tensors import InMemory
from support.models import dense_config, draw, multimodal_config, text_config, vision_config
from transformers import Llama4ForCausalLM, Llama4ForConditionalGeneration, LlamaForCausalLM

import llamoe
from llamoe.configuration import cache_bytes, count_parameters, preset, to_stock
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import quantize
from llamoe.conversion.convert_vision import convert_vision
from llamoe.conversion.hf import open_hf, save_hf, split_experts
from llamoe.conversion.inspect import inspect
from llamoe.conversion.io import WriteOptions
from llamoe.conversion.io.read_files import FileTensor
from llamoe.conversion.meta.folder import save_meta
from llamoe.modeling.registration import empty_model, model_class
from llamoe.planning import source

MODELS = {
    "dense": (LlamaForCausalLM, dense_config),
    "text": (Llama4ForCausalLM, text_config),
    "multimodal": (Llama4ForConditionalGeneration, multimodal_config),
    "tower": (None, vision_config),
}
FAMILIES = pytest.mark.parametrize("family", MODELS)


def stock_sized(family):
    """A configuration of a family that stock can express."""
    return MODELS[family][1](**({"hidden_size": 84} if family == "dense" else {}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Gives the folder of a family, saved by stock transformers in bfloat16, and its model."""
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
            for parameter in model.parameters():  # not the complex buffers of stock's tower
                parameter.data = parameter.data.bfloat16()
            models[family] = model
            model.save_pretrained(root / family, max_shard_size="100KB")
        return root / family, models[family]

    return folder


def write_headers(folder: Path, shapes, config, shards=1):
    """A folder whose files have headers, and holes of the right length in place of the numbers."""
    folder.mkdir()
    limit = sum(2 * math.prod(shape) for shape in shapes.values()) / shards
    groups, filled = [{}], 0
    for name, shape in shapes.items():
        if groups[-1] and filled + 2 * math.prod(shape) > limit:
            groups, filled = [*groups, {}], 0
        groups[-1][name] = shape
        filled += 2 * math.prod(shape)
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        file = (
            f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        )
        header, end = {}, 0
        for name, shape in group.items():
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
            weight_map[name] = file
        encoded = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(encoded)) + encoded)
        os.truncate(folder / file, 8 + len(encoded) + end)
    if len(groups) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(to_stock(config)))
    return len(groups)


def split_shapes(shapes):
    """Keys and shapes with each stacked expert as linear layers."""
    stacked = {key: InMemory(torch.empty(shape, device="meta")) for key, shape in shapes.items()}
    return {key: tensor.shape for key, tensor in split_experts(stacked).items()}


def shapes_of(config):
    return {name: tuple(parameter.shape) for name, parameter in empty_model(config).named_parameters()}


@pytest.fixture
def no_reading(monkeypatch):
    """Reading a number of a tensor is an error."""

    def refuse(self, start, stop):
        raise AssertionError(f"{self.origin} was read")

    monkeypatch.setattr(FileTensor, "_read", refuse)


@pytest.mark.slow
def test_a_checkpoint_of_400_billion_is_described_by_few_calls(tmp_path, no_reading):
    config = preset("llama-4-maverick")
    shards = write_headers(tmp_path / "maverick", split_shapes(shapes_of(config)), config, 50)
    assert 45 <= shards <= 55
    calls, found = calls_of(lambda: inspect(tmp_path / "maverick"))
    # 1.4 million, where each of 10,229 tensors has a header, 1.0 of them for the layers alone; and 0.8 million for the
    # models of packed bytes.
    assert calls < 2_600_000
    assert found.family.startswith("Llama 4 multimodal") and found.presets == ["llama-4-maverick"]
    assert found.stored == found.parameters["total"] == 401_583_781_376
    assert found.parameters["active"] == count_parameters(config).active
    assert found.dtypes.keys() == {"bfloat16"} and found.dtypes["bfloat16"][1] == 2 * found.stored
    assert len(found.files) == shards and found.bytes > 2 * found.stored
    assert len(found.layers) == 48 and len(set(found.layers)) == 2
    assert found.needs["bfloat16"].weights == 803_167_562_752
    assert found.needs["bfloat16"].cache == sum(cache_bytes(config, 8192)) == 1_610_612_736
    json.dumps(dataclasses.asdict(found), allow_nan=False)


@FAMILIES
def test_what_is_said_is_what_the_model_has(family, saved, no_reading):
    folder, model = saved(family)
    config = stock_sized(family)
    found = inspect(folder)
    assert found.kind == "hf"
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert found.stored == found.parameters["total"] == numbers
    assert found.dtypes == {"bfloat16": (len(list(model.parameters())), 2 * numbers)}
    files = sorted(folder.glob("*.safetensors"))
    assert found.files == {file.name: file.stat().st_size for file in files} and len(files) > 1
    layers = (model.language_model if family == "multimodal" else model).model.layers
    assert found.layers == [
        2 * sum(parameter.numel() for parameter in layer.parameters()) for layer in layers
    ]
    assert sum(size for _, size in found.parts.values()) == 2 * numbers
    assert found.presets == []  # nobody published these sizes
    sizes = found.sizes
    assert sizes["hidden_size"] == config.get_text_config().hidden_size
    if family in ("text", "multimodal"):
        experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
        assert found.parts["experts"][0] == sum(parameter.numel() for parameter in experts)
        assert sizes["num_local_experts"] == 5 and sizes["layers with experts"] == len(experts) // 2 == 2
        assert sizes["num_experts_per_tok"] == config.get_text_config().num_experts_per_tok
        assert sizes["attention_chunk_size"] == 16
        assert sizes["layers without rotation"] == 1
        one = sum(parameter.numel() // 5 for parameter in experts)
        assert found.parameters["active"] == numbers - (5 - sizes["num_experts_per_tok"]) * one
    if family in ("tower", "multimodal"):
        prefix = "" if family == "tower" else "vision "
        assert sizes[f"{prefix}image_size"] == 56 and sizes[f"{prefix}tokens_per_tile"] == 4
    words = {"dense": "dense", "text": "Llama 4 text", "multimodal": "Llama 4 multimodal", "tower": "tower"}
    assert words[family] in found.family


@FAMILIES
def test_split_experts_and_bin_files_are_described_alike(family, saved, tmp_path):
    folder, model = saved(family)
    expected = inspect(folder)
    layout = "stock" if family != "tower" else "llamoe"
    save_hf(open_hf(folder), tmp_path / "split", WriteOptions(layout=layout), experts="split")
    (tmp_path / "bin").mkdir()
    torch.save(dict(model.state_dict()), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_bytes((folder / "config.json").read_bytes())
    for other in ("split", "bin"):
        found = inspect(tmp_path / other)
        same = ("family", "sizes", "parameters", "stored", "dtypes", "parts", "layers", "needs")
        for name in same:
            assert getattr(found, name) == getattr(expected, name), (other, name)


@pytest.mark.parametrize("family", ["dense", "multimodal"])
def test_folders_of_meta_are_described_alike(family, tmp_path, monkeypatch):
    config = MODELS[family][1](
        head_dim=12, vocab_size=102
    )  # heads as Meta's code has them, rows for two files
    draw(model_class(config), config).save_pretrained(tmp_path / "hf")
    save_meta(open_hf(tmp_path / "hf"), tmp_path / "meta", shards=2)
    expected = inspect(tmp_path / "hf")
    with monkeypatch.context() as patch:
        patch.setattr(FileTensor, "_read", None)  # no number is read
        found = inspect(tmp_path / "meta")
    assert found.kind == ("meta-llama" if family == "dense" else "meta-llama4")
    same = ("family", "sizes", "parameters", "stored", "dtypes", "parts", "layers", "needs")
    for name in same:
        assert getattr(found, name) == getattr(expected, name), name
    assert list(found.files) == ["consolidated.00.pth", "consolidated.01.pth"]


def test_towers_of_clip_are_described_alike(tmp_path):
    fields = dict(use_rope=False, use_adapter=False, projection_dim=22, vision_output_dim=120)
    config = llamoe.LlamoeVisionConfig(
        hidden_size=120, num_hidden_layers=3, num_attention_heads=6, intermediate_size=200,
        image_size=56, patch_size=14, hidden_act="quick_gelu", **fields,
    )  # fmt: skip
    model = draw(llamoe.LlamoeVisionModel, config)
    model.save_pretrained(tmp_path / "tower")
    expected = inspect(tmp_path / "tower")
    assert expected.family == "vision tower of CLIP" and expected.sizes["projection_dim"] == 22
    assert expected.stored == expected.parameters["total"] == sum(p.numel() for p in model.parameters())
    convert_vision(tmp_path / "tower", tmp_path / "clip", to="clip")
    found = inspect(tmp_path / "clip")
    assert found.kind == "clip"
    for name in ("family", "sizes", "parameters", "stored", "layers", "needs"):
        assert getattr(found, name) == getattr(expected, name), name


def check_needs(needs, config):
    """As bitsandbytes stores linear layers, and experts as if each were some, by the keys and shapes alone."""
    kept = ("embed_tokens.weight", "lm_head.weight", "router.weight", "patch_embedding.linear.weight")
    expected = dict.fromkeys(("bfloat16", "int8", "int4"), 0)
    for key, shape in split_shapes(shapes_of(config)).items():
        count = math.prod(shape)
        is_linear = len(shape) == 2 and key.endswith(".weight") and not key.endswith(kept)
        expected["bfloat16"] += 2 * count
        expected["int8"] += count + 4 * shape[0] if is_linear else 2 * count
        expected["int4"] += -(-count // 2) + 4 * -(-count // 64) if is_linear else 2 * count
    assert {dtype: need.weights for dtype, need in needs.items()} == expected


@FAMILIES
def test_memory_is_that_of_linear_layers_in_few_bits(family, saved):
    check_needs(inspect(saved(family)[0]).needs, stock_sized(family))


@pytest.mark.parametrize("name", ["llama-4-scout", "metaclip-b16"])
def test_a_preset_without_weights_says_what_it_would_need(name):
    found = inspect(name)
    config = preset(name)
    check_needs(found.needs, config)
    assert found.kind == "preset" and name in found.presets
    assert (
        found.stored is None
        and not found.files
        and found.parameters["total"] == count_parameters(config).total
    )
    assert "weights" not in dict(found.sections())
    if name != "metaclip-b16":
        assert found.needs["int4"].cache == sum(cache_bytes(config, found.context, piece=found.context))


@FAMILIES
def test_a_plan_is_that_of_the_library(family, saved, monkeypatch):
    folder, _ = saved(family)
    machine = {"gpus": 1, "gpu_memory": "6GB", "ram": "5GB"}
    expected = llamoe.plan_placement(folder, **machine)
    # The folder is open already, and nothing in it is read again.
    monkeypatch.setattr(source, "read_header", None)
    monkeypatch.setattr(source, "read_json", None)
    found = inspect(folder, plan=True, **machine)
    assert found.placement == expected
    assert found.placement.device_map == {"": 0} and inspect(folder).placement is None
    rows = dict(found.sections())["plan"]
    assert ("from_pretrained", "device_map={'': 0}") in rows
    assert json.loads(json.dumps(dataclasses.asdict(found)))["placement"]["weights"] == {
        "0": found.stored * 2
    }


def test_a_plan_of_a_source_that_is_to_be_converted_is_that_of_its_configuration(tmp_path):
    draw(Llama4ForCausalLM, text_config(hidden_size=120)).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    save_meta(open_hf(tmp_path / "hf"), tmp_path / "meta")
    plans = [inspect(tmp_path / kind, plan=True, gpus=0, ram="5GB").placement for kind in ("hf", "meta")]
    assert plans[0].weights == plans[1].weights and plans[0].experts == plans[1].experts


def test_a_plan_of_a_preset_says_where_its_experts_are():
    found = inspect("llama-4-scout", plan=True, gpus=1, gpu_memory="14.5GB", ram="64GB", bits=4, context=1024)
    rows = dict(found.sections())["plan"]
    assert any("routed experts are in RAM" in text for _, text in rows)
    assert any("'experts': 'cpu'" in text and "experts_memory=" in text for _, text in rows)


def test_a_machine_without_a_plan_is_refused(saved, tmp_path):
    folder, _ = saved("dense")
    with pytest.raises(ValueError, match=r"gpus, ram: for a plan, which was not asked for: give plan"):
        inspect(folder, gpus=1, ram="3GB")
    with pytest.raises(TypeError, match="inspect.*unexpected keyword argument .gpu."):
        inspect(folder, plan=True, gpu=1)


def test_a_preset_is_known_by_its_sizes():
    names = ["llama-33b", "llama-3.1-70b", "llama-4-scout", "metaclip-h14"]
    assert [inspect(name).presets for name in names] == [[name] for name in names]


def test_the_closest_preset_of_the_same_sizes_is_named(tmp_path):
    for name, fields, expected in (
        ("llama-2-7b", {}, ["llama-2-7b"]),
        ("llama-7b", {}, ["llama-7b"]),
        ("llama-3-8b", {"max_position_embeddings": 131072}, ["llama-3-8b"]),
        ("llama-2-7b", {"vocab_size": 32001}, []),
        ("llama-4-scout", {"text_config": {"num_local_experts": 17}}, []),
    ):
        config = tmp_path / "config.json"
        config.write_text(json.dumps(to_stock(preset(name, **fields))))
        assert inspect(config).presets == expected, (name, fields)


def test_context_and_batch_count_in_the_cache_alone(saved):
    folder, _ = saved("text")
    plain, wide = inspect(folder, context=16), inspect(folder, context=200, batch=3)
    config = stock_sized("text")
    assert plain.needs["int8"].cache == 2 * 2 * 2 * 20 * 16 * 5
    assert wide.needs["int8"].cache == sum(cache_bytes(config, 200, 3, piece=200))
    assert wide.needs["int8"].weights == plain.needs["int8"].weights
    assert inspect(folder).context == 256  # all that the model has
    assert inspect(saved("tower")[0]).context is None
    for options, word in (({"context": 257}, "257"), ({"batch": 0}, "batch"), ({"context": True}, "context")):
        with pytest.raises(ValueError, match=word):
            inspect(folder, **options)


def test_rows_for_people_name_what_matters(saved):
    for family in MODELS:
        found = inspect(saved(family)[0])
        sections = dict(found.sections())
        assert list(sections) == ["model", "sizes", "parameters", "weights", "memory"]
        assert all(
            isinstance(text, str) and text for rows in sections.values() for row in rows for text in row
        )
        assert dict(sections["parameters"])["total"] == f"{found.stored:,}"
        labels = [label for label, _ in sections["memory"]]
        assert labels[:3] == ["bfloat16", "int8", "int4"] and not any("experts" in label for label in labels)
        assert "routed experts, as bitsandbytes stores them" in dict(sections["memory"])["note"]


SIZES_OF_GROUPS = {"hidden_size": 96, "intermediate_size": 160, "intermediate_size_mlp": 224, "head_dim": 32}


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_packed_bytes_are_those_that_quantize_writes(weights, tmp_path):
    draw(Llama4ForCausalLM, text_config(**SIZES_OF_GROUPS)).to(torch.bfloat16).save_pretrained(
        tmp_path / "hf"
    )
    found = inspect(tmp_path / "hf")
    quantize(tmp_path / "hf", tmp_path / "packed", to=weights)
    written = inspect(tmp_path / "packed")
    assert found.packed[weights] == written.needs[weights].weights and not written.packed
    told = dict(dict(found.sections())["memory"])["packed"]
    assert told.startswith("int8 ") and told.endswith(" as llamoe quantize writes them")


def test_a_format_that_cannot_store_a_model_has_no_packed_bytes(saved):
    assert inspect(saved("multimodal")[0]).packed == {}


def test_a_tied_head_counts_once_whether_or_not_it_is_stored(tmp_path):
    config = dense_config(hidden_size=84, tie_word_embeddings=True)
    model = draw(llamoe.LlamoeDenseForCausalLM, config)
    model.save_pretrained(tmp_path / "once", layout="stock")
    state = load_file(tmp_path / "once" / "model.safetensors")
    (tmp_path / "twice").mkdir()
    save_file(
        {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()},
        tmp_path / "twice" / "model.safetensors",
    )
    (tmp_path / "twice" / "config.json").write_bytes((tmp_path / "once" / "config.json").read_bytes())
    once, twice = inspect(tmp_path / "once"), inspect(tmp_path / "twice")
    for found in (once, twice):
        assert found.stored == found.parameters["total"] == sum(p.numel() for p in model.parameters())
        assert found.sizes["tie_word_embeddings"]
    assert once.needs == twice.needs and "lm_head.weight" in twice.dropped


@FAMILIES
def test_a_configuration_without_weights_says_what_it_would_need(family, saved, tmp_path):
    folder, _ = saved(family)
    expected = inspect(folder)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for place in (tmp_path, tmp_path / "config.json"):
        bare = inspect(place)
        assert bare.kind == "configuration" and bare.stored is None
        assert bare.parameters == expected.parameters and bare.needs == expected.needs


def test_what_is_no_checkpoint_is_an_error(tmp_path):
    for name in ("nowhere", "llama-5"):
        with pytest.raises(CheckpointError, match=name):
            inspect(tmp_path / name if name == "nowhere" else name)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        inspect(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for name, content in (
        ("notes.txt", b"hello"),
        ("nothing.pt", b""),
        ("picture.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"),
        ("tokenizer.json", b'{"version": "1.0"}'),
        ("list.json", b"[]"),
        ("pipe", None),
        ("a" * 300, None),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=str(tmp_path / name)):
            inspect(tmp_path / name)
    for name in ("", "a\0b"):
        with pytest.raises(CheckpointError, match="no such folder"):
            inspect(name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="gpt2"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("nowhere", None),
        ("some/folder", None),
        ("model", None),
        ("llama4-scout", "llama-4-scout"),
        ("Llama-4-Maverik", "llama-4-maverick"),
        ("llama2-7b", "llama-2-7b"),
    ],
)
def test_a_name_that_is_nearly_a_presets_is_guessed_and_no_other(name, near):
    with pytest.raises(CheckpointError) as raised:
        inspect(name)
    hint = f" Did you mean the preset {near!r}?" if near else ""
    assert str(raised.value) == f"{name!r}: no such folder or file, and no preset of that name.{hint}"


@pytest.mark.parametrize("to", ["int4", "int8"])
def test_packed_weights_are_told_with_their_bytes(to, tmp_path, monkeypatch):
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
    assert sum(packed.layers) < sum(plain.layers)
    assert dict(packed.dtypes).keys() == {"bfloat16", {"int4": "uint8", "int8": "int8"}[to]}
    assert packed.needs.keys() == {to} and packed.needs[to].weights == report.bytes
    assert packed.needs[to].cache == plain.needs["bfloat16"].cache
    assert any(row[0] == "format" and row[1].startswith(to) for _, rows in packed.sections() for row in rows)
    assert inspect(tmp_path / "packed/config.json").needs[to] == packed.needs[to]
