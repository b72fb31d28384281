"""Threads share a store and never wait for each other for ever; no thread and no file of a store outlives its model."""

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

# Seconds after which a test fails, since threads wait for each other.
LONG = 60


def prompts(number):
    return [
        torch.randint(3, 199, (1, 5 + index), generator=torch.Generator().manual_seed(index))
        for index in range(number)
    ]


def answer(model, prompt, tokens=3):
    return model.generate(
        prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )


def at_once(work, arguments):
    """Call `work` with each argument in a thread, all at the same time, and return the results or errors."""
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
def answers_and_model(text_folder):
    """A function that returns prompts, the answers of the model in memory, and an offloaded model with few slots."""

    def make(slots, number=6):
        resident, model = load_both(text_folder, slots)
        questions = prompts(number)
        return questions, [answer(resident, prompt) for prompt in questions], model

    return make


@pytest.mark.parametrize(
    ("kind", "slots", "beside"),
    [("text", 1, None), ("mixtral", 2, None), ("text", 2, "disk"), ("text", 1, "cpu")],
)
def test_threads_get_the_answers_of_single_calls(kind, slots, beside, folders, monkeypatch):
    """Also if the tokens are on an accelerator, and experts on disk or in RAM (`beside`)."""
    if beside is not None:
        # The CPU stands in for an accelerator, which has none of the CPU's kernels.
        without_kernels(monkeypatch)
    resident, model = load_both(folders[kind], slots)
    if beside is not None:
        put_in_store(model, beside, slots * expert_bytes(resident), is_remote=True)
    questions = prompts(6)
    expected = [answer(resident, prompt) for prompt in questions]
    answers = at_once(lambda prompt: answer(model, prompt), questions)
    assert all(torch.equal(*pair) for pair in zip(expected, answers, strict=True))


def test_threads_differentiate_at_once(text_folder, ids):
    resident, model = load_both(text_folder, 1)
    results = []
    for trained in (resident, model):
        freeze_experts(trained)
        named = [(n, p) for n, p in trained.named_parameters() if p.requires_grad]
        names, parameters = zip(*named, strict=True)

        def gradients(prompt, trained=trained, parameters=parameters):
            loss = trained(input_ids=prompt, labels=prompt).loss
            return torch.autograd.grad(loss, parameters, allow_unused=True)

        results.append(at_once(gradients, prompts(4)))
    for one, other in zip(*results, strict=True):
        for name, a, b in zip(names, one, other, strict=True):
            assert a is b is None or torch.equal(a, b), name


def test_threads_work_after_errors_of_a_drive(answers_and_model, monkeypatch):
    slots = 2
    questions, expected, model = answers_and_model(slots)
    read, broken, messages = os.preadv, threading.Event(), []
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
                return answer(model, questions[index])
            except llamoe.CheckpointError as error:
                messages.append(str(error))

    answers = at_once(work, range(6))
    assert messages
    assert all("Input/output error" in message for message in messages)
    assert all(torch.equal(*pair) for pair in zip(expected[1:], answers[1:], strict=True))
    assert torch.equal(answer(model, questions[0]), expected[0])
    # No slot is lost.
    (store,) = model._stores()
    caches = [slots.cache for slots in store.slots.values()]
    assert not any(cache._pinned() for cache in caches)
    used = [[entry.slot for entry in cache._entries.values()] for cache in caches]
    assert all(len(set(numbers)) == len(numbers) <= slots for numbers in used)


def _io_error():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(("slots", "where"), [(1, "product"), (3, "reading"), (1, "reading")])
def test_a_model_works_after_an_interrupt(where, slots, answers_and_model, ids, monkeypatch):
    from llamoe.modeling.formats import Plain
    from llamoe.modeling.offload import reading

    questions, expected, model = answers_and_model(slots, 3)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # Slow reads, which continue after the interrupt.
        read = os.preadv
        patch.setattr(os, "preadv", lambda *args: time.sleep(0.02) or read(*args))
        if where == "product":
            patch.setattr(Plain, "multiply", interrupt)
        else:
            patch.setattr(reading.Reading, "result", interrupt)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                answer(model, questions[0])
        patch.undo()
        patch.setattr(os, "preadv", lambda *args: time.sleep(0.002) or read(*args))
        answers = at_once(lambda prompt: answer(model, prompt), questions)
    for one, other in zip(expected, answers, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system lacks")
@pytest.mark.parametrize("size", [100, 3 << 20])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_slots_of_its_own(size):
    """If processes shared slots, a product could use bytes that the other process has read over its matrix."""
    memory = slots_of(2, size, torch.device("cpu"), is_pinned=False).fill_(1)
    if (child := os.fork()) == 0:
        memory.fill_(2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((memory == 1).all())


@pytest.mark.parametrize("slots", [1, 3])
def test_closing_is_an_error_in_other_threads(slots, answers_and_model):
    before = set(threading.enumerate())
    questions, expected, model = answers_and_model(slots)

    def work(index):
        if index == 0:
            time.sleep(0.05)
            model.close()
            return None
        for _ in range(1000):
            assert torch.equal(answer(model, questions[index]), expected[index])
        return None

    _, *errors = at_once(work, range(6))
    for error in errors:
        assert isinstance(error, llamoe.CheckpointError), error
        assert "closed by model.close()" in str(error)
    assert not [new for new in set(threading.enumerate()) - before if new.name.startswith("llamoe")]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc, which Linux has")
def test_nothing_outlives_a_model(nothing_left, text_folder, ids):
    before = nothing_left()
    # Without the garbage collector: the model must not be part of a cycle of references.
    gc.disable()
    try:
        for _ in range(5):
            model = llamoe.LlamoeForCausalLM.from_pretrained(text_folder, experts_memory="80KB").eval()
            run(model, input_ids=ids[:1, :2])
            threads, files = nothing_left()
            assert threads > before[0] and len(files) > len(before[1])
            del model
            # No thread waits for those of the model, which end by themselves.
            end = time.monotonic() + 30
            while nothing_left() != before:
                assert time.monotonic() < end
                time.sleep(0.01)
    finally:
        gc.enable()


def test_the_garbage_collector_waits_for_no_thread(tmp_path, ids, monkeypatch):
    """The collector may run in a thread that is starting, which holds locks that `join` needs."""
    text_model().save_pretrained(tmp_path)
    model = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path, experts_memory="80KB").eval()
    joined = []
    monkeypatch.setattr(threading.Thread, "join", lambda thread, *_: joined.append(thread))
    [store] = model._stores()
    end = store._end
    model.model = store = None
    gc.collect()
    assert not end.alive and not joined
