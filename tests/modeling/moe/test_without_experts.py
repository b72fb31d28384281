"""Llama 4 without experts, such as Llama Guard 4: all layers are dense; with chunks and without."""

import json

import pytest
import torch
from support.models import (
    LENGTH,
    load_whole,
    make_asymmetric,
    max_abs,
    multimodal_config,
    random_ids,
    run,
    stock_model,
    stock_text_config,
)
from transformers import Llama4ForCausalLM

import llamoe
from llamoe.conversion import convert, inspect

GUARD = dict(interleave_moe_layer_step=0, moe_layers=[], num_local_experts=0, num_experts_per_tok=0)
IDS = random_ids(2, LENGTH)


@pytest.mark.parametrize("chunk", [16, None])
@pytest.mark.parametrize("layout", ["llamoe", "stock"])
def test_logits_equal_transformers_also_after_saving(chunk, layout, tmp_path):
    """Folders of transformers may lack `moe_layers`; for transformers we write a chunk size, which it needs."""
    stock = stock_model(Llama4ForCausalLM, stock_text_config(**GUARD, attention_chunk_size=chunk or 999))
    with torch.no_grad():
        expected = stock(IDS).logits
    stock.save_pretrained(tmp_path / "stock")
    described = json.loads((tmp_path / "stock/config.json").read_text())
    for left_out in ((), ("moe_layers",)):
        content = {name: value for name, value in described.items() if name not in left_out}
        content |= {"attention_chunk_size": chunk}
        content |= {} if chunk else {"layer_types": None}
        (tmp_path / "stock/config.json").write_text(json.dumps(content))
        model = load_whole(llamoe.LlamoeForCausalLM, tmp_path / "stock")
        assert model.config.moe_layers == [] and model.config.attention_chunk_size == chunk
        assert max_abs(run(model, input_ids=IDS), expected) < 1e-5
    model.save_pretrained(tmp_path / layout, layout=layout)
    for model_class in (llamoe.LlamoeForCausalLM, Llama4ForCausalLM)[: 1 + (layout == "stock")]:
        assert max_abs(run(load_whole(model_class, tmp_path / layout), input_ids=IDS), expected) < 1e-5


@pytest.mark.parametrize("layout", ["stock", "llamoe"])
def test_commands_work_without_experts(layout, tmp_path):
    config = multimodal_config(**GUARD)
    model = make_asymmetric(llamoe.LlamoeForConditionalGeneration(config))
    expected = run(model, input_ids=IDS)
    size = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path / "model", layout=layout)
    counted = llamoe.count_parameters(config)
    assert counted.total == counted.active == size
    report = inspect(tmp_path / "model")
    assert report.stored == size
    assert report.parameters == {"total": size, "active": size}
    assert "num_local_experts" not in report.sizes
    convert(tmp_path / "model", tmp_path / "converted", layout=layout)
    converted = load_whole(llamoe.LlamoeForConditionalGeneration, tmp_path / "converted")
    assert max_abs(run(converted, input_ids=IDS), expected) == 0
    # The text model alone loads from the same folder.
    text = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path / "model")
    assert max_abs(run(text, input_ids=IDS), expected) < 1e-5


def test_options_of_routers_have_no_effect():
    """Without routers there are no router losses and no load."""
    config = llamoe.from_stock(stock_text_config(**GUARD))
    config.output_router_logits = config.output_expert_load = True
    config.router_z_loss_coef = 0.1
    model = llamoe.LlamoeForCausalLM(config)
    output = model(IDS, labels=IDS)
    output.loss.backward()
    assert output.aux_loss is None and output.expert_load is None
    assert all(parameter.grad is not None for parameter in model.parameters())
