"""The progress that a run is given: it counts, and does something once in the middle."""

from collections.abc import Callable


class Progress:
    """Counts the bytes of a run.

    Attributes:
        total: all bytes, as the run says when it begins.
        done: those it has told so far.
    """

    def __init__(self, act: Callable | None = None, share: float = 0.5):
        """With `act`, which is called once when more than a share of all bytes are done; at once if it is 0."""
        self.act, self.share = act, share
        self.total = self.done = 0

    def start(self, total: int) -> None:
        self.total = total
        self.advance(0, "")

    def advance(self, nbytes: int, file: str) -> None:
        self.done += nbytes
        if self.act and self.done >= self.share * self.total:
            act, self.act = self.act, None
            act()


def stops(error: BaseException, share: float) -> Progress:
    """Raises an error after a share of all bytes."""

    def stop():
        raise error

    return Progress(stop, share)
