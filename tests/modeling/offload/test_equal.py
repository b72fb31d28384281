"""Offloaded experts give the same bits as experts in memory: in every store, kind of model, and use."""

import pytest
import torch
from support.offload import (
    KINDS,
    asked_in,
    check_equal,
    counts,
    expert_bytes,
    freeze_experts,
    load_both,
    put_in_store,
    simulate,
    without_kernels,
)

import llamoe
from llamoe.modeling.offload import store as stores

# The experts' place, whether the CPU stands in for an accelerator, and up to how many rows of an expert are multiplied
# in RAM.
STORES = (
    ("disk", False, 4),
    ("disk", True, 9999),
    ("disk", True, 0),
    ("cpu", True, 9999),
    ("cpu", True, 0),
    ("cpu", True, 4),
)


@pytest.mark.parametrize(
    ("kind", "experts"), [(kind, (1, 3, 99)[number % 3]) for number, kind in enumerate(KINDS)]
)
def test_logits_are_bit_equal(kind, experts, folders, ids):
    check_equal(*load_both(folders[kind], experts), ids)


# Each store with two kinds of models; the experts of one of them are quantized or stored one by one.
@pytest.mark.parametrize(
    ("place", "is_remote", "max_rows", "kind"),
    [
        (*store, kind)
        for number, store in enumerate(STORES)
        for kind in (KINDS[number % 3], KINDS[3 + (number + number // 5) % 5])
    ],
)
def test_every_store_is_bit_equal(kind, place, is_remote, max_rows, folders, ids, monkeypatch):
    if is_remote:
        # An accelerator has none of the CPU's kernels.
        without_kernels(monkeypatch)
    monkeypatch.setattr(stores, "_MAX_ROWS_IN_RAM", max_rows)
    resident, offloaded = load_both(folders[kind])
    put_in_store(offloaded, place, 2 * expert_bytes(resident), is_remote)
    check_equal(resident, offloaded, ids)
    statistics = counts(offloaded)
    if (place, max_rows) == ("cpu", 9999):
        # Matrices are copied only while slots are free.
        assert statistics.bytes_read <= 2 * expert_bytes(resident)
    if max_rows == 0:
        assert statistics.bytes_read == statistics.misses * expert_bytes(resident)


def test_eager_and_autocast_are_equal(folders, ids):
    resident, offloaded = load_both(folders["text"], 2, experts_implementation="eager")
    check_equal(resident, offloaded, ids)
    for model in (resident, offloaded):
        model.set_experts_implementation("llamoe")
    with torch.autocast("cpu", torch.bfloat16):
        check_equal(resident, offloaded, ids)


def test_implementations_that_need_stacks_are_refused(folders, ids):
    _, offloaded = load_both(folders["text"], 2, experts_implementation="batched_mm")
    with pytest.raises(ValueError, match="batched_mm.*on 'disk'"):
        offloaded(ids)


@pytest.mark.parametrize("device_map", [
    {"": "cpu", "model.layers.2.feed_forward.experts": "disk"},
    {"": "cpu", "experts": "disk", "model.layers.1.feed_forward.experts": "cpu"},
    {"experts": "disk"},
])  # fmt: skip
def test_maps_name_some_layers(device_map, folders, ids):
    resident, _ = load_both(folders["text"])
    model = llamoe.LlamoeForCausalLM.from_pretrained(folders["text"], device_map=device_map).eval()
    check_equal(resident, model, ids)
    names = (f"model.layers.{layer}.feed_forward.experts" for layer in (1, 2))
    rest = device_map.get("experts", "cpu")
    assert set(model.experts_statistics()) == {name for name in names if device_map.get(name, rest) == "disk"}


@pytest.mark.parametrize("slots", [2, 5, 9])
def test_hits_are_those_of_a_simulated_cache(slots, folders, ids):
    resident, offloaded = load_both(folders["text"], slots)
    with llamoe.trace_experts(offloaded) as trace:
        offloaded.generate(ids[:1], max_new_tokens=25, do_sample=False, eos_token_id=-1)
    hits, misses = map(sum, zip(*simulate(asked_in(trace), slots), strict=True))
    statistics = counts(offloaded)
    assert (statistics.hits, statistics.misses) == (hits, misses)
    assert statistics.bytes_read == misses * expert_bytes(resident)


@pytest.mark.parametrize(
    ("kind", "training"), [("text", False), ("text of 16 bits", True), ("mixtral", False), ("mixtral", True)]
)
def test_gradients_through_frozen_experts_are_equal(kind, training, folders, ids):
    gradients = []
    for model in load_both(folders[kind], 2):
        freeze_experts(model)
        model.train(training)(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() != set()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_trained_experts_are_refused_by_name(folders, ids):
    """In training mode by the forward pass, else by the backward pass: without it nobody needs gradients."""
    _, offloaded = load_both(folders["text"], 2)
    with pytest.raises(ValueError, match="model.layers.1.feed_forward.experts.gate_up_proj shall be trained"):
        offloaded.train()(ids)
    loss = offloaded.eval()(ids).logits.mean()
    with pytest.raises(ValueError, match="layers.2.feed_forward.experts.gate_up_proj"):
        loss.backward()
