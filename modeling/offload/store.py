"""The matrices of experts that are offloaded, for all layers of a model: slots, and how a matrix comes to one.

Experts on disk are read into slots in RAM. Experts in RAM are copied into slots on the accelerator, or their rows are
computed on the CPU. Where rows are on an accelerator and experts on disk, the slots are in RAM, and a matrix is brought
from there for one product, or its rows are computed there.

Shapes: S slots, E experts.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import nn

from ..formats import Parts
from ..moe import STACKS, Experts
from .budget import ExpertsMemory, default_size
from .copies import Copied, Copies
from .costs import Costs, measure
from .matrix_cache import Job, MatrixCache
from .memory import BLOCK, slots_of, unit_of
from .pieces import Piece, StoredLayer, part_names
from .reading import Readers, Reading, closed
from .statistics import Counter

Key = tuple[str, int]
"""A layer's name and an expert."""


def with_stacks(
    experts: Experts, num_experts: int, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
) -> Experts:
    """Experts of the same kind and sizes with stacks of their own.

    Args:
        experts: on any device, or none.
        num_experts: their number.
        make: a tensor of a shape and dtype.
    """
    new: Any = object.__new__(type(experts))
    new.take_after(experts)
    new.num_experts = num_experts
    for name, tensor in [*experts._parameters.items(), *experts._buffers.items()]:
        made = make((num_experts, *tensor.shape[1:]), tensor.dtype)
        if name in experts._parameters:
            new.register_parameter(name, nn.Parameter(made, requires_grad=False))
        else:
            new.register_buffer(name, made)
    return new


def bytes_of_expert(experts: Experts) -> int:
    """Bytes of one expert's matrices in memory."""
    return sum(
        math.prod(tensor.shape[1:]) * tensor.itemsize
        for tensor in [*experts._parameters.values(), *experts._buffers.values()]
    )


def _alike(layers: Mapping[str, Experts]) -> list[list[str]]:
    """The layers whose experts have the same sizes, and may use the same slots."""
    found: dict[tuple, list[str]] = {}
    for layer, experts in layers.items():
        tensors = [*experts._parameters.items(), *experts._buffers.items()]
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
        found.setdefault(key, []).append(layer)
    return list(found.values())


def check_budget(layers: Mapping[str, Experts], budget: int) -> None:
    """Check that there is room for one expert of each kind.

    Raises:
        ValueError: there is not.
    """
    firsts = {kind[0]: bytes_of_expert(layers[kind[0]]) for kind in _alike(layers)}
    if budget < sum(firsts.values()):
        layer = max(firsts, key=lambda name: firsts[name])
        raise ValueError(
            f"experts_memory={budget:,} bytes: one expert of {layer} takes {firsts[layer]:,} bytes"
            f"{f', and there are {len(firsts)} kinds of experts' if len(firsts) > 1 else ''}. Give at least "
            f"{sum(firsts.values()):,}."
        )


def _parts(experts: Experts, stack: str, expert: int) -> Parts:
    return [getattr(experts, name).data[expert] for name in part_names(experts, stack)]


class _Slots:
    """The slots of all layers whose experts have the same sizes."""

    def __init__(self, store: Any, experts: Experts, count: int, device: torch.device):
        is_pinned = device.type == "cpu" and store.device.type != "cpu"
        self.costs: Costs | None = None
        self.caches = {}
        # What holds a matrix, by stack and slot.
        self.held: dict[str, dict[int, Parts]] = {stack: {} for stack in STACKS}
        # One expert, for questions about sizes and dtypes.
        self.probe = with_stacks(
            experts, 1, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)
        )
        # A store that refers to itself would outlive its model, with threads and files, until Python looks for cycles.
        store = weakref.proxy(store)
        for stack in STACKS:
            shapes = [getattr(experts, name) for name in part_names(experts, stack)]
            memory = [slots_of(count, part.shape[1:], part.dtype, device, is_pinned) for part in shapes]
            copies = None if device.type == "cpu" else Copies(device)
            self.caches[stack] = MatrixCache(
                count,
                store.memory.policy(),
                partial(_fetch, store, stack, memory, shapes, self.held[stack], copies),
                # An expert is asked for by its first matrix.
                lambda key, is_there, stack=stack: store.count(key, is_there, stack),
                lambda key, seconds: store.waited(key, seconds),
                (lambda slot: None) if copies is None else copies.leave,
            )


