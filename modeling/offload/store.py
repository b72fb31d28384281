"""The matrices of experts that are offloaded, for all layers of a model: slots, and how a matrix comes to one.

Experts on disk are read into slots in RAM. Experts in RAM are copied into slots on the accelerator, or their rows are
computed on the CPU. Where rows are on an accelerator and experts on disk, the slots are in RAM, and a matrix is brought
from there for one product, or its rows are computed there.

Threads share a store. One waits for a slot only while it has no matrix of the same stack pinned, so that there is
always a thread that can go on. What an interrupt leaves on its way comes nevertheless, and is found by the next pass.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

import torch

from ..formats import Parts
from ..moe import STACKS, Experts
from .accelerator import Copies, Costs, measure
from .budget import ExpertsMemory, default_size, divide
from .matrix_cache import Entry, MatrixCache
from .memory import BLOCK, slots_of, unit_of
from .pieces import Piece, StoredLayer
from .reading import Reader, Reading, closed
from .statistics import Counter

# Matrices that are asked for before the product that needs them.
_LOOK_AHEAD = 8


class _Slots:
    """The slots of one stack's matrices, for all layers whose experts have the same sizes.

    Attributes:
        shapes: of each part a meta tensor of one matrix.
        memory: of each part `[slots, bytes]`.
        copies: how matrices come from RAM.
        cache: which matrix is in which slot.
        costs: of the ways to compute a matrix that is not on the accelerator.
    """

    cache: MatrixCache
    costs: Costs | None = None

    def __init__(self, stack: Parts, count: int, device: torch.device, is_pinned: bool):
        self.count = count
        self.shapes = [part[0] for part in stack]
        self.memory = [slots_of(count, part.shape, part.dtype, device, is_pinned) for part in self.shapes]
        self.copies = Copies(device)

    def parts(self, slot: int, begins: Sequence[int]) -> list[torch.Tensor]:
        """The parts of a slot's matrix, which begin at the same byte of a unit of memory as these bytes of files."""
        parts = []
        for memory, shape, begin in zip(self.memory, self.shapes, begins, strict=True):
            first = begin % unit_of(shape.nbytes)
            parts.append(memory[slot, first : first + shape.nbytes].view(shape.dtype).view(shape.shape))
        return parts


