"""Pinned memory and streams, with stand-ins for CUDA's runtime and torch's streams that record calls."""

import logging

import pytest
import torch

from llamoe.modeling.offload import copies, memory


class Runtime:
    """A stand-in for the functions of CUDA's runtime that pin memory."""

    def __init__(self, error=0):
        self.error, self.pinned = error, {}

    def cudaHostRegister(self, address, size, flags):
        if not self.error:
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address):
        # The pages must still be mapped.
        assert any(f"{address:x}-" in line for line in open("/proc/self/maps"))
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return runtime


@pytest.mark.parametrize("size", [1, 33_000_001])
def test_only_the_requested_bytes_are_pinned(runtime, size):
    """For 33 MB torch would pin 64 MiB."""
    pinned = memory.pinned(size)
    assert pinned.shape == (size,) and pinned.dtype == torch.uint8 and pinned.data_ptr() % 4096 == 0
    assert runtime.pinned == {pinned.data_ptr(): size}
    pinned.fill_(7)
    part = pinned[size // 2 :].view(-1)
    del pinned
    assert runtime.pinned and int(part[-1]) == 7
    del part
    assert not runtime.pinned


def test_torchs_pinned_memory_is_used_if_cuda_refuses(runtime, monkeypatch, caplog):
    runtime.error, options, empty = 2, [], torch.empty
    monkeypatch.setattr(memory.torch, "empty", lambda *size, **more: options.append(more) or empty(*size))
    monkeypatch.setattr(logging.getLogger("llamoe"), "propagate", True)
    with caplog.at_level(logging.WARNING, "llamoe"):
        assert len(memory.pinned(5_000)) == 5_000
    assert options == [{"dtype": torch.uint8, "pin_memory": True}]
    assert "refuses to pin 5000 bytes (error 2)" in caplog.text


def test_a_copy_waits_for_the_slots_and_keeps_their_memory(monkeypatch):
    """Otherwise initialization could overwrite the first copy, and freed memory could be reused during a copy."""
    notes = []

    class Stream:
        def __init__(self, device=None):
            self.stream_id = len(notes)

        def wait_stream(self, other):
            notes.append(("waits for", other))

        def record_event(self):
            return "event"

        def wait_event(self, event):
            notes.append(("waits for", event))

        def __enter__(self):
            notes.append("copies")

        def __exit__(self, *_):
            pass

    class Slots(torch.Tensor):
        def record_stream(self, stream):
            notes.append(("is kept for", stream))

    monkeypatch.setattr(copies.torch, "Stream", Stream)
    current = Stream()
    monkeypatch.setattr(copies.torch.accelerator, "current_stream", lambda device: current)
    slots = torch.zeros(2, 7).as_subclass(Slots)
    ours = copies.Copies(torch.device("cuda", 0), [slots])
    source = torch.arange(7.0)
    ours.start([(torch.Tensor(slots)[0], source)], 0)
    assert notes == [("waits for", current), ("is kept for", ours._stream), "copies"]
    ours.record_use(0)
    ours.start([(torch.Tensor(slots)[0], source)], 0)
    assert notes[3:] == [("waits for", "event"), "copies"]
