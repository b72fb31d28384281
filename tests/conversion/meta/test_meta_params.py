"""Meta's params.json as our configurations and back, also for every published size, with tensors that have no data."""

import json
import random

import pytest
import torch
from safetensors.torch import save_file
from support.conversions import META_LLAMA_2
from transformers import AutoConfig

import llamoe
from llamoe.configuration import PRESETS
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion.checkpoint import Checkpoint, expected_shapes
from llamoe.conversion.consolidated.params import Params, add_kept
from llamoe.conversion.convert import convert
from llamoe.conversion.io import WriteOptions
from llamoe.conversion.io.lazy_tensor import LazyTensor
from llamoe.conversion.io.name_table import write_through
from llamoe.conversion.meta.folder import open_meta, save_meta
from llamoe.conversion.meta.hidden_sizes import expert_size, feed_forward_size
from llamoe.conversion.meta.name_tables import llama4_table, llama_table
from llamoe.conversion.meta.params import needs_own_scaling, note_defaults, read_config, write_params

LLAMAS = [name for name in PRESETS if name.startswith("llama")]


class Shape(LazyTensor):
    """A tensor that has a shape and no data."""

    def __init__(self, name, shape):
        super().__init__(shape, torch.bfloat16, f"shapes: {name}")

    def _read(self, start, stop):
        raise AssertionError(f"{self.origin} was read")


@pytest.mark.parametrize(("name", "experts"), [("llama-4-scout", 16), ("llama-4-maverick", 128)])
def test_eight_files_of_llama_4_have_the_shapes_of_the_releases(name, experts):
    config = llamoe.preset(name)
    tensors = {key: Shape(key, shape) for key, shape in expected_shapes(config).items()}
    part = write_through(llama4_table(config, to_write=True), tensors, 8, config)[3]
    mixture, tower = "layers.47.", "vision_embeddings.vision_encoder."
    expected = {
        "tok_embeddings.weight": (25256, 5120),
        "output.weight": (25256, 5120),
        "norm.weight": (5120,),
        mixture + "attention.wqkv.weight": (896, 5120),
        mixture + "attention.wqkv.layer_norm_weight": (5120,),
        mixture + "attention.wo.weight": (5120, 640),
        mixture + "feed_forward.norm.weight": (5120,),
        mixture + "feed_forward.router_DE": (5120, experts),
        mixture + "feed_forward.experts.moe_w_in_eD_F": (experts * 5120, 1024),
        mixture + "feed_forward.experts.moe_w_swiglu_eD_F": (experts * 5120, 1024),
        mixture + "feed_forward.experts.moe_w_out_eF_D": (experts * 1024, 5120),
        mixture + "feed_forward.w_in_shared_FD.weight": (1024, 5120),
        mixture + "feed_forward.w_swiglu_FD.weight": (1024, 5120),
        mixture + "feed_forward.w_out_shared_DF.weight": (5120, 1024),
        tower + "conv1._linear.weight": (176, 588),
        tower + "positional_embedding_vlm": (577, 1408),
        tower + "transformer.resblocks.33.attn.wq.bias": (176,),
        tower + "transformer.resblocks.33.attn.wo.weight": (1408, 176),
        tower + "transformer.resblocks.33.mlp.c_fc.bias": (704,),
        tower + "transformer.resblocks.33.mlp.c_proj.bias": (1408,),
        "vision_embeddings.vision_adapter.mlp.c_fc.weight": (512, 5632),
        "vision_embeddings.vision_adapter.mlp.c_proj.weight": (4096, 512),
        "vision_projection.weight": (640, 4096),
    }
    if name == "llama-4-maverick":
        expected |= {
            "layers.0.feed_forward.mlp.fc1_weight": (4096, 5120),
            "layers.0.feed_forward.mlp.fc2_weight": (5120, 2048),
            "layers.0.feed_forward.mlp.layer_norm_weight": (5120,),
        }
    assert {key: part[key].shape for key in expected} == expected


# Entries of the released params.json, as far as they are public.
RELEASED = {
    "llama-7b": dict(dim=4096, multiple_of=256, n_heads=32, n_layers=32, norm_eps=1e-6),
    "llama-33b": dict(dim=6656, multiple_of=256, n_heads=52, n_layers=60, norm_eps=1e-6),
    "llama-65b": dict(dim=8192, multiple_of=256, n_heads=64, n_layers=80, norm_eps=1e-5),
    "llama-2-13b": dict(dim=5120, multiple_of=256, n_heads=40, n_layers=40, norm_eps=1e-5),
    "llama-2-70b": dict(
        dim=8192, multiple_of=4096, ffn_dim_multiplier=1.3, n_heads=64, n_kv_heads=8, n_layers=80, norm_eps=1e-5,
    ),
    "llama-3-8b": dict(
        dim=4096, multiple_of=1024, ffn_dim_multiplier=1.3, n_heads=32, n_kv_heads=8, n_layers=32, norm_eps=1e-5,
        rope_theta=500000.0,
    ),
    "llama-4-scout": dict(
        dim=5120, n_layers=48, n_heads=40, n_kv_heads=8, head_dim=128, multiple_of=2048, ffn_dim_multiplier=1.2,
        ffn_exp=4.0, norm_eps=1e-5, rope_theta=500000.0, use_scaled_rope=True, attention_chunk_size=8192,
        nope_layer_interval=4, use_qk_norm=True,
    ),
}  # fmt: skip


