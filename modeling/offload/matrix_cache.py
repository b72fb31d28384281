"""The cache of experts: which matrix is in which slot of memory, and which is evicted; for one thread at a time.

A matrix is *pinned* while a product uses it. Matrices that are pinned or being loaded are not evicted.
"""

import math
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

Key = tuple[Any, int]
"""The name of a layer's experts, and an expert's number."""


@dataclass(eq=False)
class Entry:
    """A matrix in a slot, or being loaded into it.

    Attributes:
        key: key of the matrix.
        slot: number of the slot.
        parts: the tensors in the slot, such as codes and scales, that hold the matrix.
        arrival: the load (`reading.Reading` or a copy). `done()`: no thread writes to the slot any more; `failed()`:
            done, but with an error; `result()` waits until the matrix is loaded, or raises the error.
        is_counted: True once statistics have counted the load as a miss; later uses are hits.
    """

    key: Key
    slot: int
    parts: list = field(default_factory=list)
    arrival: Any = None
    is_counted: bool = False


class Pins(deque):
    """The pinned entries of one call; the deletion of this object unpins them, even after an interrupt."""

    __hash__ = object.__hash__


@dataclass
class _Use:
    """The uses of a matrix. A visit is a series of requests by one layer, and counts at most as one use of a matrix.

    Attributes:
        count: number of uses until `time`, with exponential decay.
        time: time of the last use, where each use of any matrix advances time by one.
        visit: number of the visit in which the last use was.
    """

    count: float = 0.0
    time: int = 0
    visit: int = 0


class MatrixCache:
    """The table of slots for matrices of one size; the matrix that is used least often is evicted.

    Uses are counted with decay: with n matrices ever requested, a count is halved every 4n uses of any matrix. Counts
    of evicted matrices are kept. Routers prefer some experts in all texts and some within a text, and often choose the
    same ones for the next token. So two kinds of matrices are kept even if their counts are the lowest:

    * those of the previous forward pass, if they need at most half of the slots;
    * those that the current layer has requested.

    If no others can be evicted, the least recently used one is; in training always, since backward passes request
    matrices in reverse order, and so need that one last.
    """

    def __init__(self, slots: int):
        self._slots = slots
        # In order of use, the most recent one last.
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._pins: weakref.WeakSet[Pins] = weakref.WeakSet()
        self._uses: dict[Key, _Use] = {}
        self._time = self._visit = 0
        self._first_layer: Any = None
        self._layer: Any = None
        # Number of uses in the previous forward pass, and the time at which this one began.
        self._pass_uses, self._pass_begin = 0, 0
        self._trains = self._has_backward = False

    def __contains__(self, key: Key) -> bool:
        """Return whether a matrix is in a slot, or being loaded."""
        return key in self._entries

    @property
    def has_room(self) -> bool:
        """True if a slot is empty."""
        return len(self._entries) < self._slots

    def begin_backward(self) -> None:
        """Record that a layer's backward pass begins."""
        self._trains = self._has_backward = True

    def pins(self) -> Pins:
        """Return an empty list, in which one call pins its entries."""
        pins = Pins()
        self._pins.add(pins)
        return pins

    def get(self, key: Key) -> Entry | None:
        """Return the entry of a matrix; None if it is neither loaded nor being loaded."""
        entry = self._entries.get(key)
        if entry is not None and (entry.arrival is None or entry.arrival.failed()):
            # Drop a failed load, so that it is tried again: no thread writes to its slot any more.
            self.drop(entry)
            return None
        if entry is not None:
            self._count(key)
        return entry

    def put(self, key: Key) -> Entry | None:
        """Assign a slot to a matrix; return None if all slots are pinned or being loaded."""
        if not self.has_room:
            if (victim := self._victim()) is None:
                return None
            self.drop(victim)
        used = {entry.slot for entry in self._entries.values()}
        slot = next(slot for slot in range(self._slots) if slot not in used)
        entry = self._entries[key] = Entry(key, slot)
        self._count(key)
        return entry

    def drop(self, entry: Entry) -> None:
        """Remove a matrix and free its slot."""
        del self._entries[entry.key]

    def _count(self, key: Key) -> None:
        """Count a use, and detect if it begins a visit (`_Use`) or a forward pass."""
        self._entries.move_to_end(key)
        if (layer := key[0]) != self._layer:
            self._visit += 1
            if self._first_layer in (None, layer):
                self._first_layer = layer
                self._pass_uses, self._pass_begin = self._time - self._pass_begin, self._time
                self._trains, self._has_backward = self._has_backward, False
            self._layer = layer
        use = self._uses.setdefault(key, _Use())
        # Loading a matrix ahead and then requesting it count as one use.
        if use.visit != self._visit:
            self._time += 1
            use.count = use.count * 2 ** ((use.time - self._time) / self._half_life) + 1
            use.time, use.visit = self._time, self._visit

    @property
    def _half_life(self) -> int:
        return 4 * len(self._uses)

    def _pinned(self) -> list[Entry]:
        return [entry for pins in self._pins for entry in pins]

    def _victim(self) -> Entry | None:
        """Choose the matrix to evict; None if all are pinned or being loaded."""
        pinned = self._pinned()
        # Keep the matrices of so many recent uses: as many as the previous forward pass had, since the current one may
        # be a long prompt.
        kept = self._pass_uses if 2 * self._pass_uses <= len(self._entries) else 0

        def can_go(entry: Entry) -> bool:
            return entry not in pinned and (entry.arrival is None or entry.arrival.done())

        def rank(entry: Entry) -> float:
            # The logarithm of the decayed count, up to a term that is the same for all matrices.
            use = self._uses[entry.key]
            return math.log2(use.count) + use.time / self._half_life

        def stays(entry: Entry) -> bool:
            use = self._uses[entry.key]
            return self._trains or use.visit == self._visit or self._time - use.time < kept

        rare = sorted((entry for entry in self._entries.values() if not stays(entry)), key=rank)
        return next(filter(can_go, [*rare, *self._entries.values()]), None)