class Store:
    """Where the experts of a model are that are not on the device that computes.

    Args:
        layers: name to the experts of a layer, on the meta device, with their dtype in memory.
        stored: name to the places in the files.
        place: "disk" or "cpu".
        device: of the rows.
        memory: what the caller of `from_pretrained` chose.
        is_remote: whether the rows are computed on an accelerator; None: whether `device` is one.
    """

    def __init__(
        self,
        layers: Mapping[str, Experts],
        stored: Mapping[str, StoredLayer],
        place: str,
        device: torch.device,
        memory: ExpertsMemory,
        is_remote: bool | None = None,
    ):
        self.place, self.device, self.memory = place, device, memory
        self.is_remote = device.type != "cpu" if is_remote is None else is_remote
        self.layers, self.stored = layers, stored
        self.reader = Reader(memory.readers, memory.direct)
        # Called too when nothing refers to the model any more: no thread and no file outlives it.
        self.close = weakref.finalize(self, self.reader.close)
        self.slots: dict[tuple[str, str], _Slots] = {}
        self._in_ram: dict[tuple[str, str], list[torch.Tensor]] = {}
        try:
            for found in stored.values():
                pieces = [piece for stack in STACKS for each in found.pieces[stack] for piece in each]
                largest = max(piece.nbytes for piece in pieces)
                for path in {piece.path for piece in pieces}:
                    self.reader.open(path, largest, found.files[path])
            self._make_slots()
            if place == "cpu":
                self._read_all()
            self._begin()
        except BaseException:
            self.close()
            raise

    def _make_slots(self) -> None:
        where = self.device if self.place == "cpu" else torch.device("cpu")
        is_pinned = where.type == "cpu" and self.device.type != "cpu"
        budget = default_size(where) if self.memory.size is None else self.memory.size
        for layers, count in divide(self.layers, budget):
            for stack in STACKS:
                slots = _Slots(self.layers[layers[0]].parts(stack), count, where, is_pinned)
                self.slots |= {(layer, stack): slots for layer in layers}

    def _read_all(self) -> None:
        # Counted by nobody: this is loading.
        counter = Counter()
        for layer, experts in self.layers.items():
            for stack in STACKS:
                whole = self._in_ram[layer, stack] = [
                    torch.empty(part.shape, dtype=part.dtype, pin_memory=self.device.type != "cpu")
                    for part in experts.parts(stack)
                ]
                readings = [
                    self._read(layer, stack, expert, [part[expert] for part in whole], {}, counter)
                    for expert in range(experts.num_experts)
                ]
                for reading in readings:
                    reading.result()
        self.reader.end_threads()

    def _begin(self) -> None:
        """Begin with empty slots; they are memory of this process."""
        self._process = os.getpid()
        self._changed = threading.Condition()
        self.statistics = {layer: Counter() for layer in self.layers}
        for slots in set(self.slots.values()):
            slots.cache = MatrixCache(slots.count, self.memory.policy())

    def _check_open(self, what: str) -> None:
        if not self.close.alive:
            raise closed(what)
        if self._process != os.getpid():
            # A forked process has the files, but neither the threads nor what they were reading.
            self.reader.restart()
            self._begin()

    def check_files(self) -> None:
        """Raise a `CheckpointError` if a file is not what it was, or the model is closed."""
        self.reader.check()

    def probe(self, layer: str, stack: str) -> list[torch.Tensor]:
        """The parts of a matrix of a layer's sizes, dtypes and device, for questions about kernels."""
        slots = self.slots[layer, stack]
        return slots.parts(0, [0] * len(slots.memory))

    def prefetch(self, layer: str, stack: str, experts: Sequence[int], is_counted: bool = False) -> None:
        """Begin to bring matrices of which there is room now, without waiting for them.

        Args:
            layer: name.
            stack: name.
            experts: whose matrices.
            is_counted: whether they were counted as missing; else the first walk that asks for them does that.
        """
        slots = self.slots[layer, stack]
        for expert in experts:
            entry = self._pin(slots, (layer, expert), stack)
            if entry is None:
                return
            entry.is_counted |= is_counted
            self._unpin(slots, entry)

    def walk(
        self,
        layer: str,
        stack: str,
        rows: Sequence[tuple[int, int]],
        later: str | None = None,
        may_compute: bool = True,
    ) -> Iterator[Parts]:
        """For each expert with its number of rows the parts of its matrix, which stay until the next is asked for.

        Args:
            layer: name.
            stack: name.
            rows: experts, and how many rows each has.
            later: the stack of which these experts' matrices are needed next: they come behind the ones of this stack.
            may_compute: whether the matrix may be in RAM where the rows are on an accelerator.

        Raises:
            CheckpointError: a file has changed or cannot be read, or the model is closed.
        """
        self._check_open(f"expert {rows[0][0] if rows else 0} of {layer}")
        slots, counter = self.slots[layer, stack], self.statistics[layer]
        # At most as many as there are slots: more would evict the first ones before they are used.
        ahead = [expert for expert, _ in rows[: slots.count]] if later and self.place == "disk" else []
        if ahead:
            self.prefetch(layer, later, ahead[:1])
        lying = set()
        if self.place == "cpu" and may_compute:
            lying = {
                expert
                for expert, num_rows in rows
                if (layer, expert) not in slots.cache
                and self._way(layer, stack, self._lying(layer, stack, expert), num_rows) == "compute"
            }
        keys = [(layer, expert) for expert, _ in rows if expert not in lying]
        with closing(self._bring(slots, keys, stack)) as brought:
            for expert, num_rows in rows:
                if expert in lying:
                    if stack == STACKS[0]:
                        counter.add(misses=1, computed=1)
                    if slots.cache.has_free_slots and self.memory.misses == "auto":
                        # The accelerator copies it while the CPU computes, and the next pass finds it.
                        self.prefetch(layer, stack, [expert], is_counted=True)
                    yield self._lying(layer, stack, expert)
                    continue
                parts = next(brought)
                if expert in ahead[1:]:
                    self.prefetch(layer, later, [expert])
                if self.is_remote and self.place == "disk":
                    if not may_compute or self._way(layer, stack, parts, num_rows) == "bring":
                        # Not beside the host: the slot is free for another matrix when the walk goes on.
                        parts = [part.to(self.device) for part in parts]
                    elif stack == STACKS[0]:
                        counter.add(computed=1)
                yield parts

    def _bring(self, slots: _Slots, keys: Sequence[tuple[str, int]], stack: str) -> Iterator[Parts]:
        """Matrices, each pinned until the next is asked for; the next ones come meanwhile."""
        pinned: deque[Entry] = deque()
        coming = deque(keys)
        try:
            while coming or pinned:
                while coming and len(pinned) < min(_LOOK_AHEAD, slots.count):
                    entry = self._pin(slots, coming[0], stack, is_asked=True, may_wait=not pinned)
                    if entry is None:
                        break
                    pinned.append(entry)
                    coming.popleft()
                self._wait(slots, pinned[0])
                yield pinned[0].parts
                self._unpin(slots, pinned.popleft())
        finally:
            for entry in pinned:
                self._unpin(slots, entry)

    def _pin(
        self,
        slots: _Slots,
        key: tuple[str, int],
        stack: str,
        is_asked: bool = False,
        may_wait: bool = False,
    ) -> Entry | None:
        with self._changed:
            while (entry := slots.cache.pin(key)) is None:
                if (entry := slots.cache.put(key)) is not None:
                    try:
                        self._start(slots, entry, stack)
                    except BaseException:
                        slots.cache.drop(entry)
                        slots.cache.unpin(entry)
                        raise
                    break
                if not may_wait:
                    return None
                # A matrix that was fetched ahead tells nobody that it has come.
                self._changed.wait(timeout=0.01)
            # An expert is asked for by its first matrix.
            if is_asked and stack == STACKS[0]:
                self.statistics[key[0]].add(hits=int(entry.is_counted), misses=int(not entry.is_counted))
            entry.is_counted |= is_asked
            return entry

    def _wait(self, slots: _Slots, entry: Entry) -> None:
        begin, is_there = time.perf_counter(), entry.arrival.done()
        try:
            entry.arrival.result()
        except Exception:
            with self._changed:
                slots.cache.drop(entry)
            raise
        if not is_there:
            self.statistics[entry.key[0]].add(seconds=time.perf_counter() - begin)

    def _unpin(self, slots: _Slots, entry: Entry) -> None:
        with self._changed:
            slots.copies.leave(entry.slot)
            slots.cache.unpin(entry)
            self._changed.notify_all()

    # Threads write to what is made here, outside of a mode that the caller may be in.
    @torch.inference_mode(False)
    def _start(self, slots: _Slots, entry: Entry, stack: str) -> None:
        """Begin to bring a matrix to its slot."""
        layer, expert = entry.key
        counter = self.statistics[layer]
        if self.place == "cpu":
            if not self.close.alive:
                raise closed(f"expert {expert} of {layer}")
            # On an accelerator a resident model has memory of its own, at any address.
            entry.parts = slots.parts(entry.slot, [0] * len(slots.memory))
            pairs = list(zip(entry.parts, self._lying(layer, stack, expert), strict=True))
            counter.add(bytes_read=sum(source.nbytes for _, source in pairs))
            entry.arrival = slots.copies.start(pairs, entry.slot)
            return
        pieces = self.stored[layer].pieces[stack][expert]
        begins = {each.part: each.begin for each in pieces if self._is_as_stored(layer, each, slots)}
        entry.parts = slots.parts(entry.slot, [begins.get(part, 0) for part in range(len(slots.memory))])
        blocks = {
            part: slots.memory[part][entry.slot]
            for part in begins
            if unit_of(entry.parts[part].nbytes) == BLOCK
        }
        entry.arrival = self._read(layer, stack, expert, entry.parts, blocks, counter)

    def _read(
        self,
        layer: str,
        stack: str,
        expert: int,
        parts: Parts,
        blocks: Mapping[int, torch.Tensor],
        counter: Counter,
    ) -> Reading:
        is_transposed = self.layers[layer].is_transposed
        pieces = [
            (piece, piece.place(parts, is_transposed), blocks.get(piece.part))
            for piece in self.stored[layer].pieces[stack][expert]
        ]
        return self.reader.start(pieces, f"expert {expert} of {layer}", counter)

    def _is_as_stored(self, layer: str, piece: Piece, slots: _Slots) -> bool:
        """Whether a part of a matrix lies in memory as in its file, where its kernel can read it."""
        dtype = slots.shapes[piece.part].dtype
        alignment = max(self.layers[layer].format.alignment, dtype.itemsize)
        return piece.rows is None and piece.dtype == dtype and piece.begin % alignment == 0

    def _lying(self, layer: str, stack: str, expert: int) -> list[torch.Tensor]:
        """The parts of a matrix in RAM."""
        return [part[expert] for part in self._in_ram[layer, stack]]

    def _way(self, layer: str, stack: str, parts: Parts, num_rows: int) -> str:
        """Whether to "compute" rows where a matrix lies, or to "bring" it."""
        if self.memory.misses != "auto":
            return self.memory.misses
        slots, experts = self.slots[layer, stack], self.layers[layer]
        if slots.costs is None:
            form, sizes = experts.formats[stack], experts.sizes_of(stack)
            x = torch.zeros(64, sizes[1]).to(form.compute_dtype)
            slots.costs = measure(
                lambda: [part.to(self.device, copy=True) for part in parts],
                lambda rows: form.multiply(x[:rows], parts, sizes),
            )
        return slots.costs.cheaper(num_rows)
