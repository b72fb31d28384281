"""`quantize` writes, block by block, the bits that a quantized model saves; `convert` turns them back to 16 bits."""

import json
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from support.lazy_tensors import InMemory
from support.models import assert_same_weights, draw, multimodal_config, tensors_in
from support.paths import EXAMPLES

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert, open_checkpoint, quantize, verify
from llamoe.conversion.hf import packed_weights
from llamoe.conversion.hf.packed_weights import pack_tensors
from llamoe.conversion.io.lazy_tensor import blocks
from llamoe.modeling import formats

# Numbers of outputs are multiples of 16, and of inputs of 32, as the formats need.
SIZES = dict(
    vocab_size=102,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)
TEXT = dict(intermediate_size=64, intermediate_size_mlp=192, num_local_experts=5, interleave_moe_layer_step=2)


def dense(**fields):
    config = llamoe.LlamoeDenseConfig(**SIZES, intermediate_size=192, **fields)
    return draw(llamoe.LlamoeDenseForCausalLM, config)


def text(**fields):
    return draw(llamoe.LlamoeForCausalLM, llamoe.LlamoeTextConfig(**SIZES, **TEXT, **fields))


def mixtral():
    config = llamoe.LlamoeMixtralConfig(**SIZES, intermediate_size=64, num_local_experts=5)
    return draw(llamoe.LlamoeMixtralForCausalLM, config)


MODELS = {
    "dense": dense,
    "text": text,
    "mixtral": mixtral,
    "tied": lambda: dense(tie_word_embeddings=True),
    "balanced": lambda: text(router_balancing="bias"),
    "biases": lambda: text(attention_bias=True),
    # Saved in other dtypes than bfloat16.
    "float32": text,
    "float16": text,
    "pictures": lambda: draw(llamoe.LlamoeForConditionalGeneration, multimodal_config(**SIZES, **TEXT)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that gives for a model's name its folder, which no test changes, and its class."""

    @cache
    def save(name):
        folder = tmp_path_factory.mktemp("saved") / "model"
        if name == "multimodal":
            shutil.copytree(EXAMPLES / "llamoe-tiny", folder)
            return folder, llamoe.LlamoeForConditionalGeneration
        model = MODELS[name]().to(getattr(torch, name, torch.bfloat16))
        model.save_pretrained(folder)
        return folder, type(model)

    return save


@pytest.fixture(scope="module")
def packed(saved, tmp_path_factory):
    """Return a function that gives the folder that `quantize` makes of one of these models; no test changes it."""

    @cache
    def pack(name, to):
        folder = tmp_path_factory.mktemp("packed") / "packed"
        quantize(saved(name)[0], folder, to=to, shard_size="60KB")
        return folder

    return pack


def config_in(folder):
    return json.loads((folder / "config.json").read_text())


@torch.no_grad()
def logits(model):
    return model(torch.arange(3, 25).view(2, 11)).logits


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", dict(to="int4", group_size=64, search=False, experts=False)),
        ("text", dict(to="int4")),
        ("text", dict(to="int8", search=False, linears=False)),
        ("mixtral", dict(to="int8")),
        ("mixtral", dict(to="int4", group_size=64, search=False, experts=False)),
        ("pictures", dict(to="int4", keep=["o_proj", "layers.1.self_attn.k_proj"])),
        ("pictures", dict(to="int8", search=False, linears=False)),
        ("tied", dict(to="int8")),
        ("balanced", dict(to="int4", keep="layers.0")),
        ("biases", dict(to="int4")),
        ("float32", dict(to="int8")),
        ("float16", dict(to="int8")),
    ],
    ids=str,
)
def test_the_folder_has_the_bits_that_a_quantized_model_saves(name, options, saved, tmp_path):
    source, model_class = saved(name)
    fields = {
        {"to": "weights", "keep": "modules_to_not_convert"}.get(key, key): options[key] for key in options
    }
    model = model_class.from_pretrained(source, quantization_config=llamoe.QuantizationConfig(**fields))
    model.save_pretrained(tmp_path / "saved")
    report = quantize(source, tmp_path / "packed", shard_size="60KB", **options)

    packed_tensors = tensors_in(tmp_path / "packed")
    assert_same_weights(packed_tensors, tensors_in(tmp_path / "saved"))
    for field in ("quantization_config", "architectures", "dtype", "model_type", "auto_map"):
        assert config_in(tmp_path / "packed")[field] == config_in(tmp_path / "saved")[field]
    assert report.bytes == sum(tensor.nbytes for tensor in packed_tensors.values())
    assert report.bytes == sum(after for _, after in report.parts.values())
    assert sum(before for before, _ in report.parts.values()) == sum(
        tensor.nbytes for tensor in open_checkpoint(source).tensors.values()
    )

    loaded, info = model_class.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values()), info
    assert (
        loaded.hf_quantizer.quantization_config.to_dict()
        == config_in(tmp_path / "packed")["quantization_config"]
    )
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    ("name", "to"), [("dense", "int4"), ("text", "int8"), ("mixtral", "int4"), ("pictures", "int8")]
)
def test_converting_gives_what_the_bits_mean(name, to, saved, packed, tmp_path):
    (source, model_class), folder = saved(name), packed(name, to)
    model_class.from_pretrained(folder).save_pretrained(tmp_path / "stock", layout="stock")
    report = convert(folder, tmp_path / "plain")
    assert_same_weights(tensors_in(tmp_path / "plain"), tensors_in(tmp_path / "stock"))
    assert "quantization_config" not in config_in(tmp_path / "plain")
    assert any(f"stored as {to}" in note for note in report.notes)

    same = verify(folder, tmp_path / "plain", tokens=9)
    assert same.verdict == "equal"
    other = verify(source, folder, tokens=9)
    assert not other.same_function and other.outputs


