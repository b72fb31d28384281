"""GGUF files as sources of `convert`, `quantize`, `inspect` and `verify`."""

import json
import re
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from support.few_bits import CLOSE, distance, logits
from support.gguf_files import write_gguf
from support.models import tensors_in
from support.published import OURS
from transformers import LlamaForCausalLM

from llamoe import QuantizationConfig
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert, inspect, open_checkpoint, quantize, verify
from llamoe.modeling.quantization import QuantizedExperts, QuantizedLinear

FAMILIES = ("llama", "mixtral", "llama4")
HALF_STEP = 2.0**-8
# Activations are not quantized.
FLOAT = QuantizationConfig(activations="float")


def write(path, family, kind="Q4_0", others=(), config=None, **options):
    return write_gguf(path, family, kind, others, config or {}, **options)


def packed_weights(model):
    """Yield names and float32 values of the matrices and stacks of packed modules."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            for name in module.sizes:
                yield f"{path}.{name}", module.dequantized_weight(name, torch.float32)


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("family", FAMILIES)
def test_converting_gives_in_16_bits_what_the_file_means(family, kind, tmp_path):
    file = write(tmp_path / "model.gguf", family, kind)
    report = convert(file.path, tmp_path / "plain", shard_size="300KB")
    assert report.kind == "gguf" and len(report.files) > 2
    model = OURS[family].from_pretrained(tmp_path / "plain", dtype=torch.float32)
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    expected = file.stock.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(
        torch.equal(tensor, expected[name].to(dtype).float()) for name, tensor in model.state_dict().items()
    )
    # Measured: 0.015.
    assert distance(logits(model), logits(file.stock)) < CLOSE
    assert verify(file.path, tmp_path / "plain", logits=False).verdict == "equal"


def test_transformers_reads_the_same_of_a_dense_file(tmp_path):
    file = write(tmp_path / "model.gguf", "llama", "Q4_K", [("attn_v", "Q6_K")])
    theirs = LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.bfloat16
    ).state_dict()
    for name, tensor in open_checkpoint(file.path).tensors.items():
        assert torch.equal(tensor.read(), theirs[name]), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
@pytest.mark.parametrize("family", FAMILIES)
def test_int4_has_the_codes_of_the_file(family, kind, tmp_path):
    """Weights differ from the file's by roundings of scales; quantizing again would move them by half a step."""
    config = {"intermediate_size": 256, **({"intermediate_size_mlp": 512} if family == "llama4" else {})}
    file = write(tmp_path / "model.gguf", family, kind, [("attn_output", "Q4_1")], config=config)
    quantize(file.path, tmp_path / "packed", to="int4")
    model = OURS[family].from_pretrained(tmp_path / "packed", quantization_config=FLOAT)
    expected = file.stock.state_dict()
    packed = dict(packed_weights(model))
    assert len(packed) == {"llama": 14, "mixtral": 12, "llama4": 16}[family]
    for name, weight in packed.items():
        is_transposed = family == "llama4" and name.endswith(("gate_up_proj", "experts.down_proj"))
        held, meant = (each.mT if is_transposed else each for each in (weight, expected[name]))
        # Two roundings: of the code's distance from 8 times the scale, and of the value of code 8.
        most = meant.abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True)
        assert ((held - meant).unflatten(-1, (-1, 32)).abs() <= 2.3 * HALF_STEP * most).all(), name
    assert distance(logits(model), logits(file.stock)) < CLOSE


def test_other_types_are_quantized_anew_and_what_is_plain_stays_so(tmp_path):
    """In a file of mixed types, those that int4 cannot store are quantized again, and plain ones stay."""
    kinds = [("blk.0.attn_v", "Q6_K"), ("attn_k", "F16"), ("blk.1.attn_q", "F32"), ("ffn_down", "Q5_K")]
    file = write(tmp_path / "model.gguf", "mixtral", "Q4_K", kinds, {"intermediate_size": 256})
    quantize(file.path, tmp_path / "packed", to="int4")
    convert(file.path, tmp_path / "plain")
    quantize(
        tmp_path / "plain",
        tmp_path / "anew",
        to="int4",
        keep=["self_attn.k_proj", "layers.1.self_attn.q_proj"],
    )
    config, expected = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("packed", "anew")
    )
    assert config["quantization_config"] == expected["quantization_config"]
    packed, anew = tensors_in(tmp_path / "packed"), tensors_in(tmp_path / "anew")
    same = {name for name, tensor in anew.items() if torch.equal(packed[name], tensor)}
    taken = ("gate_up_proj", "layers.1.self_attn.v_proj", "layers.0.self_attn.q_proj")
    assert same == {name for name in anew if not any(part in name for part in taken)}
    assert packed["model.layers.1.self_attn.q_proj.weight"].dtype == torch.bfloat16


