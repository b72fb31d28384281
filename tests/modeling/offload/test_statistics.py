"""Statistics count each expert once for each pass that needs it; slots of experts of several sizes share the budget."""

import math

import pytest
import torch
from support.offload import (
    asked_in,
    check_equal,
    counts,
    expert_bytes,
    load_both,
    put_in_store,
    text_model,
    without_kernels,
)

import llamoe
from llamoe.modeling.offload import store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_gradients")]


@pytest.mark.parametrize("experts", [2, 99])
@pytest.mark.parametrize("max_rows", [math.inf, 0], ids=["multiplied in RAM", "copied"])
def test_a_prompt_counts_each_expert_once(max_rows, experts, text_folder, ids, monkeypatch):
    """With experts in RAM beside a stand-in for an accelerator; up to `max_rows` rows are multiplied in RAM."""
    without_kernels(monkeypatch)
    monkeypatch.setattr(store, "_MAX_ROWS_IN_RAM", max_rows)
    resident, model = load_both(text_folder)
    put_in_store(model, "cpu", experts * expert_bytes(resident), is_remote=True)
    with llamoe.trace_experts(model) as trace:
        model(ids)
        model(ids)
    statistics = counts(model)
    assert statistics.hits + statistics.misses == sum(map(len, asked_in(trace)))
    if experts == 99:
        assert statistics.misses == statistics.hits


def test_statistics_are_plain_data(text_folder, ids):
    _, model = load_both(text_folder)
    model(ids)
    statistics = model.experts_statistics(reset=True)
    assert list(statistics) == ["model.layers.1.feed_forward.experts", "model.layers.2.feed_forward.experts"]
    assert all(layer["misses"] > 0 for layer in statistics.values())
    nothing = {"hits": 0, "misses": 0, "bytes_read": 0}
    assert model.experts_statistics() == dict.fromkeys(statistics, nothing)
    # The caller's dictionary is a copy.
    model.experts_statistics()["model.layers.1.feed_forward.experts"]["hits"] = 5
    assert model.experts_statistics() == dict.fromkeys(statistics, nothing)


def test_two_kinds_of_experts_share_the_budget(tmp_path):
    """A layer in 16 bits and a layer in 4 bits: each has a slot, and all slots together do not exceed the budget."""
    plain, folder = tmp_path / "plain", tmp_path / "int4"
    text_model(hidden_size=128, intermediate_size=96).to(torch.bfloat16).save_pretrained(plain)
    form = llamoe.QuantizationConfig("int4", modules_to_not_convert=["model.layers.2.feed_forward.experts"])
    llamoe.LlamoeForCausalLM.from_pretrained(plain, quantization_config=form).save_pretrained(folder)
    resident = llamoe.LlamoeForCausalLM.from_pretrained(folder).eval()
    sizes = {
        name: sum(tensor[0].nbytes for tensor in [*module.parameters(), *module.buffers()])
        for name, module in resident.named_modules()
        if name.endswith(".experts")
    }
    small, large = min(sizes.values()), max(sizes.values())
    assert small < large / 2
    for spare in (0, large, 5 * large - 1):
        model = llamoe.LlamoeForCausalLM.from_pretrained(folder, experts_memory=small + large + spare).eval()
        (ours,) = model._stores()
        kinds = {ours.slots[name, "down_proj"].count * size for name, size in sizes.items()}
        assert len(kinds) == 2 and min(kinds) >= small
        assert sum(kinds) <= small + large + spare
        check_equal(resident, model, torch.arange(3, 40)[None])
    with pytest.raises(ValueError, match=f"Give at least {small + large:,}"):
        llamoe.LlamoeForCausalLM.from_pretrained(folder, experts_memory=small + large - 1)
