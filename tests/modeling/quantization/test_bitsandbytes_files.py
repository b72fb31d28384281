"""Files with experts in bitsandbytes' formats: damaged tensors, and the ways to store plain experts."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from support.bitsandbytes_models import FAMILIES, folder_of, load, logits, matrices, published

from llamoe.configuration.errors import CheckpointError

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


def with_nan(tensor):
    tensor.view(-1)[7] = torch.nan
    return tensor


def spoil(key, change):
    def damage(state):
        state[key] = change(state[key].clone())

    return damage


SCALES = ONE.replace(".experts.3.up_proj.weight", ".experts.gate_up_proj")
SCB, LAYOUT = (ONE.replace("weight", name) for name in ("SCB", "weight_format"))
# By method: what is damaged, and what is said of it.
DAMAGES = {
    "nf4 nested": [
        (drop(".experts.3.up_proj"), r"experts\.3\.up_proj\.\S+ is missing"),
        (drop(r".experts.\d+.down_proj"), r"experts\.down_proj, .*cannot be filled"),
        (
            lambda s: s.update({ONE.replace(".3.", ".5."): s[ONE].clone()}),
            r"up_proj\.weight': 6, .*num_local_experts in config\.json is 5",
        ),
        (
            lambda s: s.update({SCALES: torch.zeros(5, 72, 104)}),
            r"is stored twice: .*experts\.gate_up_proj",
        ),
        (lambda s: s.pop(f"{ONE}.absmax"), r"up_proj\.weight\.absmax is missing"),
        (lambda s: s.pop(STATE), r"quant_state\.bitsandbytes__nf4 is missing"),
        (lambda s: s.pop(f"{ONE}.nested_absmax"), r"nested_absmax is missing"),
        (lambda s: facts(s, blocksize=128), r"'nf4', 128, .* not .*'nf4', 64"),
        (lambda s: facts(s, quant_type="fp4"), r"'fp4', 64, .* not .*'nf4', 64"),
        (lambda s: facts(s, shape=[72, 52]), r"\[72, 52\].* not .*\[52, 72\]"),
        (lambda s: facts(s, nested_blocksize=64), r"64\], not .* 256\]"),
        (spoil(ONE, lambda t: t[:-3].clone()), r"shapes \[\(1869,\)"),
        (spoil(f"{ONE}.absmax", lambda t: t[:-1].clone()), r"shapes .*\(58,\)"),
    ],
    "nf4": [
        (spoil(f"{ONE}.absmax", with_nan), rf"{SCALES}_absmax has scales that are NaN or infinite"),
        # So bitsandbytes leaves the scales after a forward on some CPUs.
        (
            spoil(f"{ONE}.absmax", lambda t: t[:52].view(1, 52).bfloat16()),
            r"shapes .*\(1, 52\)",
        ),
    ],
    "8 bit": [
        (spoil(SCB, with_nan), rf"{SCALES}_scb has scales that are NaN or infinite"),
        (spoil(ONE, lambda t: t.mT.contiguous()), r"shapes \[\(72, 52\)"),
        (spoil(LAYOUT, lambda t: t + 1), r"weight_format is 1, not 0"),
    ],
}


@pytest.mark.parametrize("method", DAMAGES)
def test_damaged_folders_are_refused_in_one_sentence(method, tmp_path):
    folder = tmp_path / "published"
    whole = published(folder, folder_of("llama4"), "llama4", method)
    for damage, message in DAMAGES[method]:
        state = dict(whole)
        damage(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=message) as caught:
            load(folder, "llama4")
        assert str(caught.value).count("\n") == 0


@for_families
def test_weights_of_other_sizes_are_refused(family):
    config = FAMILIES[family][1]()
    config.intermediate_size = 56
    with pytest.raises(CheckpointError, match=r"but the model that config\.json describes has"):
        load(folder_of(family), family, "nf4", config=config)


def test_every_way_to_store_plain_experts_gives_the_same(tmp_path):
    """Stacks, linear layers and a pickle; float32 is cast to bfloat16 before it is quantized, as in linear layers."""
    expected = logits(load(folder_of("llama4"), "llama4", "nf4"))
    model = load(folder_of("llama4"), "llama4").float()
    state = model.state_dict()
    single = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    single |= {f"{name}.weight": tensor for name, tensor in matrices(state, "llama4").items()}
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert torch.equal(logits(load(tmp_path, "llama4", "nf4", dtype=torch.bfloat16)), expected)
    save_file(single, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(load(tmp_path, "llama4", "nf4", dtype=torch.bfloat16)), expected)
