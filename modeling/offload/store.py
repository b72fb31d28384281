"""The store of a model's offloaded experts: slots for their matrices, and loading into these slots.

Experts on disk are read into slots in RAM. If the tokens are on an accelerator, a matrix is then copied there for one
product, or, if its rows are few, the CPU multiplies them. Experts in RAM are copied into slots on the accelerator, or
the CPU multiplies their rows.

Threads share a store. A thread waits for a slot only while it has pinned (keeps from eviction) no matrix of the same
stack, so that some thread can always continue. Loads that run at an interrupt complete, and the next forward pass uses
them. `with lock:` acquires a lock in C, so an interrupt cannot come between acquiring it and entering the block.
"""

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import torch

from ..formats import Parts
from ..moe import STACKS, Experts
from .budget import divide
from .copies import Copies
from .matrix_cache import Entry, Key, MatrixCache
from .memory import BLOCK, pinned, slots_of, unit_of
from .pieces import StoredLayer
from .reading import Reader, Reading, closed_error, requests

# Most matrices of a call that are kept from eviction at once: one in its product, and those that are loaded ahead.
_LOOK_AHEAD = 8
# Most rows of an expert that the CPU multiplies if tokens are on an accelerator: it reads a matrix in less time than
# copying the matrix there would take. Calculated, not measured.
_MAX_ROWS_IN_RAM = 4
_NO_COUNTS = {"hits": 0, "misses": 0, "bytes_read": 0}


class _Slots:
    """The slots of one stack's matrices, for all layers whose experts have the same sizes.

    Attributes:
        cache: which matrix is in which slot.
        shapes: for each part of a matrix (such as codes and scales), a meta tensor with its shape and dtype.
        memory: for each part, the memory of all slots, `[slots, bytes]`.
        copies: copies from RAM to an accelerator; None if matrices are read from disk.
    """

    def __init__(self, stack: str, experts: Experts, count: int, place: str, device: torch.device):
        self.stack, self.count, self.cache = stack, count, MatrixCache(count)
        self.shapes = [part[0] for part in experts.parts(stack)]
        where = device if place == "cpu" else torch.device("cpu")
        self.memory = [slots_of(count, part.nbytes, where, where.type != device.type) for part in self.shapes]
        self.copies = Copies(device, self.memory) if place == "cpu" else None

    def parts(self, slot: int, begins: Mapping[int, int]) -> list[torch.Tensor]:
        """Return the tensors of a slot's matrix, each at the same offset within an alignment unit as in its file.

        `begins` has, by the tensor's index, its first byte in the file; one that is missing begins at the slot's start.
        """
        parts = []
        for part, (memory, shape) in enumerate(zip(self.memory, self.shapes, strict=True)):
            first = begins.get(part, 0) % unit_of(shape.nbytes)
            parts.append(memory[slot, first : first + shape.nbytes].view(shape.dtype).view(shape.shape))
        return parts


