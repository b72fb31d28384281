"""A cache of experts' matrices in preallocated slots, with a replaceable eviction policy.

Threads share a cache. A matrix is *held* while somebody multiplies by it, and is not evicted then. A thread waits for a
slot only while it holds none in this cache, so that there is always a thread that can go on.
"""

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

# Matrices that are asked for before the product that needs them.
_LOOK_AHEAD = 8


class Job(Protocol):
    """A matrix on its way to a slot."""

    # Whether every user has to call `finish`: each stream of an accelerator waits for a copy by itself.
    is_for_each: bool

    def is_done(self) -> bool:
        """Whether nobody writes to the slot any more."""
        ...

    def finish(self) -> None:
        """Wait until the matrix is there; raise if it did not come."""


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


class _Entry:
    """A matrix in a slot, or on its way there."""

    def __init__(self, key: Hashable, slot: int, is_counted: bool):
        self.key, self.slot = key, slot
        # Whether somebody was told that this matrix was not there.
        self.is_counted = is_counted
        # Weak: an interrupt may come between any two steps, and what it leaves behind holds nothing then.
        self.holders: weakref.WeakSet[_Hold] = weakref.WeakSet()
        self.job: Any = None
        self.is_there = False


class _Hold:
    """Somebody's hold on a matrix, as long as this exists or until it is released."""

    def __init__(self, entry: _Entry):
        self.entry = entry
        entry.holders.add(self)


class MatrixCache:
    """A number of slots for matrices of one size.

    Args:
        slots: their number.
        policy: says which matrix is evicted.
        fetch: begins to bring a matrix, given its key, to a slot.
        count: told of each key that a walk asks for, and whether the matrix was there.
        waited: told of a key, and the seconds that a product waited for it.
        left: told of a slot by each of its users, when the last product with it has been asked for.
    """

    def __init__(
        self,
        slots: int,
        policy: Policy,
        fetch: Callable[[Any, int], Job],
        count: Callable[[Any, bool], None],
        waited: Callable[[Any, float], None],
        left: Callable[[int], None] = lambda slot: None,
    ):
        self.slots = slots
        self._policy, self._fetch, self._left = policy, fetch, left
        self._count, self._waited = count, waited
        self._entries: dict[Hashable, _Entry] = {}
        self._free = list(range(slots))[::-1]
        # Matrices that did not come, while somebody holds them still.
        self._lost: list[_Entry] = []
        self._condition = threading.Condition()

    def __contains__(self, key: Hashable) -> bool:
        """Whether a matrix is there, or on its way."""
        return key in self._entries

    @property
    def has_free_slots(self) -> bool:
        """Whether a matrix can come without another going."""
        return bool(self._free)

    def walk(self, keys: Sequence[Hashable]) -> Iterator[int]:
        """The slots of matrices, one after the other; each is held until the next is asked for.

        The next ones are fetched meanwhile.
        """
        held: deque[_Hold] = deque()
        begun = 0
        try:
            for _ in keys:
                while begun < len(keys) and len(held) < min(_LOOK_AHEAD, self.slots):
                    hold = self._hold(keys[begun], may_wait=not held)
                    if hold is None:
                        break
                    held.append(hold)
                    begun += 1
                self._await(held[0].entry)
                yield held[0].entry.slot
                self._release(held.popleft())
        finally:
            for hold in held:
                self._release(hold)

    def prefetch(self, keys: Sequence[Hashable], is_counted: bool = False) -> None:
        """Begin to fetch matrices of which there is room now, without waiting for them.

        Args:
            keys: of the matrices.
            is_counted: whether they were counted as missing; else the first walk that asks for them does that.
        """
        for key in keys[: self.slots]:
            hold = self._hold(key, may_wait=False, is_asked=False, is_counted=is_counted)
            if hold is None:
                return
            self._release(hold)

    def _hold(
        self, key: Hashable, may_wait: bool, is_asked: bool = True, is_counted: bool = True
    ) -> _Hold | None:
        with self._condition:
            while True:
                entry = self._entries.get(key)
                if entry is not None and not self._has_failed(entry):
                    hold = _Hold(entry)
                    self._policy.touch(key)
                    if is_asked:
                        self._count(key, entry.is_counted)
                        entry.is_counted = True
                    return hold
                if (slot := self._slot()) is not None:
                    break
                if not may_wait:
                    return None
                # A matrix that was fetched ahead tells nobody that it has come.
                self._condition.wait(timeout=0.01)
                self._take_back()
            self._policy.touch(key)
            entry = _Entry(key, slot, is_counted)
            hold = _Hold(entry)
            self._entries[key] = entry
            if is_asked:
                self._count(key, False)
            try:
                entry.job = self._fetch(key, slot)
            except BaseException:
                self._drop(entry)
                self._free.append(slot)
                self._condition.notify_all()
                raise
            return hold

    def _take_back(self) -> None:
        """Find slots that an interrupt has left to nobody."""
        self._lost = [entry for entry in self._lost if entry.holders]
        used = {entry.slot for entry in [*self._entries.values(), *self._lost]}
        self._free = [slot for slot in range(self.slots) if slot not in used]

    def _has_failed(self, entry: _Entry) -> bool:
        """Whether a matrix that was fetched ahead did not come; it is asked for again then."""
        if entry.is_there or entry.holders:
            return False
        if entry.job is not None:
            if not entry.job.is_done():
                return False
            with suppress(Exception):
                entry.job.finish()
                return False
        self._drop(entry)
        self._free.append(entry.slot)
        return True

    def _slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        victim = self._policy.victim(self._can_go)
        if victim is None:
            idle = sum(map(self._can_go, self._entries))
            # One that was on its way may have come since.
            victim = self._policy.victim(self._can_go) if idle else None
            if victim is None and idle:
                raise ValueError(
                    f"{type(self._policy).__name__}.victim gave None, but {idle} of {self.slots} matrices can go: give "
                    "the key of one of them."
                )
        if victim is None:
            return None
        if not self._can_go(victim):
            raise ValueError(
                f"{type(self._policy).__name__}.victim gave {victim!r}, which cannot go: it is in use, or not in "
                "memory. Give a key for which can_go(key) is true."
            )
        entry = self._entries[victim]
        self._drop(entry)
        return entry.slot

    def _can_go(self, key: Hashable) -> bool:
        entry = self._entries.get(key)
        return (
            entry is not None
            and not entry.holders
            and (entry.is_there or entry.job is None or entry.job.is_done())
        )

    def _drop(self, entry: _Entry) -> None:
        # Where several waited for a matrix that did not come, another may be on its way under the same key.
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._policy.forget(entry.key)

    def _await(self, entry: _Entry) -> None:
        if entry.is_there and not entry.job.is_for_each:
            return
        begin = time.perf_counter()
        try:
            entry.job.finish()
        except BaseException:
            with self._condition:
                # After an interrupt, threads may still write to the slot: the matrix stays until they are through.
                if entry.job.is_done():
                    if entry not in self._lost:
                        self._lost.append(entry)
                    self._drop(entry)
            raise
        entry.is_there = True
        self._waited(entry.key, time.perf_counter() - begin)

    def _release(self, hold: _Hold) -> None:
        entry = hold.entry
        with self._condition:
            entry.holders.discard(hold)
            self._left(entry.slot)
            if not entry.holders:
                if entry in self._lost:
                    self._lost.remove(entry)
                    self._free.append(entry.slot)
                self._condition.notify_all()
