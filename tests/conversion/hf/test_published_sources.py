"""`convert`, `quantize`, `inspect` and `verify` read folders that other programs have packed."""

import json
from functools import partial
from itertools import product

import pytest
import torch
from safetensors.torch import save_file
from support.few_bits import CLOSE, distance, logits
from support.models import tensors_in
from support.published import EIGHT_BITS, KINDS, OURS, publish, weight_of

import llamoe
from llamoe.conversion import convert, inspect, open_checkpoint, quantize, upcycle, verify
from llamoe.conversion.io.lazy_tensor import blocks

FAMILIES = ("llama", "mixtral", "llama4")


def config_in(folder):
    return json.loads((folder / "config.json").read_text())


def assert_same_folder(found, expected):
    """Check that both folders have equal tensors and the same config of int4."""
    ours, theirs = tensors_in(found), tensors_in(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    fields = ("quantization_config", "architectures", "dtype", "model_type")
    assert [config_in(found)[field] for field in fields] == [config_in(expected)[field] for field in fields]


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [
        *product(FAMILIES, [*KINDS, *EIGHT_BITS], ["bfloat16"]),
        ("llama4", "gptq", "float16"),
        ("mixtral", "float8 block", "float16"),
    ],
)
def test_converting_gives_in_16_bits_what_the_folder_means(family, kind, dtype, tmp_path):
    published = publish(tmp_path / "published", family, kind, None if kind in EIGHT_BITS else 32)
    config = config_in(published.path) | {"dtype": dtype}
    (published.path / "config.json").write_text(json.dumps(config))
    report = convert(published.path, tmp_path / "plain", experts="split", shard_size="40KB")
    assert report.kind == config["quantization_config"]["quant_method"] and len(report.files) > 3
    assert "quantization_config" not in config_in(tmp_path / "plain")
    plain = tensors_in(tmp_path / "plain")
    for name, drawn in published.numbers.items():
        expected = weight_of(*drawn, None if kind in EIGHT_BITS else 32).to(getattr(torch, dtype))
        assert torch.equal(plain[f"{name}.weight"], expected), name
    model = OURS[family].from_pretrained(tmp_path / "plain", dtype=torch.float32)
    # Measured: 0.006 in bfloat16.
    assert distance(logits(model), logits(published.stock)) < CLOSE
    assert verify(published.path, tmp_path / "plain", logits=False).verdict == "equal"


TOWER = ["vision_model", "multi_modal_projector", "self_attn"]


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        *product(FAMILIES, KINDS, [dict(kept=["layers.1.self_attn"], ignore=["re:.*layers.1.self_attn.*"])]),
        ("multimodal", "symmetric", dict(kept=TOWER)),
        ("mixtral", "asymmetric", dict(group_size=None, spelling="mlp")),
        ("mixtral", "gptq", dict(group_size=None, spelling="mlp")),
    ],
    ids=str,
)
def test_int4_has_the_codes_of_the_folder_as_a_loaded_model_saves_them(family, kind, options, tmp_path):
    published = publish(tmp_path / "published", family, kind, **options)
    model = OURS[family].from_pretrained(published.path)
    model.save_pretrained(tmp_path / "saved")
    quantize(published.path, tmp_path / "packed", to="int4", shard_size="50KB")
    assert_same_folder(tmp_path / "packed", tmp_path / "saved")
    again = OURS[family].from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("kind", "to"), [("awq", "int8"), ("float8", "int8"), ("float8", "int4"), ("float8 whole", "int4")]
)
def test_other_bits_are_of_what_the_folder_means_without_what_its_author_left_in_16_bits(kind, to, tmp_path):
    size = None if kind in EIGHT_BITS else 32
    published = publish(tmp_path / "published", "llama4", kind, size, kept=["self_attn"])
    convert(published.path, tmp_path / "plain")
    keep = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    quantize(published.path, tmp_path / "packed", to=to)
    quantize(tmp_path / "plain", tmp_path / "expected", to=to, keep=keep)
    assert_same_folder(tmp_path / "packed", tmp_path / "expected")


def test_int8_has_the_codes_of_whole_numbers_with_a_scale_for_each_output(tmp_path):
    published = publish(tmp_path / "published", "mixtral", "int8", None, kept=["self_attn"])
    quantize(published.path, tmp_path / "packed", to="int8")
    packed = tensors_in(tmp_path / "packed")
    for layer in range(2):
        for number in range(3):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{number}."
            gate, up, down = (published.numbers[name + part] for part in ("w1", "w3", "w2"))
            for stack, matrices in {"gate_up_proj": (gate, up), "down_proj": (down,)}.items():
                codes, scales = (torch.cat([each[part] for each in matrices]) for part in (0, 2))
                key = f"model.layers.{layer}.mlp.experts.{stack}"
                assert torch.equal(packed[key][number].float(), codes)
                assert torch.equal(packed[f"{key}_scale"][number], scales[:, 0].bfloat16())


