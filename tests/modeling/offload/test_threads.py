"""Threads share a store without waiting for each other for ever; nothing of a store outlives its model."""

import errno
import gc
import os
import threading
import time

import pytest
import torch
from support.models import run
from support.offload import expert_bytes, freeze_experts, load_both, put_in_store, text_model, without_kernels

import llamoe
from llamoe.modeling.offload.memory import slots_of

pytestmark = pytest.mark.slow

# Seconds after which a test says that threads wait for each other.
LONG = 60


def prompts(number):
    return [
        torch.randint(3, 199, (1, 5 + each), generator=torch.Generator().manual_seed(each))
        for each in range(number)
    ]


def answer(model, prompt, tokens=3):
    return model.generate(
        prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )


def at_once(work, arguments):
    """Results or errors of calls that begin together; fails where one does not come back."""
    together = threading.Barrier(len(arguments))
    results = [None] * len(arguments)

    def run(index):
        together.wait(LONG)
        try:
            results[index] = work(arguments[index])
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(arguments))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LONG
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    return results


@pytest.fixture
def logits_and_model(text_folder):
    """Gives the prompts' answers of the resident model, and a model with few slots."""

    def make(slots, number=6):
        resident, model = load_both(text_folder, slots)
        asked = prompts(number)
        return asked, [answer(resident, prompt) for prompt in asked], model

    return make


@pytest.mark.parametrize(
    ("kind", "slots", "beside"),
    [("text", 1, None), ("mixtral", 2, None), ("text", 2, "disk"), ("text", 1, "cpu")],
)
def test_threads_answer_as_one(kind, slots, beside, folders, monkeypatch):
    """Also where experts are on disk or in RAM beside an accelerator."""
    if beside is not None:
        # The CPU stands in for one, which has none of the CPU's kernels.
        without_kernels(monkeypatch)
    resident, model = load_both(folders[kind], slots)
    if beside is not None:
        put_in_store(model, beside, slots * expert_bytes(resident), is_remote=True)
    asked = prompts(6)
    expected = [answer(resident, prompt) for prompt in asked]
    found = at_once(lambda prompt: answer(model, prompt), asked)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_threads_differentiate_at_once(text_folder, ids):
    resident, model = load_both(text_folder, 1)
    found = []
    for each in (resident, model):
        freeze_experts(each)
        names, parameters = zip(*[(n, p) for n, p in each.named_parameters() if p.requires_grad], strict=True)

        def gradients(prompt, each=each, parameters=parameters):
            loss = each(input_ids=prompt, labels=prompt).loss
            return torch.autograd.grad(loss, parameters, allow_unused=True)

        found.append(at_once(gradients, prompts(4)))
    for one, other in zip(*found, strict=True):
        for name, a, b in zip(names, one, other, strict=True):
            assert a is b is None or torch.equal(a, b), name


def test_errors_of_a_drive_do_not_stay_with_threads(logits_and_model, monkeypatch):
    slots = 2
    asked, expected, model = logits_and_model(slots)
    read, broken, seen = os.preadv, threading.Event(), []
    monkeypatch.setattr(os, "preadv", lambda *args: _io_error() if broken.is_set() else read(*args))

    def work(index):
        if index == 0:
            for _ in range(20):
                broken.set()
                time.sleep(0.002)
                broken.clear()
                time.sleep(0.01)
            return None
        while True:
            try:
                return answer(model, asked[index])
            except llamoe.CheckpointError as error:
                seen.append(str(error))

    found = at_once(work, range(6))
    assert seen
    assert all("Input/output error" in each for each in seen)
    assert all(torch.equal(*pair) for pair in zip(expected[1:], found[1:], strict=True))
    assert torch.equal(answer(model, asked[0]), expected[0])
    # All slots are there still.
    (store,) = model._stores()
    caches = [slots.cache for slots in store.slots.values()]
    assert not any(cache._pinned() for cache in caches)
    used = [[entry.slot for entry in cache._entries.values()] for cache in caches]
    assert all(len(set(numbers)) == len(numbers) <= slots for numbers in used)


def _io_error():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(("slots", "where"), [(1, "product"), (3, "reading"), (1, "reading")])
def test_an_interrupt_leaves_the_model_whole(where, slots, logits_and_model, ids, monkeypatch):
    from llamoe.modeling.formats import Plain
    from llamoe.modeling.offload import reading

    asked, expected, model = logits_and_model(slots, 3)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # Reads that are slow, so that they go on after the interrupt.
        read = os.preadv
        patch.setattr(os, "preadv", lambda *args: time.sleep(0.02) or read(*args))
        if where == "product":
            patch.setattr(Plain, "multiply", interrupt)
        else:
            patch.setattr(reading.Reading, "result", interrupt)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                answer(model, asked[0])
        patch.undo()
        patch.setattr(os, "preadv", lambda *args: time.sleep(0.002) or read(*args))
        found = at_once(lambda prompt: answer(model, prompt), asked)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system lacks")
@pytest.mark.parametrize("size", [100, 3 << 20])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_slots_of_its_own(size):
    """Else one would multiply by what the other has read over its matrix."""
    memory = slots_of(2, size, torch.device("cpu"), is_pinned=False).fill_(1)
    if (child := os.fork()) == 0:
        memory.fill_(2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((memory == 1).all())


@pytest.mark.parametrize("slots", [1, 3])
def test_closing_ends_other_threads_with_a_sentence(slots, logits_and_model):
    before = set(threading.enumerate())
    asked, expected, model = logits_and_model(slots)

    def work(index):
        if index == 0:
            time.sleep(0.05)
            model.close()
            return None
        for _ in range(1000):
            assert torch.equal(answer(model, asked[index]), expected[index])
        return None

    _, *found = at_once(work, range(6))
    for error in found:
        assert isinstance(error, llamoe.CheckpointError), error
        assert "closed by model.close()" in str(error)
    assert not [new for new in set(threading.enumerate()) - before if new.name.startswith("llamoe")]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc, which Linux has")
def test_nothing_outlives_a_model(nothing_left, text_folder, ids):
    before = nothing_left()
    # What is freed here is freed without Python's search for cycles.
    gc.disable()
    try:
        for _ in range(5):
            model = llamoe.LlamoeForCausalLM.from_pretrained(text_folder, experts_memory="80KB").eval()
            run(model, input_ids=ids[:1, :2])
            threads, files = nothing_left()
            assert threads > before[0] and len(files) > len(before[1])
            del model
            # They end without anybody who waits for them.
            end = time.monotonic() + 30
            while nothing_left() != before:
                assert time.monotonic() < end
                time.sleep(0.01)
    finally:
        gc.enable()


def test_what_the_collector_frees_waits_for_no_thread(tmp_path, ids, monkeypatch):
    """It runs in any thread, and in one that begins it would wait for locks which that thread holds."""
    text_model().save_pretrained(tmp_path)
    model = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path, experts_memory="80KB").eval()
    joined = []
    monkeypatch.setattr(threading.Thread, "join", lambda thread, *_: joined.append(thread))
    [store] = model._stores()
    end = store._end
    model.model = store = None
    gc.collect()
    assert not end.alive and not joined
