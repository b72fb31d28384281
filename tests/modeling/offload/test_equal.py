"""Offloaded experts give the bits of experts in memory: in every store, kind of model, and way to use it."""

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
from llamoe.modeling.offload import ExpertsMemory
from llamoe.modeling.offload.store import Store

# A place, whether rows are on a device that stands in for an accelerator, and what becomes of a miss.
STORES = (
    ("disk", False, "auto"),
    ("disk", True, "compute"),
    ("disk", True, "bring"),
    ("cpu", True, "compute"),
    ("cpu", True, "bring"),
    ("cpu", True, "auto"),
)


@pytest.mark.parametrize(
    ("kind", "experts"), [(kind, (1, 3, 99)[number % 3]) for number, kind in enumerate(KINDS)]
)
def test_logits_are_bit_equal(kind, experts, folders, ids):
    check_equal(*load_both(folders[kind], experts), ids)


# Each store with two kinds, one of them quantized or stored one by one.
@pytest.mark.parametrize(
    ("place", "is_remote", "misses", "kind"),
    [
        (*store, kind)
        for number, store in enumerate(STORES)
        for kind in (KINDS[number % 3], KINDS[3 + (number + number // 5) % 5])
    ],
)
def test_every_store_is_bit_equal(kind, place, is_remote, misses, folders, ids, monkeypatch):
    if is_remote:
        # An accelerator has none of the CPU's kernels.
        without_kernels(monkeypatch)
    answers, is_computed = [], Store._is_computed
    monkeypatch.setattr(
        Store, "_is_computed", lambda *args: answers.append(is_computed(*args)) or answers[-1]
    )
    resident, offloaded = load_both(folders[kind])
    memory = ExpertsMemory(2 * expert_bytes(resident), misses=misses)
    put_in_store(offloaded, place, memory, is_remote)
    check_equal(resident, offloaded, ids)
    found = counts(offloaded)
    if misses == "compute":
        assert all(answers) and answers
    if (place, misses) == ("cpu", "compute"):
        # Nothing was copied.
        assert found.bytes_read == 0
    if misses == "bring":
        assert not any(answers) and answers
        assert found.bytes_read == found.misses * expert_bytes(resident)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("text", {"num_beams": 3}),
        ("mixtral", {"num_beams": 3}),
        ("int8", {"do_sample": True, "top_k": 20}),
        ("text", {"prompt_lookup_num_tokens": 3}),
        ("mixtral", {"use_cache": False}),
    ],
)
def test_generation_is_equal(kind, how, folders, ids):
    resident, offloaded = load_both(folders[kind], 2)
    ids = ids[:1] if "prompt_lookup_num_tokens" in how else ids
    answers = []
    for model in (resident, offloaded):
        torch.manual_seed(7)
        answers.append(model.generate(ids, max_new_tokens=6, pad_token_id=0, **how))
    assert torch.equal(*answers)


def test_assisted_generation_is_equal(folders, ids):
    resident, offloaded = load_both(folders["text"], 2)
    _, helper = load_both(folders["text of 16 bits"], 2)
    # Learning a threshold takes scikit-learn, which takes seconds to import.
    helper.generation_config.assistant_confidence_threshold = 0.0
    plain = resident.generate(ids[:1], max_new_tokens=9, do_sample=False)
    assert torch.equal(
        plain, offloaded.generate(ids[:1], max_new_tokens=9, do_sample=False, assistant_model=helper)
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_equal(side, folders, ids):
    resident, offloaded = load_both(folders["text"], 2)
    mask = torch.ones_like(ids)
    mask[0, slice(5) if side == "left" else slice(-5, None)] = 0
    with torch.no_grad():
        assert torch.equal(
            resident(ids, attention_mask=mask).logits, offloaded(ids, attention_mask=mask).logits
        )


def test_the_definition_is_equal(folders, ids):
    check_equal(*load_both(folders["text"], 2, experts_implementation="eager"), ids)


def test_implementations_that_want_stacks_are_refused(folders, ids):
    _, offloaded = load_both(folders["text"], 2, experts_implementation="batched_mm")
    with pytest.raises(ValueError, match="batched_mm.*on 'disk'"):
        offloaded(ids)


def test_autocast_is_equal(folders, ids):
    resident, offloaded = load_both(folders["text"], 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(resident(ids).logits, offloaded(ids).logits)


def test_a_cast_while_reading_is_equal(folders, ids):
    check_equal(*load_both(folders["text of 16 bits"], 2, dtype=torch.float32), ids)


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
    found = counts(offloaded)
    assert (found.hits, found.misses) == (hits, misses)
    assert found.bytes_read == misses * expert_bytes(resident)


@pytest.mark.parametrize(
    ("kind", "training"), [("text", False), ("text of 16 bits", True), ("mixtral", False), ("mixtral", True)]
)
def test_gradients_through_frozen_experts_are_equal(kind, training, folders, ids):
    found = []
    for model in load_both(folders[kind], 2):
        freeze_experts(model)
        model.train(training)(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() != set()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_trained_experts_are_refused_by_name(folders, ids):
    _, offloaded = load_both(folders["text"], 2)
    with pytest.raises(ValueError, match="model.layers.1.feed_forward.experts.gate_up_proj shall be trained"):
        offloaded.train()(ids)