def test_8_bits_go_through_16_since_int8_has_one_scale_an_output(tmp_path):
    file = write(tmp_path / "model.gguf", "llama4", "Q8_0", [("attn_q", "F16")])
    convert(file.path, tmp_path / "plain")
    quantize(file.path, tmp_path / "packed", to="int8")
    quantize(tmp_path / "plain", tmp_path / "anew", to="int8", keep=["self_attn.q_proj"])
    packed, anew = tensors_in(tmp_path / "packed"), tensors_in(tmp_path / "anew")
    assert packed.keys() == anew.keys() and all(
        torch.equal(packed[name], tensor) for name, tensor in anew.items()
    )


def test_a_tensor_for_each_expert_as_the_first_files_of_mixtral_have_them(tmp_path):
    whole = write(tmp_path / "whole.gguf", "mixtral")

    def split(tensors):
        tensors |= whole.stored
        for name in [name for name in tensors if "_exps" in name]:
            data, kind = tensors.pop(name)
            tensors |= {name.replace("_exps", f".{number}"): (part, kind) for number, part in enumerate(data)}

    write(tmp_path / "single.gguf", "mixtral", change=split)
    for name in ("whole", "single"):
        quantize(tmp_path / f"{name}.gguf", tmp_path / name, to="int4")
    expected = tensors_in(tmp_path / "whole")
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in tensors_in(tmp_path / "single").items()
    )
    parts = [inspect(tmp_path / f"{name}.gguf").parts for name in ("whole", "single")]
    assert parts[0]["experts"] == parts[1]["experts"]


@pytest.mark.parametrize(("family", "high"), [("llama", 4.0), ("llama4", 1.0)])
def test_tied_heads_and_scaled_rotation(family, high, tmp_path):
    rope = dict(rope_type="llama3", rope_theta=7e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=high)
    rope["original_max_position_embeddings"] = 8192
    # llama.cpp's converter writes these factors.
    turns = 8192 / 7e4 ** (torch.arange(0, 48, 2) / 48) / (2 * torch.pi)
    smooth = ((turns - 1) / (high - 1)).clamp(0, 1) if high > 1 else (turns > 1).float()
    factors = 1 / ((1 - smooth) / 8 + smooth)
    assert len(factors.unique()) > (2 if high > 1 else 1)
    file = write(
        tmp_path / "model.gguf",
        family,
        "F32",
        config={"tie_word_embeddings": True, "rope_parameters": rope, "num_hidden_layers": 4},
        change=lambda tensors: tensors.update({"rope_freqs.weight": (factors.float().numpy(), "F32")}),
    )
    convert(file.path, tmp_path / "plain")
    model = OURS[family].from_pretrained(tmp_path / "plain", dtype=torch.float32)
    assert model.config.tie_word_embeddings and model.config.rope_parameters == rope
    assert distance(logits(model), logits(file.stock)) < 1e-4


def test_biases_and_a_window(tmp_path):
    config = {"attention_bias": True, "mlp_bias": True}
    file = write(
        tmp_path / "model.gguf", "llama", "F32", config=config, keys={"llama.attention.sliding_window": 4}
    )
    convert(file.path, tmp_path / "plain")
    model = OURS["llama"].from_pretrained(tmp_path / "plain", dtype=torch.float32)
    assert model.config.sliding_window == 4
    model.config.sliding_window = model.config.layer_types = None
    whole = OURS["llama"](model.config).eval()
    whole.load_state_dict(model.state_dict())
    assert distance(logits(whole), logits(file.stock)) < 1e-5


