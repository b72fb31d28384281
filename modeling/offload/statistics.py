"""How often the memory for recently used experts had what was asked for, and what it cost when it had not."""

import threading
from dataclasses import astuple, dataclass, replace
from operator import add


@dataclass
class ExpertsStatistics:
    """Counts of one layer, since loading or the last reset; `model.experts_statistics()` gives one for each layer.

    An expert counts once for each pass in which rows need it.

    Attributes:
        hits: experts that were in the memory for recently used ones.
        misses: experts that were not.
        bytes_read: bytes that came from files, or from RAM to the accelerator.
        seconds: time that products waited for experts.
        computed: misses whose rows were computed where the expert lies.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    computed: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over all; NaN before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else float("nan")

    def __add__(self, other: "ExpertsStatistics") -> "ExpertsStatistics":
        """The sum of two layers, or of two times."""
        return ExpertsStatistics(*map(add, astuple(self), astuple(other)))


class Counter:
    """The statistics of one layer, to which several threads add at once."""

    def __init__(self):
        self._lock = threading.Lock()
        self._sum = ExpertsStatistics()

    def add(self, **counts: float) -> None:
        """Add to the fields of `ExpertsStatistics` that are named."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._sum, name, getattr(self._sum, name) + count)

    def read(self, reset: bool = False) -> ExpertsStatistics:
        """The counts until now; with `reset` they begin again at 0, and none is lost between."""
        with self._lock:
            result = replace(self._sum)
            if reset:
                self._sum = ExpertsStatistics()
            return result
