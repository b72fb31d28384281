"""Files with experts, for or by bitsandbytes: every way to store them, damage to each tensor, and memory."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from support.bitsandbytes_models import FAMILIES, folder_of, load, logits, matrices, published

from llamoe.configuration.errors import CheckpointError
from llamoe.modeling.moe import Experts

pytestmark = pytest.mark.slow

for_families = pytest.mark.parametrize("family", FAMILIES)

ONE = "model.layers.1.feed_forward.experts.3.up_proj.weight"
STATE = f"{ONE}.quant_state.bitsandbytes__nf4"


def facts(state, **changes):
    content = json.loads(bytes(state[STATE].tolist()))
    state[STATE] = torch.tensor(list(json.dumps({**content, **changes}).encode()), dtype=torch.uint8)


def drop(pattern):
    def damage(state):
        for name in [name for name in state if re.search(pattern, name)]:
            del state[name]

    return damage


def spoil(key, change):
    def damage(state):
        state[key] = change(state[key].clone())

    return damage


def with_nan(tensor):
    tensor[1] = float("nan")
    return tensor


DAMAGES = {
    "no expert": (drop(".experts.3.up_proj"), r"experts\.3\.up_proj\.weight is missing \(1"),
    "no experts": (drop(r".experts.\d+.down_proj"), r"experts\.down_proj is missing"),
    "too many": (
        lambda s: s.update({ONE.replace(".3.", ".5."): s[ONE].clone()}),
        r"is of expert 5, but num_local_experts .* is 5",
    ),
    "fused, too": (
        lambda s: s.update({"model.layers.1.feed_forward.experts.gate_up_proj": torch.zeros(5, 72, 104)}),
        r"is there a second time: .*experts\.gate_up_proj",
    ),
    "no scales": (lambda s: s.pop(f"{ONE}.absmax"), r"up_proj\.weight\.absmax is missing, without which"),
    "no state": (lambda s: s.pop(STATE), r"bitsandbytes__nf4 is missing, without which"),
    "no nested scales": (lambda s: s.pop(f"{ONE}.nested_absmax"), r"nested_absmax is missing, without which"),
    "no numbers of the codes": (lambda s: s.pop(f"{ONE}.quant_map"), r"quant_map is missing, without which"),
    "other codes": (spoil(f"{ONE}.nested_quant_map", lambda t: t + 0.01), r"nested_quant_map has other numbers"),
    "other blocks": (lambda s: facts(s, blocksize=128), r"nf4 says blocksize 128, but other experts have 64\. Quant"),
    "no blocks": (lambda s: facts(s, blocksize=0), r"nf4 says blocksize 0; bitsandbytes has 32 to 4096"),
    "other kind": (
        lambda s: s.update({STATE.replace("nf4", "fp4"): s.pop(STATE)}),
        r"fp4 is there, but bnb_4bit_quant_type .* 'nf4'",
    ),
    "other shape": (lambda s: facts(s, shape=[72, 52]), r"says shape \[72, 52\], but the model .* has \[52, 72\]"),
    "other nested blocks": (lambda s: facts(s, nested_blocksize=64), r"says nested_blocksize 64 and nested_offset"),
    "no offset": (lambda s: facts(s, nested_offset=float("nan")), r"says nested_offset nan\. The checkp"),
    "no JSON": (spoil(STATE, lambda t: t[:-9]), r"nf4 cannot be read as the state of a weight"),
    "fewer codes": (spoil(ONE, lambda t: t[:-3].clone()), r"up_proj\.weight holds 1869 bytes, where .* take 1872"),
    "NaN": (spoil(f"{ONE}.nested_absmax", lambda t: t * float("nan")), r"nested_absmax: 1 of 1 scales are NaN"),
    "scales of others": (spoil(f"{ONE}.absmax", lambda t: t[:-1].clone()), r"absmax has shape \[58\] .* where \[59\]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def others_folder(tmp_path_factory):
    """A folder that others have quantized, and its tensors."""
    folder = tmp_path_factory.mktemp("others") / "folder"
    return folder, published(folder, folder_of("llama4"), "llama4", "nf4 nested")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_in_one_sentence(damage, others_folder):
    folder, whole = others_folder
    state = dict(whole)
    change, message = DAMAGES[damage]
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder, "llama4")
    assert "model.safetensors" in str(caught.value) or damage == "no experts"
    assert str(caught.value).count("\n") == 0


def test_damaged_scales_without_double_quantization(tmp_path):
    for method, key, change, message in (
        ("nf4", f"{ONE}.absmax", with_nan, "absmax: 1 of 59 scales are NaN or infinite"),
        ("nf4", f"{ONE}.absmax", lambda t: t[:52].view(1, 52).bfloat16(), "after a pass on a CPU"),
        ("8 bit", ONE.replace("weight", "SCB"), with_nan, "up_proj.SCB: 1 of 52 scales are NaN or infinite"),
        ("8 bit", ONE, lambda t: t.mT.contiguous(), r"up_proj.weight has shape \[72, 52\]"),
        (
            "8 bit",
            ONE.replace("weight", "weight_format"),
            lambda t: t + 1,
            "weight_format is 1, a layout of old",
        ),
    ):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        state = published(folder, folder_of("llama4"), "llama4", method)
        state[key] = change(state[key].clone())
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            load(folder, "llama4")


@for_families
def test_weights_that_cannot_be_quantized_are_refused(family, tmp_path):
    model = load(folder_of(family), family)
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    with torch.no_grad():
        experts.down_proj[2, 7, 9] = float("inf")
    model.save_pretrained(tmp_path / "infinite")
    for method in ("nf4", "nf4 nested", "8 bit"):
        with pytest.raises(CheckpointError, match=r"scales are NaN or infinite.*overflowed"):
            load(tmp_path / "infinite", family, method)
    config = FAMILIES[family][1]()
    config.intermediate_size = 56
    with pytest.raises(CheckpointError, match=r"but the model that config\.json describes has"):
        load(folder_of(family), family, "nf4", config=config)


def test_every_way_to_store_plain_experts_gives_the_same(tmp_path):
    """Fused, one by one in both spellings, and as a pickle; in float32, cast as linear layers are."""
    expected = logits(load(folder_of("llama4"), "llama4", "nf4"))
    model = load(folder_of("llama4"), "llama4").float()
    state = model.state_dict()
    others = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    numbered = {f"{name}.weight": tensor for name, tensor in matrices(state, "llama4").items()}
    for spelling in ("numbered", "listed", "bin"):
        found = dict(numbered)
        if spelling == "listed":
            found = {}
            for name, tensor in numbered.items():
                path, number, word, _ = name.rsplit(".", 3)
                found[f"{path}.{word}s.{number}.weight"] = tensor
        folder = tmp_path / spelling
        model.save_pretrained(folder)
        if spelling == "bin":
            (folder / "model.safetensors").unlink()
            torch.save(state, folder / "pytorch_model.bin")
        else:
            save_file(others | found, folder / "model.safetensors", {"format": "pt"})
        assert torch.equal(logits(load(folder, "llama4", "nf4", dtype=torch.bfloat16)), expected), spelling
    del numbered["model.layers.1.feed_forward.experts.2.up_proj.weight"]
    save_file(others | numbered, tmp_path / "numbered" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight is missing"):
        load(tmp_path / "numbered", "llama4", "nf4")