def test_a_file_in_parts(tmp_path):
    whole = write(tmp_path / "whole.gguf", "llama")
    write(tmp_path / "part.gguf", "llama", parts=5, change=lambda tensors: tensors.update(whole.stored))
    parts = sorted(tmp_path.glob("part-*-of-*.gguf"))
    assert len(parts) == 5
    for source in parts[0], parts[-1]:
        found = open_checkpoint(source)
        assert found.sources == parts
        for name, tensor in open_checkpoint(whole.path).tensors.items():
            assert torch.equal(tensor.read(), found.tensors[name].read()), name
    parts[2].unlink()
    with pytest.raises(ValueError, match=rf"split.count is 5, and {parts[2].name} missing beside it"):
        convert(parts[0], tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_inspecting(tmp_path):
    file = write(tmp_path / "model.gguf", "llama4", "Q4_K", [("attn_v", "Q6_K")])
    found = inspect(file.path, plan=True, ram="16GB", gpus=0)
    assert found.kind == "gguf" and found.dtypes["Q6_K"][0] == 2 and found.dtypes["F32"][0] == 6
    assert found.sizes["num_local_experts"] == 3 and set(found.needs) == {"bfloat16", "int8", "int4"}
    assert sum(size for _, size in found.parts.values()) == sum(size for _, size in found.dtypes.values())


def drop(name):
    return lambda tensors: tensors.pop(name)


def shorten(name):
    return lambda tensors: tensors.update({name: (tensors[name][0][:-1], tensors[name][1])})


def spoil(tensors):
    """Make a scale infinite."""
    data, kind = tensors["blk.1.attn_q.weight"]
    data[3, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    tensors["blk.1.attn_q.weight"] = data, kind


REFUSED = {
    "another architecture": (dict(keys={"general.architecture": "qwen3"}), "general.architecture = 'qwen3'"),
    "an unknown key": (dict(keys={"llama.attention.logit_scale": 3}), "llama.attention.logit_scale = 3 is not read"),
    "another size of heads": (dict(keys={"llama.rope.dimension_count": 24}), "rope.dimension_count = 24"),
    "an unknown scaling": (dict(keys={"llama.rope.scaling.type": "ntk"}), "rope.scaling.type = 'ntk'"),
    "a tensor missing": (dict(change=drop("blk.1.attn_q.weight")), "model.layers.1.self_attn.q_proj.weight missing"),
    "another shape": (dict(change=shorten("blk.0.ffn_gate_exps.weight")), "blk.0.ffn_gate_exps.weight"),
    "no embedding": (dict(change=drop("token_embd.weight")), "token_embd.weight missing"),
    "a tensor of another model": (
        dict(change=lambda t: t.update({"blk.0.attn_sinks.weight": (np.ones(3, np.float32), "F32")})),
        "unknown tensor blk.0.attn_sinks.weight",
    ),
    "a scale that is no number": (dict(change=spoil), "blk.1.attn_q.weight"),
    "other factors of frequencies": (
        dict(change=lambda t: t.update({"rope_freqs.weight": (np.linspace(1, 2, 24, dtype=np.float32), "F32")})),
        "rope_freqs.weight: its factors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("write_target", [convert, partial(quantize, to="int4")], ids=["16 bits", "int4"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_or_not_known_leaves_nothing(case, write_target, tmp_path):
    options, says = REFUSED[case]
    file = write(tmp_path / "model.gguf", "mixtral", **options)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        write_target(file.path, tmp_path / "target")
    assert "model.gguf" in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.002, 0.01, 0.5, 0.999])
def test_a_file_cut_short_is_refused_whatever_is_lost(share, tmp_path):
    file = write(tmp_path / "model.gguf", "llama")
    content = file.path.read_bytes()
    file.path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"model\.gguf: .*(cut short|is no GGUF file)") as caught:
        convert(file.path, tmp_path / "target")
    assert "\n" not in str(caught.value) and not (tmp_path / "target").exists()


def test_random_changes_of_the_header_never_raise_anything_else(tmp_path):
    file = write(tmp_path / "model.gguf", "mixtral")
    content = bytearray(file.path.read_bytes())
    for _ in range(300):
        changed = content.copy()
        for place in torch.randint(0, 3500, (int(torch.randint(1, 4, ())),)).tolist():
            changed[place] = int(torch.randint(0, 256, ()))
        file.path.write_bytes(changed)
        with suppress(CheckpointError):
            open_checkpoint(file.path)


def test_big_endian_numbers_are_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(ValueError, match="version 50331648"):
        open_checkpoint(tmp_path / "model.gguf")