def generation(name):
    return int(name.split("-")[1][0]) if name[6].isdigit() and "b" not in name.split("-")[1] else 1


@pytest.mark.parametrize("name", LLAMAS)
def test_a_published_configuration_survives_params_json(name):
    config = llamoe.preset(name)
    params, kept = write_params(config, max(generation(name), 2))
    released = RELEASED.get(name, {})
    assert {key: params[key] for key in released} == released
    json.dumps([params, kept])
    read = read_config(Params.of(params, "params.json"), max(generation(name), 2))
    add_kept(read, kept, "llamoe.json")
    assert read.to_dict() == config.to_dict() | {"architectures": read.architectures}


def test_any_hidden_size_has_parameters_that_give_it():
    """Meta's formulas give the size back, for random sizes and some awkward ones."""
    numbers = random.Random(0)
    cases = [(72, 92, 52), (64, 1, 1), (64, 997, 1499), (40, 1000, 7), (6, 101, 103), (5120, 16384, 8192)]
    for _ in range(30):
        dim = 2 * numbers.randint(2, 600)
        cases.append((dim, numbers.randint(1, 6 * dim), numbers.randint(1, 6 * dim)))
    for dim, dense, expert in cases:
        heads = {"hidden_size": dim, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": dim}
        config = llamoe.LlamoeDenseConfig(intermediate_size=dense, num_hidden_layers=1, **heads)
        params, _ = write_params(config, 2)
        assert feed_forward_size(dim, params["multiple_of"], params.get("ffn_dim_multiplier")) == dense
        config = llamoe.LlamoeTextConfig(
            intermediate_size=expert,
            intermediate_size_mlp=dense,
            num_hidden_layers=2,
            interleave_moe_layer_step=2,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            **heads,
        )
        params, _ = write_params(config, 4)
        multiple, factor = params["multiple_of"], params["ffn_dim_multiplier"]
        assert feed_forward_size(dim, multiple, factor) == dense
        capacity = params["moe_args"]["capacity_factor"]
        assert expert_size(dim, multiple, factor, params["ffn_exp"], capacity) == expert


def read(generation=4, vocab_size=202048, **params):
    base = dict(dim=64, n_layers=4, n_heads=4, norm_eps=1e-5, vocab_size=vocab_size, hidden_dim=96)
    return read_config(Params.of(base | params, "params.json"), generation)


def test_scaled_rotary_embeddings_have_metas_own_defaults():
    scaled = read(use_scaled_rope=True).rope_parameters
    assert scaled == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    scaled_by_8 = read(use_scaled_rope=True, rope_scaling_factor=8, rope_high_freq_factor=4).rope_parameters
    assert (scaled_by_8["factor"], scaled_by_8["high_freq_factor"]) == (8.0, 4.0)
    assert read(use_scaled_rope=True, rope_scaling_factor=None).rope_parameters == scaled
    assert read(use_scaled_rope=False, rope_scaling_factor=8).rope_parameters["rope_type"] == "default"
    llama_3 = read(3, 128256, use_scaled_rope=True, rope_theta=500000).rope_parameters
    assert (llama_3["factor"], llama_3["high_freq_factor"]) == (8.0, 4.0)


# Sizes in the releases' params.json, and the scaling factor in the published configurations.
LLAMA_3 = {
    "3.2-1B": (dict(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5), 32.0),
    "3.2-3B": (dict(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim_multiplier=1.0), 32.0),
    "3.1-8B": (dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3), 8.0),
    "3.1-70B": (dict(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim_multiplier=1.3), 8.0),
}


@pytest.mark.parametrize("name", LLAMA_3)
def test_llama_3_scales_as_its_published_configuration_and_both_ways(name):
    sizes, factor = LLAMA_3[name]
    config = read(3, 128256, **sizes, use_scaled_rope=True, rope_theta=5e5)
    assert config.rope_parameters["factor"] == factor and config.rope_parameters["high_freq_factor"] == 4.0
    assert read(3, 128256, **sizes, rope_theta=5e5).rope_parameters["rope_type"] == "default"
    for value in (8.0, 16.0, 32.0):
        config.rope_parameters["factor"] = value
        params, _ = write_params(config, 3)
        # Meta's code always takes 8.
        assert params.get("rope_scaling_factor", 8.0) == value and needs_own_scaling(params) == (value != 8.0)
        again = read_config(Params.of(params, "params.json"), 3)
        assert again.rope_parameters == config.rope_parameters