@pytest.mark.parametrize("family", ["llama4", "multimodal"])
def test_stacks_in_8_bits_with_their_scales(family, tmp_path):
    """The names, shapes and dtypes are those of transformers' class for Llama 4 in fbgemm's format."""
    from transformers.integrations.fbgemm_fp8 import FbgemmFp8Llama4TextExperts

    published = publish(tmp_path / "published", family, "float8", None, kept=TOWER)
    tensors = tensors_in(published.path)
    config = published.stock.config.get_text_config()
    expected = FbgemmFp8Llama4TextExperts(config).state_dict()
    prefix = "language_model." if family == "multimodal" else ""
    for path in (f"{prefix}model.layers.{layer}.feed_forward.experts" for layer in config.moe_layers):
        layers = {
            part: [
                [tensors.pop(f"{path}.{n}.{part}.{kind}") for n in range(3)]
                for kind in ("weight", "weight_scale")
            ]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        codes = [[each.view(torch.uint8).T for each in layers[part][0]] for part in layers]
        scales = [layers[part][1] for part in layers]
        fused = {
            "gate_up_proj": torch.stack([torch.cat(pair, 1) for pair in zip(*codes[:2], strict=True)]),
            "gate_up_proj_scale": torch.stack(
                [torch.cat(pair).T for pair in zip(*scales[:2], strict=True)]
            ).float(),
            "down_proj": torch.stack(codes[2]),
            "down_proj_scale": torch.stack(scales[2]).float(),
        }
        for name, tensor in fused.items():
            tensor = tensor if "scale" in name else tensor.contiguous().view(torch.float8_e4m3fn)
            assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype)
            tensors[f"{path}.{name}"] = tensor.contiguous()
    save_file(tensors, published.path / "model.safetensors", {"format": "pt"})
    content = config_in(published.path) | {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    (published.path / "config.json").write_text(json.dumps(content))
    model = OURS[family].from_pretrained(published.path)
    # Measured: 0.006.
    assert distance(logits(model), logits(published.stock)) < CLOSE
    assert convert(published.path, tmp_path / "plain").kind == "fbgemm_fp8"
    again = OURS[family].from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    del tensors[next(name for name in tensors if name.endswith("experts.down_proj_scale"))]
    save_file(tensors, published.path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.down_proj: 'weight_scale' is missing"):
        OURS[family].from_pretrained(published.path)


@pytest.mark.parametrize("options", [{"weight_block_size": (32, 64)}, {"weight_block_size": None}], ids=str)
def test_mixtral_as_transformers_saves_it_in_fp8(options, tmp_path, monkeypatch):
    """Codes are stored expert by expert, scales in stacks; without blocks an expert's gate and up share a scale."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    stock = publish(
        tmp_path / "published", "mixtral", "float8", None, config={"intermediate_size": 192}
    ).stock
    stock.bfloat16().save_pretrained(tmp_path / "stock")
    # The check of the environment asks for a GPU, which quantizing does not need.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None)
    quantized = type(stock).from_pretrained(
        tmp_path / "stock", quantization_config=FineGrainedFP8Config(**options)
    )
    quantized.save_pretrained(tmp_path / "fp8")
    stored = tensors_in(tmp_path / "fp8")
    path, block = "model.layers.1.block_sparse_moe.experts", options["weight_block_size"] or (384, 128)
    codes = torch.cat([stored[f"{path}.2.{part}.weight"].float() for part in ("w1", "w3")])
    scale = stored[f"{path}.gate_up_proj_scale_inv"][2]
    expected = codes * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    model = OURS["mixtral"].from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    held = model.state_dict()
    assert torch.equal(held["model.layers.1.mlp.experts.gate_up_proj"][2], expected.bfloat16())
    # Measured: 0.026, the error of 8 bits.
    for name, weight in stock.state_dict().items():
        assert distance(held[name].float(), weight.float()) < 0.03, name
    convert(tmp_path / "fp8", tmp_path / "plain")
    again = OURS["mixtral"].from_pretrained(tmp_path / "plain").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in held.items())
    with pytest.raises(ValueError, match="scales of all experts in one tensor"):
        OURS["mixtral"].from_pretrained(tmp_path / "fp8", device_map={"experts": "disk"})
    machine = dict(gpus=0, headroom=0, context=40)
    plan = llamoe.plan_placement(tmp_path / "fp8", ram="1GB", **machine)
    assert plan.weights == {"cpu": sum(tensor.nbytes for tensor in held.values())}
    with pytest.raises(ValueError, match="does not fit"):
        llamoe.plan_placement(tmp_path / "fp8", ram=plan.weights["cpu"], **machine)
    del stored[f"{path}.down_proj_scale_inv"]
    save_file(stored, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.down_proj: 'weight_scale_inv' is missing"):
        OURS["mixtral"].from_pretrained(tmp_path / "fp8")


def test_options_of_quantize(tmp_path):
    published = publish(tmp_path / "published", "mixtral", "gptq")
    quantize(published.path, tmp_path / "packed", to="int4", linears=False, keep=["layers.1.mlp.experts"])
    packed = tensors_in(tmp_path / "packed")
    assert sorted(name for name, tensor in packed.items() if tensor.dtype == torch.uint8) == [
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.0.mlp.experts.gate_up_proj",
    ]
    with pytest.raises(ValueError, match="group_size = 64: .* has groups of 32"):
        quantize(published.path, tmp_path / "again", to="int4", group_size=64)
    with pytest.raises(ValueError, match="quantized already"):
        upcycle(published.path, tmp_path / "again", experts=2)
    assert not (tmp_path / "again").exists()


def test_inspecting_says_what_is_packed(tmp_path):
    published = publish(tmp_path, "mixtral", "gptq")
    found = inspect(published.path)
    assert found.kind == "gptq" and found.dtypes["int32"][0] == 3 * len(published.numbers)
    assert found.parts["experts"][0] == 2 * 3 * 3 * 96 * 128
    assert set(found.needs) == {"int4"}
    assert "gptq, read as int4 in groups of 32" in str(found.sections())
    assert inspect(published.path / "config.json").needs == found.needs
    (published.path / "model.safetensors").unlink()
    publish(tmp_path, "mixtral", "float8", group_size=None)
    assert set(inspect(published.path).needs) == {"bfloat16", "int8", "int4"}


def test_a_block_is_a_matrix_or_an_expert(tmp_path):
    tensors = open_checkpoint(publish(tmp_path, "mixtral", "asymmetric").path).tensors
    experts = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert blocks(experts) == [(0, 1), (1, 2), (2, 3)]
    assert blocks(tensors["model.layers.1.self_attn.q_proj.weight"]) == [(0, 256)]


LAYER = "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize(
    ("change", "fields", "says"),
    [
        (
            lambda t: t.pop(f"{LAYER}.qzeros"),
            {},
            rf"model\.safetensors: {LAYER}.g_idx: .*'qzeros' is missing",
        ),
        (lambda t: t[f"{LAYER}.scales"].fill_(torch.inf), {}, rf"{LAYER}.*NaN or infinity"),
        (
            lambda t: t.pop("model.layers.1.block_sparse_moe.experts.1.w1.scales"),
            {},
            r"w1.g_idx: .*'scales' is missing",
        ),
        (lambda t: None, {"bits": 3}, r"config\.json: quantization_config\.bits is 3"),
        (
            lambda t: None,
            {"quant_method": "hqq"},
            r"config\.json: quantization_config is .*hqq.* is not read",
        ),
    ],
)
@pytest.mark.parametrize("write", [convert, partial(quantize, to="int4")], ids=["16 bits", "int4"])
def test_what_is_missing_or_not_read_leaves_nothing(write, change, fields, says, tmp_path):
    published = publish(tmp_path / "published", "mixtral", "gptq", **fields)
    tensors = {name: tensor.clone() for name, tensor in tensors_in(published.path).items()}
    change(tensors)
    save_file(tensors, published.path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=says) as caught:
        write(published.path, tmp_path / "target")
    assert "\n" not in str(caught.value) and not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["awq", "fp8"])
def test_a_file_cut_short_is_named(kind, tmp_path):
    file = (
        publish(tmp_path / "published", "llama4", kind, None if kind in EIGHT_BITS else 32).path
        / "model.safetensors"
    )
    file.write_bytes(file.read_bytes()[:-100])
    for read in (inspect, partial(convert, target=tmp_path / "target"), OURS["llama4"].from_pretrained):
        with pytest.raises(ValueError, match=r"model\.safetensors: ") as caught:
            read(tmp_path / "published")
        assert "\n" not in str(caught.value) and not (tmp_path / "target").exists()