@pytest.mark.parametrize("name", ["text", "mixtral"])
def test_a_block_is_one_expert_which_is_read_and_packed_once(name, saved, monkeypatch):
    source = open_checkpoint(saved(name)[0])
    reads, packed = [], []
    once = formats.Int4.quantize
    monkeypatch.setattr(
        formats.Int4, "quantize", lambda self, weight: packed.append(weight.shape) or once(self, weight)
    )
    counted = {key: InMemory(tensor.read(), key, reads) for key, tensor in source.tensors.items()}
    weights = packed_weights(source.config, llamoe.QuantizationConfig("int4"), are_stored=False)
    result = pack_tensors(counted, weights)
    assert not reads
    experts = [(number, number + 1) for number in range(5)]
    expected = []
    for key, weight in weights.items():
        codes, scales = (result[name] for name in weight.parts)
        ranges = experts if weight.num_experts else [(0, counted[key].shape[0])]
        expected += [(key, *each) for each in ranges]
        for part in (codes, scales):
            assert len(blocks(part)) == len(ranges)
            for rows in blocks(part):
                part.read(*rows)
            # Reading the scales reads no weight again: they were kept when the codes were read.
            assert reads == expected and len(packed) == len(expected)


@pytest.mark.parametrize(("to", "value"), [("int4", torch.nan), ("int8", torch.inf)])
def test_weights_that_are_no_numbers_are_refused(to, value, saved, tmp_path):
    shutil.copytree(saved("text")[0], tmp_path / "model")
    state = tensors_in(tmp_path / "model")
    state["model.layers.1.feed_forward.experts.down_proj"][3, 5, 7] = value
    save_file(state, tmp_path / "model/model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.feed_forward\.experts\.down_proj"):
        quantize(tmp_path / "model", tmp_path / "packed", to=to)
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(to="int3"), "to = 'int3'"),
        (dict(to="int4", group_size=48), "group_size=48"),
        (dict(to="int8", group_size=32), "group_size=32"),
        (dict(to="int4", experts=False, linears=False), "experts=False"),
        (dict(to="int8", linears=False), "no weights of a decoder"),
        (dict(to="int4", keep=["o_pro"]), "keep = 'o_pro': no module of the model"),
        (dict(to="int4", keep=["("]), r"keep = '\('"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options, named, saved, tmp_path):
    with pytest.raises(ValueError, match=named):
        quantize(saved("dense")[0], tmp_path / "packed", **options)
    assert not (tmp_path / "packed").exists()


def test_what_is_quantized_or_has_nothing_to_quantize_is_refused(saved, packed, tmp_path):
    with pytest.raises(ValueError, match=r"quantized already \(int8, experts and linear layers\)"):
        quantize(packed("multimodal", "int8"), tmp_path / "again", to="int4")
    with pytest.raises(ValueError, match="exists already"):
        quantize(saved("multimodal")[0], packed("multimodal", "int8"), to="int4")
    config = llamoe.LlamoeConfig.from_pretrained(EXAMPLES / "llamoe-tiny").vision_config
    llamoe.LlamoeVisionModel(config).save_pretrained(tmp_path / "tower")
    with pytest.raises(ValueError, match="no weights of a decoder"):
        quantize(tmp_path / "tower", tmp_path / "again", to="int4")
    assert not (tmp_path / "again").exists()
