"""Which expert's matrix is in which slot, and which one makes room: a table, for one thread at a time.

A matrix is *pinned* while somebody multiplies by it, and is not evicted then, nor while it is on its way.
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
    """A matrix in a slot, or on its way there.

    Attributes:
        key: of the matrix.
        slot: its number.
        parts: of the matrix, as its format has them.
        arrival: `done()` says whether nobody writes to the slot any more, `failed()` whether that is so and the matrix
            is not there, and `result()` waits until it is there, or raises.
        is_counted: whether this matrix was counted as missing already.
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
    """How often a matrix was used, and when last.

    Attributes:
        count: visits in which it was used until `time`, each halved with the time since.
        time: of the last such visit; one passes with each use of any matrix.
        visit: the number of that visit to its layer.
    """

    count: float = 0.0
    time: int = 0
    visit: int = 0


class MatrixCache:
    """A number of slots for matrices of one size; the matrix that is used least often is evicted.

    A use counts half after a while: four uses of each matrix that was ever asked for; those that were evicted are
    remembered. Routers prefer some experts for long and some for a text, and choose some again for the next token. So
    two kinds of matrices stay in spite of their counts:

    * those of the forward pass before, where they need at most half of the slots;
    * those that the layer has asked for which computes now, as long as there are others. If there are none, the least
      recently used one goes.

    In training, backward passes ask in the reverse order, so that the least recently used matrix is the one that is
    needed last, and goes.
    """

    def __init__(self, slots: int):
        self._slots = slots
        # The last one used last.
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._pins: weakref.WeakSet[Pins] = weakref.WeakSet()
        self._uses: dict[Key, _Use] = {}
        self._time = self._visit = 0
        self._first_layer: Any = None
        self._layer: Any = None
        # Uses by the forward pass before, and when this one began.
        self._pass_uses, self._pass_begin = 0, 0
        self._trains = self._went_back = False

    def __contains__(self, key: Key) -> bool:
        """Return whether a matrix is in a slot, or being loaded."""
        return key in self._entries

    @property
    def has_room(self) -> bool:
        """Whether a slot has no matrix."""
        return len(self._entries) < self._slots

    def go_back(self) -> None:
        """Note that a layer's backward pass begins."""
        self._trains = self._went_back = True

    def pins(self) -> Pins:
        """Make a list for what one user pins."""
        pins = Pins()
        self._pins.add(pins)
        return pins

    def get(self, key: Key) -> Entry | None:
        """Return the matrix of a key; None if it is neither there nor on its way."""
        entry = self._entries.get(key)
        if entry is not None and (entry.arrival is None or entry.arrival.failed()):
            # No thread writes to its slot any more; threads that wait for it get its error.
            self.drop(entry)
            return None
        if entry is not None:
            self._count(key)
        return entry

    def put(self, key: Key) -> Entry | None:
        """Give a matrix a slot; None if all are in use."""
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
        """Forget a matrix; its slot can have another one."""
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
        # As many as the pass before used: this one may be a prompt.
        kept = self._pass_uses if 2 * self._pass_uses <= len(self._entries) else 0

        def can_go(entry: Entry) -> bool:
            return entry not in pinned and (entry.arrival is None or entry.arrival.done())

        def rank(entry: Entry) -> float:
            # In the order of the counts now, whenever that is.
            use = self._uses[entry.key]
            return math.log2(use.count) + use.time / self._half_life

        def stays(entry: Entry) -> bool:
            use = self._uses[entry.key]
            return self._trains or use.visit == self._visit or self._time - use.time < kept

        rare = sorted((entry for entry in self._entries.values() if not stays(entry)), key=rank)
        return next(filter(can_go, [*rare, *self._entries.values()]), None)
