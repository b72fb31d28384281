"""The store of all offloaded experts of a model: slots for matrices, and loading into them.

Experts on disk are read into slots in RAM. Experts in RAM are copied into slots on the accelerator, or their rows are
computed on the CPU. If rows are on an accelerator and experts on disk, the slots are in RAM, and a matrix is copied to
the accelerator for one product, or its rows are computed on the CPU.

Threads share a store. A thread waits for a slot only while it has no matrix of the same stack pinned, so that some
thread can always continue. Loads that an interrupt leaves behind still complete, and the next pass uses them. Locks are
acquired in C, so that an interrupt cannot come between acquiring one and entering its block.
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
from .reading import Reader, Reading, closed

# Number of matrices that are read ahead of their product.
_LOOK_AHEAD = 8
# Most rows of an expert that the CPU computes: reading its matrix in RAM takes less time than copying it to an
# accelerator. More rows would take longer on the CPU. Calculated, not measured.
_MAX_ROWS_IN_RAM = 4
_NO_COUNTS = {"hits": 0, "misses": 0, "bytes_read": 0}


class _Slots:
    """The slots of one stack's matrices, for all layers whose experts have the same sizes.

    Attributes:
        cache: which matrix is in which slot.
        shapes: a meta tensor for each part of a matrix.
        memory: memory for each part, `[slots, bytes]`.
        copies: copies from RAM; None if matrices come from disk.
    """

    def __init__(self, stack: str, experts: Experts, count: int, place: str, device: torch.device):
        self.stack, self.count, self.cache = stack, count, MatrixCache(count)
        self.shapes = [part[0] for part in experts.parts(stack)]
        where = device if place == "cpu" else torch.device("cpu")
        self.memory = [slots_of(count, part.nbytes, where, where.type != device.type) for part in self.shapes]
        self.copies = Copies(device, self.memory) if place == "cpu" else None

    def parts(self, slot: int, begins: Mapping[int, int]) -> list[torch.Tensor]:
        """Return the parts of a slot's matrix, each at the same offset within an alignment unit as in its file."""
        parts = []
        for part, (memory, shape) in enumerate(zip(self.memory, self.shapes, strict=True)):
            first = begins.get(part, 0) % unit_of(shape.nbytes)
            parts.append(memory[slot, first : first + shape.nbytes].view(shape.dtype).view(shape.shape))
        return parts