# Threads write to what is made here, outside of a mode that the caller may be in.
@torch.inference_mode(False)
def _fetch(
    store: Any,
    stack: str,
    memory: list[torch.Tensor],
    shapes: list[torch.Tensor],
    held: dict[int, Parts],
    copies: Copies | None,
    key: Key,
    slot: int,
) -> Job:
    parts: list[torch.Tensor] = []
    held[slot] = parts
    for index, (bytes_, shape) in enumerate(zip(memory, shapes, strict=True)):
        size = math.prod(shape.shape[1:]) * shape.itemsize
        first = store.first_byte(key, stack, index, unit_of(size))
        part = bytes_[slot, first : first + size].view(shape.dtype)
        parts.append(part.view(shape.shape[1:]))
    return store.fetch(key, stack, parts, [bytes_[slot] for bytes_ in memory], slot, copies)


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
        self.statistics = {layer: Counter() for layer in layers}
        self._stored, self._layers = stored, layers
        self._readers = Readers(memory.readers, memory.direct)
        # Called too when nothing refers to the model any more: no thread and no file outlives it.
        self.close = weakref.finalize(self, self._readers.close)
        self._in_ram: dict[str, Experts] = {}
        # One at a time: more would need as much of the accelerator's memory.
        self._groups: dict[str, _Slots] = {}
        try:
            for layer in layers:
                pieces = [piece for stack in STACKS for each in stored[layer].pieces[stack] for piece in each]
                largest = max(piece.nbytes for piece in pieces)
                for path in {piece.path for piece in pieces}:
                    self._readers.open(path, largest, stored[layer].files[path])
            self._make_slots()
            if place == "cpu":
                for layer in layers:
                    self._in_ram[layer] = self._read_whole(layer)
                self._readers.end_threads()
        except BaseException:
            self.close()
            raise

    def probe(self, layer: str) -> Experts:
        """One expert of a layer's sizes and dtypes, without its weights, for questions about kernels."""
        return self._groups[layer].probe

    def num_slots(self, layer: str) -> int:
        """Number of experts for which a layer and others like it have room."""
        return self._groups[layer].caches[STACKS[0]].slots

    @property
    def reads_directly(self) -> bool:
        """Whether files are read past the system's page cache."""
        return self._readers.reads_directly

    def _make_slots(self) -> None:
        # Each memory has room for one expert at least, and shares what is left with the others by their sizes.
        kinds = _alike(self._layers)
        needed = [sum(self._layers[layer].num_experts for layer in layers) for layers in kinds]
        sizes = [bytes_of_expert(self._layers[layers[0]]) for layers in kinds]
        total = sum(count * size for count, size in zip(needed, sizes, strict=True))
        where = self.device if self.place == "cpu" else torch.device("cpu")
        budget = default_size(where) if self.memory.size is None else self.memory.size
        check_budget(self._layers, budget)
        spare, rest = budget - sum(sizes), total - sum(sizes)
        for layers, most in zip(kinds, needed, strict=True):
            count = min(most, 1 + (spare * (most - 1) // rest if rest else 0))
            group = _Slots(self, self._layers[layers[0]], count, where)
            self._groups |= dict.fromkeys(layers, group)

    def _read_whole(self, layer: str) -> Experts:
        experts = self._layers[layer]
        is_pinned = self.device.type != "cpu"
        whole = with_stacks(
            experts,
            experts.num_experts,
            lambda shape, dtype: torch.empty(shape, dtype=dtype, pin_memory=is_pinned),
        )
        for stack in STACKS:
            for expert in range(experts.num_experts):
                # Counted by nobody: this is loading.
                parts = _parts(whole, stack, expert)
                self._start_reading((layer, expert), stack, parts, lambda _: None).finish()
        return whole

    def _start_reading(
        self,
        key: Key,
        stack: str,
        parts: Parts,
        count: Callable[[int], None],
        blocks: list[torch.Tensor] | None = None,
    ) -> Reading:
        layer, expert = key
        experts = self._layers[layer]
        pieces = []
        for piece in self._stored[layer].pieces[stack][expert]:
            place = piece.place(parts, experts.is_transposed)
            is_in_blocks = (
                blocks is not None
                and unit_of(parts[piece.part].nbytes) == BLOCK
                and self._is_as_stored(piece, stack, experts)
            )
            pieces.append((piece, place, blocks[piece.part] if blocks and is_in_blocks else None))
        return self._readers.start(pieces, f"expert {expert} of {layer}", count)

    def _is_as_stored(self, piece: Piece, stack: str, experts: Experts) -> bool:
        """Whether a part of a matrix lies in memory as in its file, where its kernel can read it."""
        dtype = getattr(experts, part_names(experts, stack)[piece.part]).dtype
        alignment = max(experts.format.alignment, dtype.itemsize)
        return piece.rows is None and piece.dtype == dtype and piece.begin % alignment == 0

    def first_byte(self, key: Key, stack: str, part: int, unit: int) -> int:
        """Bytes between a slot's begin and a part of a matrix: as in the file, modulo `unit` (`memory.unit_of`)."""
        layer, expert = key
        piece = next(each for each in self._stored[layer].pieces[stack][expert] if each.part == part)
        # On an accelerator a resident model has memory of its own.
        is_kept = self.place == "disk" and self._is_as_stored(piece, stack, self._layers[layer])
        return piece.begin % unit if is_kept else 0

    def fetch(
        self,
        key: Key,
        stack: str,
        parts: Parts,
        blocks: list[torch.Tensor],
        slot: int,
        copies: Copies | None,
    ) -> Job:
        """Begin to bring a matrix to its slot, of which the parts are views."""
        layer, expert = key
        statistics = self.statistics[layer]
        if self.place == "disk":
            return self._start_reading(
                key, stack, parts, lambda size: statistics.add(bytes_read=size), blocks
            )
        if not self.close.alive:
            raise closed(f"expert {expert} of {layer}")
        pairs = list(zip(parts, _parts(self._in_ram[layer], stack, expert), strict=True))
        statistics.add(bytes_read=sum(source.nbytes for _, source in pairs))
        return Copied(pairs) if copies is None else copies.start(pairs, slot)

    def check_files(self) -> None:
        """Raise a `CheckpointError` if a file is not what it was, or the model is closed."""
        self._readers.check()

    def count(self, key: Key, is_there: bool, stack: str) -> None:
        """Note that a matrix was asked for."""
        if stack == STACKS[0]:
            self.statistics[key[0]].add(hits=int(is_there), misses=int(not is_there))

    def waited(self, key: Key, seconds: float) -> None:
        """Note that a product waited."""
        self.statistics[key[0]].add(seconds=seconds)

    def prefetch(self, layer: str, stack: str | None, experts: Sequence[int]) -> None:
        """Begin to bring matrices that will be needed soon, as far as there is room."""
        if self.place == "disk" and experts and self.close.alive:
            self._groups[layer].caches[stack].prefetch([(layer, expert) for expert in experts])

    def walk(
        self, layer: str, stack: str, rows: Sequence[tuple[int, int]], may_compute: bool = True
    ) -> Iterator[Parts]:
        """For each expert with its number of rows the parts of its matrix, which stay until the next is asked for.

        Args:
            layer: name.
            stack: name.
            rows: experts, and how many rows each has.
            may_compute: whether the matrix may be in RAM where the rows are on an accelerator.
        """
        if not self.close.alive:
            raise closed(f"expert {rows[0][0] if rows else 0} of {layer}")
        cache, held = self._groups[layer].caches[stack], self._groups[layer].held[stack]
        if self.place == "cpu":
            yield from self._walk_ram(layer, stack, rows, may_compute)
            return
        with closing(cache.walk([(layer, expert) for expert, _ in rows])) as found:
            for (_, num_rows), slot in zip(rows, found, strict=True):
                parts = held[slot]
                if self.is_remote:
                    if not may_compute or self._way(layer, stack, parts, num_rows) == "bring":
                        # Not beside the host: the slot is free for another matrix when the walk goes on.
                        parts = [part.to(self.device) for part in parts]
                    elif stack == STACKS[0]:
                        self.statistics[layer].add(computed=1)
                yield parts

    def _walk_ram(
        self, layer: str, stack: str, rows: Sequence[tuple[int, int]], may_compute: bool
    ) -> Iterator[Parts]:
        whole = self._in_ram[layer]
        cache, held = self._groups[layer].caches[stack], self._groups[layer].held[stack]
        is_brought = [
            not may_compute
            or (layer, expert) in cache
            or self._way(layer, stack, _parts(whole, stack, expert), num_rows) == "bring"
            for expert, num_rows in rows
        ]
        keys = [(layer, expert) for (expert, _), brought in zip(rows, is_brought, strict=True) if brought]
        with closing(cache.walk(keys)) as found:
            for (expert, _), brought in zip(rows, is_brought, strict=True):
                if brought:
                    yield held[next(found)]
                    continue
                if stack == STACKS[0]:
                    self.statistics[layer].add(misses=1, computed=1)
                if cache.has_free_slots and self.memory.misses == "auto":
                    # The accelerator copies it while the CPU computes, and the next pass finds it.
                    cache.prefetch([(layer, expert)], is_counted=True)
                yield _parts(whole, stack, expert)

    def _way(self, layer: str, stack: str, parts: Parts, num_rows: int) -> str:
        if self.memory.misses != "auto":
            return self.memory.misses
        group, experts = self._groups[layer], self._layers[layer]
        if group.costs is None:
            form, sizes = experts.formats[stack], experts.sizes_of(stack)
            x = torch.zeros(64, sizes[1]).to(form.compute_dtype)
            group.costs = measure(
                lambda: [part.to(self.device, copy=True) for part in parts],
                lambda rows: form.multiply(x[:rows], parts, sizes),
            )
        return group.costs.cheaper(num_rows)