@pytest.mark.parametrize("has_head", [True, False])
def test_the_head_of_llama_32_is_its_embedding_stored_twice_or_once(has_head, tmp_path):
    """The file has the published size, which shows Llama 3.2, with a hole in place of the weights."""
    params = LLAMA_3["3.2-1B"][0] | dict(multiple_of=256, norm_eps=1e-5, rope_theta=5e5, vocab_size=128256)
    (tmp_path / "params.json").write_text(json.dumps(params | {"use_scaled_rope": True}))
    config = read_config(Params.of(params, ""), 3)
    shapes = {key: Shape(key, shape) for key, shape in expected_shapes(config).items()}
    (tensors,) = write_through(llama_table(0), shapes, 1, config)
    tensors = {name: torch.empty(tensor.shape, dtype=torch.bfloat16) for name, tensor in tensors.items()}
    del tensors["output.weight"]
    tensors |= {"output.weight": tensors["tok_embeddings.weight"]} if has_head else {}
    with torch.serialization.skip_data():
        torch.save(tensors, tmp_path / "consolidated.00.pth")
    config = open_meta(tmp_path).config
    assert (config.rope_parameters["factor"], config.tie_word_embeddings) == (32.0, True)


# Scalings that are refused, and words of the error.
WRONG = {
    "factor=3": "is no JSON",
    '{"fctor": 3}': "rope_scaling has fctor",
    '{"factor": ': "is no JSON",
    "32": "has no names",
    '{"rope_type": "mrope"}': "LlamoeDenseConfig cannot be made of these fields .*mrope",
    '{"rope_type": "linear"}': "factor",
    '{"rope_type": "default", "factor": 3}': "scales nothing",
}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        *WRONG.items(),
        ('{"factor": 16}', {"rope_type": "llama3", "factor": 16, "high_freq_factor": 4.0, "rope_theta": 5e5}),
        ({"factor": 5.0, "rope_theta": 7e4}, {"rope_type": "llama3", "factor": 5.0, "rope_theta": 7e4}),
        ('{"rope_type": "linear", "factor": 3.0}', {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e5}),
        ({"rope_type": "default"}, {"rope_type": "default", "rope_theta": 5e5}),
    ],
)
def test_rope_scaling_replaces_the_sources_or_is_refused(scaling, expected, tmp_path):
    config = llamoe.LlamoeDenseConfig(
        vocab_size=37, hidden_size=36, intermediate_size=44, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2, rope_parameters=LLAMA_3_ROPE,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "source")
    tensors = {name: torch.ones(shape) for name, shape in expected_shapes(config).items()}
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            convert(tmp_path / "source", tmp_path / "target", rope_scaling=scaling)
        assert not (tmp_path / "target").exists()
        return
    convert(tmp_path / "source", tmp_path / "target", rope_scaling=scaling)
    written = AutoConfig.from_pretrained(tmp_path / "target").rope_parameters
    assert {name: written[name] for name in expected} == expected
    assert ("low_freq_factor" in written) == (written["rope_type"] == "llama3")


def test_what_params_json_does_not_say_is_what_metas_code_takes():
    dense = read(2, 32000)
    assert (dense.num_key_value_heads, dense.head_dim) == (4, 16)
    assert dense.rope_parameters["rope_theta"] == 10000.0
    text = read()
    assert text.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert text.moe_layers == [] and text.no_rope_layers == [1] * 4
    assert not text.use_qk_norm and not text.attn_temperature_tuning and text.attention_chunk_size is None
    assert (text.bos_token_id, text.pad_token_id) == (200000, 200018)
    assert text.eos_token_id == [200001, 200007, 200008]
    assert read(vocab_size=101).bos_token_id is None
    assert read(nope_layer_interval=2).no_rope_layers == [1, 0, 1, 0]
    mixed = read(moe_args={"num_experts": 3, "hidden_dim": 64, "interleave_moe_layer_step": 2})
    assert mixed.moe_layers == [1, 3] and mixed.num_experts_per_tok == 1
    assert read(2, 32000, max_seq_len=777).max_position_embeddings == 777
    assert read(2, 32000, rope_theta=1e6).max_position_embeddings == 16384  # Code Llama


