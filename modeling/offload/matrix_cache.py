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


@dataclass(eq=False)
class Entry:
    """A matrix in a slot, or on its way there.

    Attributes:
        key: of the matrix.
        slot: its number.
        pins: how many multiply by it, or are about to.
        parts: of the matrix, as its format has them.
        arrival: `done()` says whether nobody writes to the slot any more, `failed()` whether that is so and the matrix
            is not there, and `result()` waits until it is there, or raises.
        is_counted: whether somebody has been told that this matrix was not there.
    """

    key: Any
    slot: int
    pins: int = 1
    parts: list = field(default_factory=list)
    arrival: Any = None
    is_counted: bool = False


class MatrixCache:
    """A number of slots for matrices of one size.

    Args:
        slots: their number.
        policy: says which matrix is evicted.
    """

    def __init__(self, slots: int, policy: Policy):
        self._policy = policy
        self._entries: dict[Hashable, Entry] = {}
        self.free = list(range(slots))[::-1]
        """Slots without a matrix."""

    def __contains__(self, key: Hashable) -> bool:
        """Whether a matrix is there, or on its way."""
        return key in self._entries

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
        if not self.free and not self._evict():
            return None
        entry = self._entries[key] = Entry(key, self.free.pop())
        self._policy.touch(key)
        return entry

    def unpin(self, entry: Entry) -> None:
        """Take a pin back; the slot of a dropped matrix is free with the last one."""
        entry.pins -= 1
        if not entry.pins and self._entries.get(entry.key) is not entry:
            self.free.append(entry.slot)

    def drop(self, entry: Entry) -> None:
        """Forget a matrix. Where it did not come, another may be on its way under the same key already."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._policy.forget(entry.key)
            if not entry.pins:
                self.free.append(entry.slot)

    def _evict(self) -> bool:
        victim = self._policy.victim(self._can_go)
        if victim is not None and self._can_go(victim):
            self.drop(self._entries[victim])
            return True
        if victim is None:
            idle = sum(map(self._can_go, self._entries))
            # One that was on its way may have come since.
            if not idle or self._policy.victim(self._can_go) is not None:
                return False
            wrong = f"None, but {idle} of {len(self._entries)} matrices can go"
        else:
            wrong = f"{victim!r}, which cannot go: it is in use, or not in memory"
        raise ValueError(
            f"{type(self._policy).__name__}.victim gave {wrong}. Give a key for which can_go(key) is true."
        )

    def _can_go(self, key: Hashable) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not entry.pins and entry.arrival.done()
