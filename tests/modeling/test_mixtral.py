"""What only Mixtral has, compared with transformers' Mixtral: ties of the router, files of experts, positions.

Logits, losses and gradients are in `test_parity.py`, heads in `test_classification.py`.
"""

import pytest
import torch
from safetensors.torch import load_file
from support.models import assert_same_weights, load_whole, random_ids, stock_mixtral_config, stock_model
from torch.nn import functional as F
from transformers import MixtralForCausalLM
from transformers.core_model_loading import MergeModulelist

import llamoe
from llamoe import LlamoeMixtralForCausalLM
from llamoe.modeling.kernels import rows_of_torch

IDS = random_ids(2, 50)


def pair(folder, **overrides):
    stock = stock_model(MixtralForCausalLM, stock_mixtral_config(**overrides))
    stock.save_pretrained(folder)
    return stock, load_whole(LlamoeMixtralForCausalLM, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_and_near_ties_go_stocks_way(dtype, monkeypatch):
    """Experts with equal router weights tie exactly, and in 16 bits most others nearly tie: the choice is stock's."""
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
        # On a processor without instructions for the dtype our product is in float32, and so must stock's be.
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
    # Files in our layout have fused experts, as the model has.
    expected = given if layout == "stock" else ours.state_dict()
    assert "model.layers.0.block_sparse_moe.experts.4.w2.weight" in given
    assert written.keys() == expected.keys()
    assert all(torch.equal(expected[name], written[name]) for name in written)
    reader = MixtralForCausalLM if layout == "stock" else LlamoeMixtralForCausalLM
    again = load_whole(reader, tmp_path / "ours")
    assert torch.equal(again(IDS).logits, (stock if layout == "stock" else ours)(IDS).logits)
    # Files in stock's layout have experts one by one, whatever was loaded.
    if layout == "llamoe":
        again.save_pretrained(tmp_path / "again", layout="stock")
        written = load_file(tmp_path / "again/model.safetensors")
        assert written.keys() == given.keys()
        assert all(torch.equal(given[name], written[name]) for name in given)


def test_experts_are_fused_in_place(tmp_path, monkeypatch):
    """Experts are copied once while they are fused; transformers' operations would copy gate and up three times."""
    stock = stock_model(MixtralForCausalLM, stock_mixtral_config())
    stock.save_pretrained(tmp_path)
    monkeypatch.setattr(MergeModulelist, "convert", lambda *_, **__: pytest.fail("stacked by transformers"))
    assert_same_weights(load_whole(LlamoeMixtralForCausalLM, tmp_path).state_dict(), stock.state_dict())
