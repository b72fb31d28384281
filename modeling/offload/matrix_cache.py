"""The expert cache's table of matrices and slots, with its eviction policy; for one thread at a time.

A matrix is not evicted while it is *pinned*, that is, in use by a product, nor while it is being loaded.
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
        parts: parts of the matrix in its format.
        arrival: the load. `done()`: no thread writes to the slot any more; `failed()`: done, but with an error;
            `result()` waits for the matrix, or raises the error.
        is_counted: this matrix has been counted as a miss already.
    """

    key: Key
    slot: int
    parts: list = field(default_factory=list)
    arrival: Any = None
    is_counted: bool = False


class Pins(deque):
    """The pins of one user; they end with this object, so that an interrupt cannot leave pins behind."""

    __hash__ = object.__hash__


@dataclass
class _Use:
    """The number of uses of a matrix, and the time of the last one.

    Attributes:
        count: number of visits that used it until `time`, with exponential decay.
        time: time of the last such visit; each use of any matrix advances time by one.
        visit: the number of that visit to its layer.
    """

    count: float = 0.0
    time: int = 0
    visit: int = 0


class MatrixCache:
    """A number of slots for matrices of one size; the matrix that is used least often is evicted.

    Counts decay: their half-life is four uses of each matrix ever requested; counts of evicted matrices are kept.
    Routers prefer some experts in general and some within a text, and often choose the same ones for the next token. So
    two kinds of matrices are protected in spite of their counts:

    * those of the previous forward pass, if they need at most half of the slots;
    * those that the current layer has requested, as long as there are others; if not, the least recently used one is
      evicted.

    In training, backward passes request matrices in reverse order, so the least recently used matrix is needed last,
    and is evicted.
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
        self._trains = self._went_back = False

    def __contains__(self, key: Key) -> bool:
        """Return whether a matrix is in a slot, or being loaded."""
        return key in self._entries

    @property
    def has_room(self) -> bool:
        """True if a slot is empty."""
        return len(self._entries) < self._slots

    def go_back(self) -> None:
        """Record that a layer's backward pass begins."""
        self._trains = self._went_back = True

    def pins(self) -> Pins:
        """Return an empty list of pins for one user."""
        pins = Pins()
        self._pins.add(pins)
        return pins

    def get(self, key: Key) -> Entry | None:
        """Return the entry of a key; None if the matrix is neither loaded nor being loaded."""
        entry = self._entries.get(key)
        if entry is not None and (entry.arrival is None or entry.arrival.failed()):
            # Drop a failed load: no thread writes to its slot any more, and waiting threads get its error.
            self.drop(entry)
            return None
        if entry is not None:
            self._count(key)
        return entry

    def put(self, key: Key) -> Entry | None:
        """Assign a slot to a matrix; return None if all are in use."""
        if self.has_room:
            used = {entry.slot for entry in self._entries.values()}
            slot = next(slot for slot in range(self._slots) if slot not in used)
        elif (victim := self._victim()) is not None:
            self.drop(victim)
            slot = victim.slot
        else:
            return None
        entry = self._entries[key] = Entry(key, slot)
        self._count(key)
        return entry

    def drop(self, entry: Entry) -> None:
        """Remove a matrix and free its slot."""
        del self._entries[entry.key]

    def _count(self, key: Key) -> None:
        """Count a use, and note where a visit to a layer and a forward pass begin."""
        self._entries.move_to_end(key)
        if (layer := key[0]) != self._layer:
            self._visit += 1
            if self._first_layer in (None, layer):
                self._first_layer = layer
                self._pass_uses, self._pass_begin = self._time - self._pass_begin, self._time
                self._trains, self._went_back = self._went_back, False
            self._layer = layer
        use = self._uses.setdefault(key, _Use())
        # A matrix may be prefetched and then requested: that is one use.
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
        """Choose the matrix to evict; None if all are pinned or on their way."""
        pinned = self._pinned()
        # Consider only as many as the previous forward call used: the current call may read a long prompt.
        kept = self._pass_uses if 2 * self._pass_uses <= len(self._entries) else 0

        def can_go(entry: Entry) -> bool:
            return entry not in pinned and (entry.arrival is None or entry.arrival.done())

        def rank(entry: Entry) -> float:
            # The logarithm orders matrices by their decayed counts without the current time.
            use = self._uses[entry.key]
            return math.log2(use.count) + use.time / self._half_life

        def stays(entry: Entry) -> bool:
            use = self._uses[entry.key]
            return self._trains or use.visit == self._visit or self._time - use.time < kept

        rare = sorted((entry for entry in self._entries.values() if not stays(entry)), key=rank)
        return next(filter(can_go, [*rare, *self._entries.values()]), None)
