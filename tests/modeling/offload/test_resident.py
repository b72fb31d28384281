"""The weights beside offloaded experts have memory of their own, read as large as they are."""

import os
import sys
import threading

import pytest
import torch
from support.offload import load_both, text_model

import llamoe
from llamoe.modeling.checkpoints import MappedFiles

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="files are mapped and found again on Linux alone"),
    pytest.mark.slow,
]
# Of embedding and head, more than a block of direct reads, and no whole number of them.
SIZES = {"vocab_size": 9001, "hidden_size": 96, "intermediate_size": 48, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("large")
    text_model(**SIZES).save_pretrained(path)
    return path


def check_own(model, resident):
    found = dict(model.named_parameters())
    large = 0
    for name, expected in resident.named_parameters():
        if ".experts." in name:
            continue
        assert torch.equal(found[name], expected), name
        assert MappedFiles().file_of(found[name].data) is None, name
        # Products may differ in their last bits with another alignment.
        assert found[name].data_ptr() % 64 == expected.data_ptr() % 64, name
        large += expected.nbytes > 1 << 20
    pointers = {each.untyped_storage().data_ptr() for each in found.values() if not each.is_meta}
    assert large == 2 and len(pointers) == sum(not each.is_meta for each in found.values())


@pytest.mark.parametrize("direct", [None, True, False])
def test_large_weights_are_read_to_memory_of_their_own(direct, folder, ids):
    resident, _ = load_both(folder)
    memory = llamoe.ExpertsMemory("1MB", direct=direct)
    model = llamoe.LlamoeForCausalLM.from_pretrained(folder, dtype="auto", experts_memory=memory).eval()
    check_own(model, resident)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, resident(ids).logits)


def test_tied_weights_stay_tied(tmp_path, ids):
    text_model(**SIZES | {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    _, model = load_both(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert MappedFiles().file_of(model.lm_head.weight.data) is None


def test_a_file_that_another_one_has_replaced_is_copied_from_its_map(folder, tmp_path, monkeypatch):
    other = tmp_path / "other"
    for path in folder.iterdir():
        (other / path.name).parent.mkdir(exist_ok=True)
        (other / path.name).write_bytes(path.read_bytes())
    loading = llamoe.modeling.offload.loading
    own_other_weights = loading.own_other_weights

    def replace_first(model, *args):
        file = other / "model.safetensors"
        # The same bytes in another file: what is mapped is no longer at this path.
        (other / "new").write_bytes(file.read_bytes())
        os.replace(other / "new", file)
        own_other_weights(model, *args)

    monkeypatch.setattr(loading, "own_other_weights", replace_first)
    model = llamoe.LlamoeForCausalLM.from_pretrained(other, dtype="auto", experts_memory="1MB")
    check_own(model, load_both(folder)[0])


def test_a_file_that_cannot_be_read_ends_the_loading_and_leaves_no_thread(folder, monkeypatch):
    def fail(file, memory, begin, needed, what):
        raise llamoe.CheckpointError(f"{file.path}: {what} cannot be read")

    before = set(threading.enumerate())
    monkeypatch.setattr(llamoe.modeling.offload.reading._File, "fill", fail)
    with pytest.raises(llamoe.CheckpointError, match="a weight cannot be read"):
        llamoe.LlamoeForCausalLM.from_pretrained(folder, dtype="auto", experts_memory="1MB")
    assert not set(threading.enumerate()) - before
