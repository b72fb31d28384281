"""What Mixtral alone has, against transformers' Mixtral: ties of the router, files of experts, positions.

Logits, losses and gradients are in `test_parity.py`, heads in `test_classification.py`.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import load_whole, max_abs, stock_mixtral_config, stock_model
from torch.nn import functional as F
from transformers import MixtralForCausalLM

import llamoe
from llamoe import LlamoeMixtralForCausalLM
from llamoe.modeling.kernels import rows_of_torch


def ids(length=50, rows=2):
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(1))


def pair(folder, **overrides):
    stock = stock_model(MixtralForCausalLM, stock_mixtral_config(**overrides))
    stock.save_pretrained(folder)
    return stock, load_whole(LlamoeMixtralForCausalLM, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_and_near_ties_go_stocks_way(dtype, monkeypatch):
    """Experts that share a weight tie exactly, and in 16 bits most others nearly do."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    from llamoe.modeling.moe import Router

    config = stock_mixtral_config(num_local_experts=7, num_experts_per_tok=3)
    stock, ours = MixtralTopKRouter(config), Router(llamoe.from_stock(config))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 72, generator=generator)
    weight[4], weight[2] = weight[1], weight[0] * (1 + 2e-7)
    x = 0.1 * torch.randn(4096, 72, generator=generator)
    for router in (stock, ours):
        router.weight.data.copy_(weight)
        router.to(dtype)
    if rows_of_torch(dtype) is not None:
        # Without instructions for it ours multiplies in float32, and so must stock.
        def linear(x, weight, bias=None, original=F.linear):
            return original(x.float(), weight.float(), bias).to(x.dtype)

        monkeypatch.setattr(F, "linear", linear)
    for mine, its in zip(ours(x.to(dtype)), stock(x.to(dtype)), strict=True):
        assert mine.dtype == its.dtype and torch.equal(mine, its)


@pytest.mark.parametrize("layout", ["stock", "llamoe"])
def test_folders_go_both_ways_bit_for_bit(layout, tmp_path):
    stock, ours = pair(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours", layout=layout)
    given, written = (load_file(tmp_path / name / "model.safetensors") for name in ("stock", "ours"))
    # Ours are fused, as in the model.
    expected = given if layout == "stock" else ours.state_dict()
    assert "model.layers.0.block_sparse_moe.experts.4.w2.weight" in given
    assert written.keys() == expected.keys()
    assert all(torch.equal(expected[name], written[name]) for name in written)
    reader = MixtralForCausalLM if layout == "stock" else LlamoeMixtralForCausalLM
    again = load_whole(reader, tmp_path / "ours")
    assert torch.equal(again(ids()).logits, (stock if layout == "stock" else ours)(ids()).logits)
    # Stock's files are un-fused, whatever files the model came from.
    if layout == "llamoe":
        again.save_pretrained(tmp_path / "again", layout="stock")
        written = load_file(tmp_path / "again/model.safetensors")
        assert written.keys() == given.keys()
        assert all(torch.equal(given[name], written[name]) for name in given)


EXPERT = "model.layers.1.block_sparse_moe.experts"
BROKEN = {
    "an expert's matrix is missing": (f"{EXPERT}.3.w3.weight", None, r"experts\.3\.w3\.weight is missing"),
    "another shape": (
        f"{EXPERT}.2.w2.weight",
        (52, 72),
        r"experts\.down_proj: 2\.w2\.weight .*\[52, 72\].*\[72, 52\]",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_folders_say_what_is_wrong(fault, tmp_path):
    stock_model(MixtralForCausalLM, stock_mixtral_config()).save_pretrained(tmp_path)
    name, shape, message = BROKEN[fault]
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {name: torch.zeros(shape or 1)}
    if shape is None:
        del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(llamoe.CheckpointError, match=message):
        LlamoeMixtralForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
def test_a_layer_on_disk(tmp_path):
    """transformers stacks its experts there anew, hence the folder."""
    stock, _ = pair(tmp_path / "stock")
    places = {"": "cpu", "model.layers.1": "disk"}
    placed = LlamoeMixtralForCausalLM.from_pretrained(
        tmp_path / "stock", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert placed.model.layers[1].mlp.experts.down_proj.device.type == "meta"
    assert max_abs(placed(ids()).logits, stock(ids()).logits) <= 1e-4