class Store:
    """The offloaded experts of a model.

    Args:
        layers: the experts of each layer by name, on the meta device, with their dtype in memory.
        stored: location in the files, by name.
        place: "disk" or "cpu".
        device: device of the rows.
        memory: bytes of the expert cache.
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
        """Return a copy of each layer's counts; `reset` restarts them from 0 without losing any."""
        with self._counting:
            counts = {layer: dict(counts) for layer, counts in self._counts.items()}
            if reset:
                self._counts = {layer: Counter(_NO_COUNTS) for layer in self.layers}
        return counts

    def _count(self, layer: str, **more: int) -> None:
        with self._counting:
            self._counts[layer].update(more)

    def walk(
        self,
        layer: str,
        stack: str,
        hit: Mapping[int, int],
        transposed: bool = False,
        may_compute: bool = True,
    ) -> Iterator[Parts]:
        """Yield the parts of each hit expert's matrix; they stay valid until the next iteration.

        Args:
            layer: name.
            stack: name.
            hit: experts in use, with their numbers of rows.
            transposed: True in a backward pass.
            may_compute: matrices may be yielded in RAM although the rows are on an accelerator.
        """
        if not self._end.alive:
            raise closed(f"expert {next(iter(hit), 0)} of {layer}")
        slots, later = self.slots[layer, stack], STACKS[not transposed]
        if transposed:
            with self._lock:
                slots.cache.go_back()
        # Then read the same experts of the layer's second stack ahead, but at most as many as there are slots: more
        # would evict the first ones before they are used.
        ahead = list(hit)[: slots.count] if stack != later and self.place == "disk" else []
        self.prefetch(layer, later, ahead[:1])
        computed = self._computed_in_ram(layer, slots, hit) if self.place == "cpu" and may_compute else {}
        with closing(
            self._bring(slots, [(layer, expert) for expert in hit if expert not in computed])
        ) as coming:
            for expert, num_rows in hit.items():
                if expert not in computed:
                    parts = next(coming)
                else:
                    parts = computed[expert]
                    if slots.cache.has_room:
                        # Copy the matrix to the accelerator while the CPU computes, for the next pass.
                        self.prefetch(layer, stack, [expert], is_counted=True)
                self.prefetch(layer, later, [expert] if expert in ahead[1:] else [])
                # Copy synchronously: the slot may get another matrix at the next iteration.
                stays = may_compute and num_rows <= _MAX_ROWS_IN_RAM
                if self.is_remote and self.place == "disk" and not stays:
                    parts = [part.to(self.device) for part in parts]
                yield parts

    def prefetch(self, layer: str, stack: str, experts: Sequence[int], is_counted: bool = False) -> None:
        """Begin to load matrices while slots are free; `is_counted`: they were counted as misses already."""
        for expert in experts:
            with self._lock:
                entry = self._ask(self.slots[layer, stack], (layer, expert))
                if entry is None:
                    return
                entry.is_counted |= is_counted

    def _computed_in_ram(self, layer: str, slots: _Slots, hit: Mapping[int, int]) -> dict[int, Parts]:
        """Return the parts, in RAM, of the matrices whose rows the CPU computes."""
        computed = {}
        for expert, num_rows in hit.items():
            if (layer, expert) not in slots.cache and num_rows <= _MAX_ROWS_IN_RAM:
                computed[expert] = [part[expert] for part in self._in_ram[layer, slots.stack]]
                if slots.stack == STACKS[0]:
                    self._count(layer, misses=1)
        return computed

    def _bring(self, slots: _Slots, keys: Sequence[Key]) -> Iterator[Parts]:
        """Yield the parts of matrices, each pinned until the next iteration; the following ones load meanwhile."""
        coming = deque(keys)
        with self._lock:
            pins = slots.cache.pins()
        try:
            while coming or pins:
                while coming and len(pins) < min(_LOOK_AHEAD, slots.count):
                    with self._lock:
                        if (entry := self._ask(slots, coming[0])) is not None:
                            pins.append(entry)
                            coming.popleft()
                            if slots.stack == STACKS[0]:
                                # Count an expert once, with its first matrix.
                                is_hit = entry.is_counted
                                self._count(entry.key[0], hits=int(is_hit), misses=int(not is_hit))
                            entry.is_counted = True
                    if entry is None and pins:
                        break
                    if entry is None:
                        # Other threads have pinned or are filling all slots.
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
                slots.copies.leave(pins[0].slot)
            pins.popleft()

    def _ask(self, slots: _Slots, key: Key) -> Entry | None:
        """Return the entry of a key, and start loading if it is missing; None if no slot is free now."""
        entry = slots.cache.get(key)
        if entry is None and (entry := slots.cache.put(key)) is not None:
            try:
                self._start(slots, entry)
            except BaseException:
                slots.cache.drop(entry)
                raise
        return entry

    # Leave inference mode: other threads, which are not in that mode, write to these tensors.
    @torch.inference_mode(False)
    def _start(self, slots: _Slots, entry: Entry) -> None:
        """Begin to load a matrix into its slot."""
        layer, expert = entry.key
        if slots.copies:
            if not self._end.alive:
                raise closed(f"expert {expert} of {layer}")
            # On an accelerator alignment need not be that of the file: a model in memory is not mapped there either.
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
        # Do not count this: it is part of loading.
        self.statistics(reset=True)

    def _read(
        self, layer: str, stack: str, expert: int, parts: Parts, blocks: Mapping[int, torch.Tensor]
    ) -> Reading:
        """Start reading a matrix from disk.

        Args:
            layer: name of the experts' module.
            stack: name of the stack.
            expert: index in the stack.
            parts: tensors to fill, such as codes and scales.
            blocks: memory for whole disk blocks that contains a part, by the part's index, if there is any.
        """
        pieces, stored = [], self.stored[layer]
        what = f"expert {expert} of {layer}"

        def count(nbytes: int) -> None:
            self._count(layer, bytes_read=nbytes)

        if stored.unpack:
            return self.reader.start_unpacking(
                stored.pieces[stack][expert], partial(stored.unpack[stack], expert), parts, what, count
            )
        for piece in stored.pieces[stack][expert]:
            target = parts[piece.part]
            if piece.rows is not None:
                target = (target.T if self.layers[layer].is_transposed else target)[piece.rows]
            pieces.append((piece, target, blocks.get(piece.part)))
        return self.reader.start(pieces, what, count)
