"""Which expert's matrix is in which slot, and which one makes room: a table with a policy, for one thread at a time.

A matrix is *pinned* while somebody multiplies by it, and is not evicted then, nor while it is on its way.
"""

import math
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Policy(Protocol):
    """Says which matrix is evicted.

    Each size of matrix has a policy of its own. Keys are pairs: the name of a layer's experts, and an expert's number.
    Calls come one at a time.
    """

    def touch(self, key: Hashable) -> None:
        """A matrix was asked for; it is in the cache now."""

    def forget(self, key: Hashable) -> None:
        """A matrix has left the cache."""

    def victim(self, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        """The key of the matrix to evict, for which `can_go` is true; None if there is none."""

    # A policy may have a method `go_back(self)`, which is called when a layer's pass back begins.


class LeastRecentlyUsed:
    """Evicts the matrix whose last use is the longest ago."""

    def __init__(self):
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def touch(self, key: Hashable) -> None:
        """See `Policy`."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def forget(self, key: Hashable) -> None:
        """See `Policy`."""
        self._keys.pop(key, None)

    def victim(self, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        """See `Policy`."""
        return next((key for key in self._keys if can_go(key)), None)


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


class LeastOftenUsed:
    """Evicts the matrix that is used least often, where a use counts half after a while.

    That while is four uses of each matrix that was ever asked for; those that were evicted are remembered. Routers
    prefer some experts for long and some for a text, and choose some again for the next token. So two kinds of
    matrices stay in spite of their numbers:

    * those of the pass before, where they need at most half of the slots;
    * those that the layer has asked for which computes now, as long as there are others. If there are none, the least
      recently used one goes.

    While passes go back, too, which ask in the reverse order, the least recently used matrix is the one that is needed
    last, and goes.
    """

    def __init__(self):
        self._uses: dict[Hashable, _Use] = {}
        # Those in the cache, the last one used last.
        self._held: OrderedDict[Hashable, _Use] = OrderedDict()
        self._time = self._visit = 0
        self._first_layer: Hashable = None
        self._layer: Hashable = None
        # Uses by the pass before, and when this one began.
        self._pass_uses, self._pass_begin = 0, 0
        self._trains = self._went_back = False

    def touch(self, key: Any) -> None:
        """See `Policy`."""
        layer = key[0]
        if layer != self._layer:
            self._visit += 1
            if self._first_layer in (None, layer):
                self._first_layer = layer
                self._pass_uses, self._pass_begin = self._time - self._pass_begin, self._time
                self._trains, self._went_back = self._went_back, False
            self._layer = layer
        use = self._uses.setdefault(key, _Use())
        # A matrix may be asked for ahead, and when it is needed: those of both stacks count alike.
        if use.visit != self._visit:
            self._time += 1
            use.count = use.count * 2 ** ((use.time - self._time) / self._half_life) + 1
            use.time, use.visit = self._time, self._visit
        self._held[key] = use
        self._held.move_to_end(key)

    def go_back(self) -> None:
        """See `Policy`."""
        self._trains = self._went_back = True

    @property
    def _half_life(self) -> int:
        return 4 * len(self._uses)

    def forget(self, key: Hashable) -> None:
        """See `Policy`."""
        self._held.pop(key, None)

    def victim(self, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        """See `Policy`."""
        # As many as the pass before used: this one may be a prompt.
        kept = self._pass_uses if 2 * self._pass_uses <= len(self._held) else 0
        found, least = None, math.inf
        for key, use in () if self._trains else self._held.items():
            if use.visit == self._visit or self._time - use.time < kept:
                continue
            # In the order of the counts now, whenever that is.
            rank = math.log2(use.count) + use.time / self._half_life
            if rank < least and can_go(key):
                found, least = key, rank
        return next((key for key in self._held if can_go(key)), None) if found is None else found


@dataclass(eq=False)
class Entry:
    """A matrix in a slot, or on its way there.

    Attributes:
        key: of the matrix.
        slot: its number.
        parts: of the matrix, as its format has them.
        arrival: `done()` says whether nobody writes to the slot any more, `failed()` whether that is so and the matrix
            is not there, and `result()` waits until it is there, or raises.
        is_counted: whether somebody has been told that this matrix was not there.
    """

    key: Any
    slot: int
    parts: list = field(default_factory=list)
    arrival: Any = None
    is_counted: bool = False


class Pins(deque):
    """What one user has pinned, as long as this lives: an interrupt may come before it lets go."""

    __hash__ = object.__hash__


class MatrixCache:
    """A number of slots for matrices of one size.

    Args:
        slots: their number.
        policy: says which matrix is evicted.
    """

    def __init__(self, slots: int, policy: Policy):
        self._slots, self._policy = slots, policy
        self._entries: dict[Hashable, Entry] = {}
        self._pins: weakref.WeakSet[Pins] = weakref.WeakSet()
        self.free = list(range(slots))[::-1]
        """Slots without a matrix."""

    def __contains__(self, key: Hashable) -> bool:
        """Whether a matrix is there, or on its way."""
        return key in self._entries

    def go_back(self) -> None:
        """Let the policy know that a layer's pass back begins."""
        if (go_back := getattr(self._policy, "go_back", None)) is not None:
            go_back()

    def pins(self) -> Pins:
        """A place for a user's pins."""
        pins = Pins()
        self._pins.add(pins)
        return pins

    def get(self, key: Hashable) -> Entry | None:
        """The matrix of a key; None if it is neither there nor on its way."""
        entry = self._entries.get(key)
        if entry is not None and not self._has_come(entry):
            self.drop(entry)
            return None
        if entry is not None:
            self._policy.touch(key)
        return entry

    def put(self, key: Hashable) -> Entry | None:
        """A slot for a matrix; None if all are in use.

        Raises:
            ValueError: the policy names a matrix that cannot go.
        """
        if not self.free and not self._evict():
            # An interrupt may have left a slot to nobody.
            used = {entry.slot for entry in [*self._entries.values(), *self._pinned()]}
            self.free = [slot for slot in range(self._slots) if slot not in used]
        if not self.free:
            return None
        entry = self._entries[key] = Entry(key, self.free.pop())
        self._policy.touch(key)
        return entry

    def drop(self, entry: Entry) -> None:
        """Forget a matrix; its slot is free when nobody has pinned it.

        Where it did not come, another may be on its way under the same key already.
        """
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._policy.forget(entry.key)
        if entry not in self._pinned():
            self.free.append(entry.slot)

    def _pinned(self) -> list[Entry]:
        return [entry for pins in self._pins for entry in pins]

    def _has_come(self, entry: Entry) -> bool:
        """Whether a matrix is there or on its way; one that others wait for is theirs to drop."""
        return entry.arrival is not None and (not entry.arrival.failed() or entry in self._pinned())

    def _evict(self) -> bool:
        pinned = self._pinned()

        def can_go(key: Hashable) -> bool:
            entry = self._entries.get(key)
            return (
                entry is not None and entry not in pinned and (entry.arrival is None or entry.arrival.done())
            )

        victim = self._policy.victim(can_go)
        if victim is not None and can_go(victim):
            self.drop(self._entries[victim])
            return True
        if victim is None:
            idle = sum(map(can_go, self._entries))
            # One that was on its way may have come since.
            if not idle or self._policy.victim(can_go) is not None:
                return False
            wrong = f"None, but {idle} of {len(self._entries)} matrices can go"
        else:
            wrong = f"{victim!r}, which cannot go: it is in use, or not in memory"
        raise ValueError(
            f"{type(self._policy).__name__}.victim gave {wrong}. Give a key for which can_go(key) is true."
        )
