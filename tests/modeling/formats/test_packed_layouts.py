"""Conversion of the packed weights of other programs to plain weights and to int4."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.published import KINDS, config_of, numbers, pack, weight_of

from llamoe.configuration.errors import ConfigurationError
from llamoe.modeling.formats import Int4
from llamoe.modeling.formats.packed import LAYOUTS

SIZES = NUM_OUT, NUM_IN = 112, 384
# The largest relative error of rounding a scale or an offset to bfloat16.
HALF_STEP = 2.0**-8


def layout_of(config):
    return LAYOUTS[config["quant_method"]](config)


def check_values(parts, form, codes, zero, scale, group_size):
    """Check that weights differ by the rounding of scale and offset to bfloat16 at most."""
    groups = torch.arange(codes.shape[1]) // (group_size or codes.shape[1])
    scale = scale.float()
    most = (codes - 8).abs() * scale[:, groups] + ((8 - zero) * scale)[:, groups].abs()
    difference = form.matrix(parts, codes.shape, torch.float32) - weight_of(codes, zero, scale, group_size)
    assert (difference.abs() <= HALF_STEP * most + 1e-7).all()


@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_out", [NUM_OUT, 128])
def test_codes_are_taken_over_exactly(num_out, kind, group_size):
    """The compiled kernel packs 128 outputs, which are whole blocks; torch packs 112."""
    sizes = num_out, NUM_IN
    codes, zero, scale = numbers(kind, *sizes, group_size)
    tensors = pack(kind, codes, zero, scale, group_size)
    layout = layout_of(config_of(kind, group_size))
    assert set(tensors) <= {*layout.kinds, "bias"}
    unpacked = layout.unpack(tensors, sizes)
    assert torch.equal(layout.codes_of(unpacked.codes, sizes).long(), codes) and torch.equal(
        unpacked.zero.long(), zero
    )
    assert torch.equal(unpacked.scale, scale) and unpacked.group_of_input is None
    assert torch.equal(layout.weight_of(tensors, sizes), weight_of(codes, zero, scale, group_size))
    # A scale for each output is repeated for all groups of int4.
    form = Int4(group_size or 128)
    parts = layout.parts_of([tensors], sizes, form)
    assert [(part.shape, part.dtype) for part in parts] == form.parts(sizes)
    check_values(parts, form, codes, zero, scale, group_size)
    joined = layout.parts_of([tensors, tensors], sizes, form)
    check_values(joined, form, *(torch.cat([each, each]) for each in (codes, zero, scale)), group_size)


@pytest.mark.parametrize("packer", ["AutoAWQ", "GPTQModel awq", "AutoGPTQ", "GPTQModel v1", "GPTQModel v2"])
def test_what_the_formats_own_packers_made_of_a_matrix(packer):
    """Some zero points are 0, and groups of GPTQ are out of order. Version 1 of GPTQ stores zero points minus 1."""
    file = load_file(Path(__file__).with_name("packers.safetensors"))
    codes, zero, scale, groups = (file[name] for name in ("codes", "zero", "scale", "groups"))
    tensors = {
        name.partition(".")[2]: tensor for name, tensor in file.items() if name.startswith(f"{packer}.")
    }
    kind = {"AutoAWQ": "awq", "GPTQModel awq": "awq", "GPTQModel v2": "gptq_v2"}.get(packer, "gptq")
    groups = torch.arange(64) // 32 if kind == "awq" else groups.long()
    if packer == "AutoGPTQ":
        # It spoils the neighbours of such zeros.
        zero = zero.clamp(min=1)
    layout = layout_of(config_of(kind, 32))
    expected = (codes.float() - zero.float()[:, groups]) * scale.float()[:, groups]
    assert torch.equal(layout.weight_of(tensors, codes.shape), expected)


def test_groups_out_of_order_are_quantized_anew():
    """int4 has no groups as of `desc_act`, so weights are rounded again, by half a step of int4's scale."""
    codes, zero, scale = numbers("gptq", *SIZES, 32)
    tensors = pack("gptq", codes, zero, scale, 32)
    groups = torch.randint(0, NUM_IN // 32, (NUM_IN,))
    tensors["g_idx"] = groups.int()
    layout, form = layout_of(config_of("gptq", 32)), Int4(32, search=False)
    exact = (codes - zero[:, groups]) * scale.float()[:, groups]
    assert torch.equal(layout.weight_of(tensors, SIZES), exact)
    parts = layout.parts_of([tensors], SIZES, form)
    spans = exact.view(NUM_OUT, -1, 32).aminmax(dim=2)
    steps = (spans.max - spans.min).repeat_interleave(32, 1) / 15
    difference = (form.matrix(parts, SIZES, torch.float32) - exact).abs()
    assert (difference <= 0.6 * steps + 0.02 * exact.abs().amax()).all()


def changed(kind, **fields):
    config = config_of(kind, 32)
    for group in config.get("config_groups", {}).values():
        group["weights"] |= {name: fields.pop(name) for name in group["weights"] if name in fields}
        group |= {name: fields.pop(name) for name in ("input_activations",) if name in fields}
    return config | fields


MIXED = {
    "a": {"weights": {"num_bits": 8, "type": "int"}, "targets": ["Linear"]},
    "b": config_of("symmetric", 32)["config_groups"]["group_0"],
}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (changed("gptq", bits=3), "bits is 3"), (changed("gptq", bits=8), "bits is 8"),
        (changed("gptq", group_size=16), "group_size is 16"), (changed("gptq", checkpoint_format="marlin"), "marlin"),
        (changed("gptq", dynamic={"+:.*down": {"bits": 8}}), "dynamic"),
        (changed("awq", bits=8), "bits is 8"), (changed("awq", version="GEMV"), "GEMV"),
        (changed("symmetric", num_bits=8), "'num_bits': 8"), (changed("symmetric", type="float"), "'type': 'float'"),
        (changed("symmetric", strategy="tensor"), "'tensor'"), (changed("symmetric", group_size=48), "48"),
        (changed("float8", strategy="block", block_structure="16x16"), "block_structure is '16x16'"),
        *(({"quant_method": "fp8", "weight_block_size": size}, "weight_block_size is ") for size in (64, [64])),
        (changed("float8", strategy="block"), "'block'"), (changed("float8", num_bits=4), "'num_bits': 4"),
        (changed("symmetric", format="nvfp4-pack-quantized"), "nvfp4"),
        (changed("symmetric", config_groups={}), "config_groups"), (changed("symmetric", config_groups=MIXED), "a'"),
        (changed("symmetric", input_activations={"num_bits": 8}), "input_activations"),
        (changed("symmetric", transform_config={"config_groups": {"R1": {}}}), "transform_config is ['R1']"),
        (changed("int8", symmetric=False), "'symmetric': False"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_its_name(config, says):
    with pytest.raises(ConfigurationError, match=r"^config.json: quantization_config\.") as caught:
        layout_of(config)
    assert says in str(caught.value) and "\n" not in str(caught.value)
