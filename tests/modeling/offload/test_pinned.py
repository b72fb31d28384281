"""Memory and streams beside an accelerator, with stand-ins for CUDA's runtime and torch's streams that note calls."""

import logging

import pytest
import torch

from llamoe.modeling.offload import copies, memory


class Runtime:
    """Of CUDA's runtime what pins memory."""

    def __init__(self, error=0):
        self.error, self.pinned = error, {}

    def cudaHostRegister(self, address, size, flags):
        if not self.error:
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address):
        # Before the system has the pages again.
        assert any(f"{address:x}-" in line for line in open("/proc/self/maps"))
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return found


@pytest.mark.parametrize("size", [1, 33_000_001])
def test_no_more_is_pinned_than_was_asked(runtime, size):
    """Torch's own pinned memory would be 64 MiB where 33 MB are asked."""
    given = memory.pinned(size)
    assert given.shape == (size,) and given.dtype == torch.uint8 and given.data_ptr() % 4096 == 0
    assert runtime.pinned == {given.data_ptr(): size}
    given.fill_(7)
    part = given[size // 2 :].view(-1)
    del given
    assert runtime.pinned and int(part[-1]) == 7
    del part
    assert not runtime.pinned


def test_torchs_pinned_memory_is_taken_where_cuda_refuses(runtime, monkeypatch, caplog):
    runtime.error, asked, empty = 2, [], torch.empty
    monkeypatch.setattr(memory.torch, "empty", lambda *size, **more: asked.append(more) or empty(*size))
    monkeypatch.setattr(logging.getLogger("llamoe"), "propagate", True)
    with caplog.at_level(logging.WARNING, "llamoe"):
        assert len(memory.pinned(5_000)) == 5_000
    assert asked == [{"dtype": torch.uint8, "pin_memory": True}]
    assert "refuses to pin 5000 bytes (error 2)" in caplog.text


def test_a_copy_waits_for_what_made_the_slots_and_keeps_them(monkeypatch):
    """Else the first copy could be overwritten, and memory that is let go be given away while a copy writes to it."""
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