def test_a_default_of_metas_that_is_not_hugging_faces_is_noted():
    def notes(generation, **params):
        return note_defaults(Params.of(params, "params.json"), read(generation, 512, **params))

    assert "attn_temperature_tuning" in notes(4, nope_layer_interval=2)[0]
    assert not notes(4, nope_layer_interval=2, attn_temperature_tuning=False)
    assert not notes(4)
    assert "'factor': 32" in notes(3, use_scaled_rope=True)[0]
    assert not notes(3, use_scaled_rope=True, rope_scaling_factor=8)
    assert not notes(3)


LLAMA_3_ROPE = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=128,
)  # fmt: skip


@pytest.mark.parametrize(
    ("part", "fields", "words"),
    [
        ("dense", dict(attention_bias=True), "attention_bias = True"),
        ("dense", dict(mlp_bias=True), "mlp_bias = True"),
        ("dense", dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
        ("dense", dict(rope_interleave=True), "rope_interleave = True"),
        ("dense", dict(head_dim=64), "head_dim = 64"),
        ("dense", dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), "'linear'"),
        ("dense", dict(rope_parameters=dict(LLAMA_3_ROPE, original_max_position_embeddings=4096)), "4096"),
        ("text_config", dict(moe_layers=[0, 3]), "moe_layers"),
        ("text_config", dict(no_rope_layers=[0, 1, 1] + [1] * 45), "no_rope_layers"),
        ("text_config", dict(layer_types=["chunked_attention"] * 48), "layer_types"),
        ("text_config", dict(attention_bias=True), "attention_bias"),
        ("text_config", dict(mlp_bias=True), "mlp_bias"),
        ("text_config", dict(rope_interleave=False), "rope_interleave"),
        ("text_config", dict(head_dim=64), "head_dim"),
        ("vision_config", dict(projector_input_dim=4000), "projector_input_dim"),
        ("vision_config", dict(norm_eps=1e-6), "norm_eps"),
        ("vision_config", dict(num_channels=1), "num_channels"),
        ("vision_config", dict(hidden_act="quick_gelu"), "hidden_act"),
        ("vision_config", dict(use_rope=False), "use_rope"),
        ("vision_config", dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0}), "rope_parameters"),
    ],
)  # fmt: skip
def test_what_a_model_of_metas_cannot_be_is_refused_by_name(part, fields, words):
    if part == "dense":
        config, owner = llamoe.preset("llama-2-7b", **fields), "Dense"
    else:
        config, owner = llamoe.preset("llama-4-scout", **{part: fields}), part.split("_")[0].title()
    with pytest.raises(ValueError, match="Meta's") as caught:
        write_params(config, 3 if part == "dense" else 4)
    message = str(caught.value)
    assert message.startswith(f"Llamoe{owner}Config.{next(iter(fields))}") and words in message


@pytest.mark.parametrize(
    ("name", "files"), [("llama-2-7b", 1), ("llama-33b", 4), ("llama-2-70b", 8), ("llama-3-8b", 1)]
)
def test_as_many_files_as_metas_releases_have_are_written_where_no_number_is_given(name, files, tmp_path):
    config = llamoe.preset(name)
    tensors = {key: Shape(key, shape) for key, shape in expected_shapes(config).items()}
    report = save_meta(
        Checkpoint(tmp_path, "hf", config, tensors), tmp_path / "to", WriteOptions(dry_run=True)
    )
    assert len(report.files) == files and report.bytes >= 2 * llamoe.count_parameters(config).total


def test_a_tower_alone_has_no_format_of_metas(tmp_path):
    with pytest.raises(ValueError, match="vision tower alone"):
        save_meta(Checkpoint(tmp_path, "clip", llamoe.preset("metaclip-b32"), {}), tmp_path / "to")


def test_what_changes_no_number_is_kept_beside_params_json():
    text = dict(router_aux_loss_coef=0.25, attn_temperature_tuning=4, max_position_embeddings=1048576)
    config = llamoe.preset("llama-4-maverick", text_config=text, image_token_index=7)
    _, kept = write_params(config, 4)
    assert kept["image_token_index"] == 7
    assert {name: kept["text_config"][name] for name in text} == text


def test_the_file_beside_params_json_decides_nothing_that_is_computed(tmp_path):
    source = META_LLAMA_2.write(tmp_path / "meta", META_LLAMA_2.weights(), 1)
    (source / "llamoe.json").write_text('{"max_position_embeddings": 777}')
    assert open_meta(source).config.max_position_embeddings == 777
    (source / "llamoe.json").write_text('{"rms_norm_eps": 0.5}')
    with pytest.raises(CheckpointError, match=r"llamoe\.json: rms_norm_eps = 0\.5"):
        open_meta(source)
    (source / "llamoe.json").write_text('{"max_position_embeddings": "long"}')
    with pytest.raises(CheckpointError, match=r"llamoe\.json: .*max_position_embeddings = 'long'"):
        open_meta(source)
