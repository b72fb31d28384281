"""A progress object for conversions that counts bytes, and calls a function once on the way."""

from collections.abc import Callable


class Progress:
    """Counts the bytes of a run.

    Attributes:
        total: bytes of the whole run, from `start`.
        done: bytes so far, summed by `advance`.
    """

    def __init__(self, act: Callable | None = None, share: float = 0.5):
        """Store `act`, which is called once when this share of all bytes is done; at the start if the share is 0."""
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
    """Return a progress that raises an error after a share of all bytes."""

    def stop():
        raise error

    return Progress(stop, share)
