"""A file says how often experts were used. Those used most are in memory when a model is loaded with it."""

import json

import pytest
import torch
from support.offload import counts, expert_bytes, load_both, mixtral, text_model

import llamoe
from llamoe.modeling.offload import ExpertsMemory, LeastOftenUsed, LeastRecentlyUsed

pytestmark = pytest.mark.slow


def load(folder, room: int, **memory):
    """A model of a folder with room for so many experts on disk."""
    resident, _ = load_both(folder)
    memory = ExpertsMemory(room * expert_bytes(resident), **memory)
    return type(resident).from_pretrained(folder, dtype="auto", experts_memory=memory).eval()


@pytest.fixture
def usage(text_folder, ids, tmp_path):
    """What a model has written that answered a prompt and some tokens of it."""
    model = load(text_folder, 3)
    with torch.no_grad(), llamoe.trace_experts(model) as trace:
        model(ids)
        for token in ids[0, :5]:
            model(token[None, None])
    model.save_experts_usage(tmp_path / "usage.json")
    found = json.loads((tmp_path / "usage.json").read_text())["experts_usage"]
    expected = {
        f"layers.{layer}.feed_forward.experts": [
            sum(expert in recorded[number][1].unique() for recorded in trace._complete())
            for expert in range(7)
        ]
        for number, layer in enumerate((1, 2))
    }
    assert found == expected and sum(map(sum, found.values())) > 12
    return tmp_path / "usage.json"


def hot(usage, room: int) -> set[tuple[str, int]]:
    layers = json.loads(usage.read_text())["experts_usage"]
    counts = {(layer, expert): count for layer in layers for expert, count in enumerate(layers[layer])}
    return {key for key in counts if sum(other >= counts[key] for other in counts.values()) <= room}


@pytest.mark.parametrize("policy", [LeastOftenUsed, LeastRecentlyUsed])
@pytest.mark.parametrize("room", [1, 5, 14])
def test_the_experts_used_most_are_there_at_once(room, policy, text_folder, usage, ids):
    model = load(text_folder, room, usage=usage, policy=policy)
    (store,) = model._stores()
    for slots in set(store.slots.values()):
        there = {(layer[layer.find("layers.") :], expert) for layer, expert in slots.cache._entries}
        assert hot(usage, room) <= there and len(there) <= room
    assert counts(model) == llamoe.ExpertsStatistics()
    with torch.no_grad():
        assert torch.equal(load_both(text_folder)[0](ids).logits, model(ids).logits)


def test_what_is_there_is_not_read_again(text_folder, usage, ids):
    model = load(text_folder, 14, usage=usage)
    with torch.no_grad():
        model(ids)
    assert (counts(model).misses, counts(model).bytes_read) == (0, 0) and counts(model).hits > 0


def test_earlier_uses_count_half(text_folder, usage, ids, tmp_path):
    model = load(text_folder, 3, usage=usage)
    model.save_experts_usage(tmp_path / "again.json")
    before, after = (
        json.loads(path.read_text())["experts_usage"] for path in (usage, tmp_path / "again.json")
    )
    assert after == {layer: [count // 2 for count in before[layer]] for layer in before}


def test_passes_back_are_not_counted(text_folder, ids, tmp_path):
    model = load(text_folder, 3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    model.train()(ids, labels=ids).loss.backward()
    (store,) = model._stores()
    assert {count for layer in store.uses.values() for count in layer} <= {0, 1}


def test_a_file_that_does_not_fit_is_refused_before_weights_are_read(
    text_folder, usage, tmp_path, monkeypatch
):
    content = json.loads(usage.read_text())["experts_usage"]
    layer = "layers.1.feed_forward.experts"
    bad = {
        "No such file": None,
        "is not a valid JSON file": "no json",
        "is not a valid JSON file .*": "[" * 99_999 + "]" * 99_999,
        "does not count the experts of model.layers.1": {"experts_usage": {layer: content[layer]}},
        "6 experts of .*, which has 7": {"experts_usage": {**content, layer: content[layer][1:]}},
        "-1 uses of": {"experts_usage": {**content, layer: [-1, *content[layer][1:]]}},
        "'2' uses of": {"experts_usage": {**content, layer: ["2", *content[layer][1:]]}},
        "should hold a JSON object, not list": [content],
    }
    monkeypatch.setattr(llamoe.modeling.offload.store.Reader, "open", None)
    for number, (message, given) in enumerate(bad.items()):
        path = tmp_path / f"{number}.json"
        if given is not None:
            path.write_text(given if isinstance(given, str) else json.dumps(given))
        with pytest.raises(
            ValueError, match=rf"ExpertsMemory\(usage=.*{message}.*Give what model.save_exp"
        ) as error:
            load_refused(text_folder, path)
        assert "\n" not in str(error.value)


def load_refused(folder, path):
    return llamoe.LlamoeForCausalLM.from_pretrained(folder, experts_memory=ExpertsMemory("1MB", usage=path))


def test_a_model_in_memory_has_no_uses_to_save(tmp_path):
    with pytest.raises(ValueError, match='no experts of this model are on disk.*"disk"'):
        text_model().save_experts_usage(tmp_path / "usage.json")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_leaves_nothing(text_folder, tmp_path):
    with pytest.raises(OSError, match="none"):
        load(text_folder, 3).save_experts_usage(tmp_path / "none" / "usage.json")
    assert not list(tmp_path.iterdir())


def test_mixtral_and_the_multimodal_classes_take_the_same_file(mixtral_folder, tmp_path):
    model = load(mixtral_folder, 4)
    with torch.no_grad():
        model(torch.arange(1, 9)[None])
    model.save_experts_usage(tmp_path / "usage.json")
    warm = load(mixtral_folder, 4, usage=str(tmp_path / "usage.json"))
    assert isinstance(warm, type(mixtral()))
    assert all(sum(slots.cache.free == [] for slots in set(store.slots.values())) for store in warm._stores())
