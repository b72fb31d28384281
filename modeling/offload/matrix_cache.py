"""Which matrix is in which slot: a table with a replaceable eviction policy, for one thread at a time.

A matrix is *pinned* while somebody multiplies by it, and is not evicted then, nor while it is on its way.
"""

from collections import OrderedDict
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


class Arrival(Protocol):
    """A matrix on its way to a slot, as a `Future`."""

    def done(self) -> bool:
        """Whether nobody writes to the slot any more."""
        ...

    def failed(self) -> bool:
        """Whether it is done, and the matrix did not come."""
        ...

    def result(self) -> None:
        """Wait until the matrix is there; raise if it did not come."""


@dataclass(eq=False)
class Entry:
    """A matrix in a slot, or on its way there.

    Attributes:
        key: of the matrix.
        slot: its number.
        pins: how many multiply by it, or are about to.
        arrival: None until it is asked for.
        parts: of the matrix, as its format has them.
        is_counted: whether somebody has been told that this matrix was not there.
    """

    key: Any
    slot: int
    pins: int = 1
    arrival: Any = None
    parts: list = field(default_factory=list)
    is_counted: bool = False


class MatrixCache:
    """A number of slots for matrices of one size.

    Args:
        slots: their number.
        policy: says which matrix is evicted.
    """

    def __init__(self, slots: int, policy: Policy):
        self.slots = slots
        self._policy = policy
        self._entries: dict[Hashable, Entry] = {}
        self._free = list(range(slots))[::-1]

    def __contains__(self, key: Hashable) -> bool:
        """Whether a matrix is there, or on its way."""
        return key in self._entries

    @property
    def has_free_slots(self) -> bool:
        """Whether a matrix can come without another going."""
        return bool(self._free)

    def pin(self, key: Hashable) -> Entry | None:
        """The matrix of a key, pinned; None if it is neither there nor on its way."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if not entry.pins and entry.arrival.failed():
            self.drop(entry)
            return None
        entry.pins += 1
        self._policy.touch(key)
        return entry

    def put(self, key: Hashable) -> Entry | None:
        """A slot for a matrix, pinned; None if all are in use.

        Raises:
            ValueError: the policy names a matrix that cannot go.
        """
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return None
        entry = self._entries[key] = Entry(key, slot)
        self._policy.touch(key)
        return entry

    def unpin(self, entry: Entry) -> None:
        """Take a pin back; the slot of a dropped matrix is free with the last one."""
        entry.pins -= 1
        if not entry.pins and self._entries.get(entry.key) is not entry:
            self._free.append(entry.slot)

    def drop(self, entry: Entry) -> None:
        """Forget a matrix that did not come. Another may be on its way under the same key already."""
        if self._entries.get(entry.key) is entry:
            self._forget(entry)
            if not entry.pins:
                self._free.append(entry.slot)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._policy.forget(entry.key)

    def _evict(self) -> int | None:
        victim = self._policy.victim(self._can_go)
        name = f"{type(self._policy).__name__}.victim"
        if victim is None:
            idle = sum(map(self._can_go, self._entries))
            # One that was on its way may have come since.
            victim = self._policy.victim(self._can_go) if idle else None
            if victim is None and idle:
                raise ValueError(
                    f"{name} gave None, but {idle} of {self.slots} matrices can go: give the key of one of them."
                )
        if victim is None:
            return None
        if not self._can_go(victim):
            raise ValueError(
                f"{name} gave {victim!r}, which cannot go: it is in use, or not in memory. Give a key for which "
                "can_go(key) is true."
            )
        entry = self._entries[victim]
        self._forget(entry)
        return entry.slot

    def _can_go(self, key: Hashable) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not entry.pins and entry.arrival.done()