class Store:
    """The offloaded experts of a model.

    Args:
        layers: by the name of a layer's experts in the model, experts on the meta device as they will be in memory.
        stored: by the same names, the location of the experts in the files.
        place: "disk" or "cpu" (RAM).
        device: device of the tokens.
        memory: bytes of all slots together.
    """

    def __init__(
        self,
        layers: Mapping[str, Experts],
        stored: Mapping[str, StoredLayer],
        place: str,
        device: torch.device,
        memory: int,
    ):
        self.place, self.device = place, device
        self.is_remote = device.type != "cpu"
        self.layers, self.stored = layers, stored
        self._counts = {layer: Counter(_NO_COUNTS) for layer in layers}
        self._counting, self._lock = threading.Lock(), threading.RLock()
        self.reader = Reader()
        # Close when the model is garbage-collected, so that no thread or open file outlives it.
        self._end = weakref.finalize(self, self.reader.close, is_waiting=False)
        self.slots: dict[tuple[str, str], _Slots] = {}
        self._in_ram: dict[tuple[str, str], list[torch.Tensor]] = {}
        try:
            self.reader.open(stored)
            for kind, count in divide(layers, memory):
                for stack in STACKS:
                    slots = _Slots(stack, layers[kind[0]], count, place, device)
                    self.slots |= {(layer, stack): slots for layer in kind}
            if place == "cpu":
                self._read_all()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the threads and close the files; nothing can be read any more."""
        if self._end.detach():
            self.reader.close()

    def statistics(self, reset: bool = False) -> dict[str, dict[str, int]]:
        """Return a copy of each layer's counts, and restart them from 0 if `reset`."""
        with self._counting:
            counts = {layer: dict(counts) for layer, counts in self._counts.items()}
            if reset:
                self._counts = {layer: Counter(_NO_COUNTS) for layer in self.layers}
        return counts

    def _count(self, layer: str, **more: int) -> None:
        with self._counting:
            self._counts[layer].update(more)

    def walk(
        self, layer: str, stack: str, hit: Mapping[int, int], transposed: bool = False
    ) -> Iterator[Parts]:
        """Yield the parts of the matrix of each expert in `hit`, in its order; valid until the next iteration.

        If the tokens are on an accelerator, matrices with few rows are yielded in RAM, where the CPU multiplies them.

        Args:
            layer: name of the layer's experts.
            stack: name of the stack.
            hit: number of rows of each expert that has rows.
            transposed: True in a backward pass.

        Raises:
            CheckpointError: a file has changed or cannot be read, or the model is closed.
        """
        try:
            if self._end.alive:
                yield from self._walk(layer, stack, hit, transposed)
                return
        except Exception:
            # If another thread has closed the model, raise that error instead.
            if self._end.alive:
                raise
        raise closed_error()

    def _walk(self, layer: str, stack: str, hit: Mapping[int, int], transposed: bool) -> Iterator[Parts]:
        slots, later = self.slots[layer, stack], STACKS[not transposed]
        if transposed:
            with self._lock:
                slots.cache.begin_backward()
        # Load ahead the same experts' matrices of the next stack, but at most as many as there are slots: more would
        # evict the first ones before they are used.
        ahead = list(hit)[: slots.count] if stack != later and self.place == "disk" else []
        self._prefetch(layer, later, ahead[:1])
        computed = self._computed_in_ram(layer, slots, hit) if self.place == "cpu" else {}
        keys = [(layer, expert) for expert in hit if expert not in computed]
        with closing(self._load(slots, keys)) as loaded:
            for expert, num_rows in hit.items():
                if expert not in computed:
                    parts = next(loaded)
                else:
                    parts = computed[expert]
                    if slots.cache.has_room:
                        # Copy the matrix to the accelerator while the CPU computes, for the next forward pass.
                        self._prefetch(layer, stack, [expert], is_counted=True)
                self._prefetch(layer, later, [expert] if expert in ahead[1:] else [])
                if self.is_remote and self.place == "disk" and num_rows > _MAX_ROWS_IN_RAM:
                    # Wait for the copy: the slot may get another matrix at the next iteration.
                    parts = [part.to(self.device) for part in parts]
                yield parts

    def _prefetch(self, layer: str, stack: str, experts: Sequence[int], is_counted: bool = False) -> None:
        """Begin to load matrices while slots are free; `is_counted`: statistics have counted them as misses."""
        for expert in experts:
            with self._lock:
                entry = self._request(self.slots[layer, stack], (layer, expert))
                if entry is None:
                    return
                entry.is_counted |= is_counted

    def _computed_in_ram(self, layer: str, slots: _Slots, hit: Mapping[int, int]) -> dict[int, Parts]:
        """Return the parts in RAM of matrices whose rows the CPU multiplies, as they are few, and not in a slot."""
        computed = {}
        for expert, num_rows in hit.items():
            if (layer, expert) not in slots.cache and num_rows <= _MAX_ROWS_IN_RAM:
                computed[expert] = [part[expert] for part in self._in_ram[layer, slots.stack]]
                if slots.stack == STACKS[0]:
                    self._count(layer, misses=1)
        return computed

    def _load(self, slots: _Slots, keys: Sequence[Key]) -> Iterator[Parts]:
        """Yield the parts of matrices, each kept from eviction until the next, while following ones are loaded."""
        waiting = deque(keys)
        with self._lock:
            pins = slots.cache.pins()
        try:
            while waiting or pins:
                while waiting and len(pins) < min(_LOOK_AHEAD, slots.count):
                    with self._lock:
                        if (entry := self._request(slots, waiting[0])) is not None:
                            pins.append(entry)
                            waiting.popleft()
                            if slots.stack == STACKS[0]:
                                # Count an expert once, with its first matrix.
                                is_hit = entry.is_counted
                                self._count(entry.key[0], hits=int(is_hit), misses=int(not is_hit))
                            entry.is_counted = True
                    if entry is None and pins:
                        # Use the pinned matrices first: that makes slots free.
                        break
                    if entry is None:
                        # Other threads have pinned all slots, or are filling them.
                        time.sleep(0.001)
                pins[0].arrival.result()
                yield pins[0].parts
                self._unpin(slots, pins)
        finally:
            while pins:
                self._unpin(slots, pins)

    def _unpin(self, slots: _Slots, pins: deque[Entry]) -> None:
        with self._lock:
            if slots.copies:
                slots.copies.record_use(pins[0].slot)
            pins.popleft()

    def _request(self, slots: _Slots, key: Key) -> Entry | None:
        """Return the entry of a matrix, and begin to load it if it is in no slot; None if no slot is free now."""
        entry = slots.cache.get(key)
        if entry is None and (entry := slots.cache.put(key)) is not None:
            try:
                self._start(slots, entry)
            except BaseException:
                slots.cache.drop(entry)
                raise
        return entry

    # Leave inference mode: the reading threads, outside of it, write to these tensors.
    @torch.inference_mode(False)
    def _start(self, slots: _Slots, entry: Entry) -> None:
        """Begin to load a matrix into its slot."""
        layer, expert = entry.key
        if slots.copies:
            # No offsets as in the file: those serve direct reads and equality with memory maps, both of the CPU.
            entry.parts = slots.parts(entry.slot, {})
            sources = [part[expert] for part in self._in_ram[layer, slots.stack]]
            self._count(layer, bytes_read=sum(source.nbytes for source in sources))
            entry.arrival = slots.copies.start(zip(entry.parts, sources, strict=True), entry.slot)
            return
        pieces = self.stored[layer].pieces[slots.stack][expert]
        begins = {piece.part: piece.begin for piece in pieces if piece.is_kept}
        entry.parts = slots.parts(entry.slot, begins)
        blocks = {
            part: slots.memory[part][entry.slot]
            for part in begins
            if unit_of(slots.shapes[part].nbytes) == BLOCK
        }
        entry.arrival = self._read(layer, slots.stack, expert, entry.parts, blocks)

    def _read_all(self) -> None:
        """Read all experts into RAM."""
        for layer, experts in self.layers.items():
            for stack in STACKS:
                whole = self._in_ram[layer, stack] = [
                    torch.empty(part.shape, dtype=part.dtype)
                    if self.device.type == "cpu"
                    else pinned(part.nbytes).view(part.dtype).view(part.shape)
                    for part in experts.parts(stack)
                ]
                matrices = list(zip(*whole, strict=True))
                for reading in [self._read(layer, stack, *matrix, {}) for matrix in enumerate(matrices)]:
                    reading.result()
        self.reader.end_threads()
        # Statistics do not count the bytes that loading reads.
        self.statistics(reset=True)

    def _read(
        self, layer: str, stack: str, expert: int, parts: Parts, blocks: Mapping[int, torch.Tensor]
    ) -> Reading:
        """Begin to read an expert's matrix into its parts.

        `blocks` has, by index of each part that is read directly, the memory of whole disk blocks that contains it.
        """
        reader, stored = self.reader, self.stored[layer]
        pieces = stored.pieces[stack][expert]
        what, count = f"expert {expert} of {layer}", lambda nbytes: self._count(layer, bytes_read=nbytes)
        if stored.unpack:
            convert = partial(stored.unpack[stack], expert)
            return reader.start([partial(reader.unpack, pieces, convert, parts, what, count)])
        tasks = []
        for piece in pieces:
            target = parts[piece.part]
            if piece.rows is not None:
                target = (target.T if self.layers[layer].is_transposed else target)[piece.rows]
            for request in requests(piece, target, blocks.get(piece.part)):
                tasks.append(partial(reader.read, piece.path, what, count, *request))
        return reader.start(tasks)
