"""What became of the experts that were asked for."""

import threading
from dataclasses import dataclass, field


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
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def hit_rate(self) -> float:
        """Hits over all; NaN before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else float("nan")

    def add(
        self, hits: int = 0, misses: int = 0, bytes_read: int = 0, seconds: float = 0.0, computed: int = 0
    ) -> None:
        """Count; threads may do so at once."""
        with self._lock:
            self.hits += hits
            self.misses += misses
            self.bytes_read += bytes_read
            self.seconds += seconds
            self.computed += computed

    def reset(self) -> None:
        """Begin to count again."""
        with self._lock:
            self.hits = self.misses = self.bytes_read = self.computed = 0
            self.seconds = 0.0

    def __add__(self, other: "ExpertsStatistics") -> "ExpertsStatistics":
        """The sum of two layers, or of two times."""
        names = ("hits", "misses", "bytes_read", "seconds", "computed")
        return ExpertsStatistics(**{name: getattr(self, name) + getattr(other, name) for name in names})
