"""A progress object for conversions that counts bytes, and calls a function at some share of them."""

from collections.abc import Callable


class Progress:
    """Counts the bytes of a conversion.

    Attributes:
        total: bytes of the whole conversion.
        done: bytes so far.
    """

    def __init__(self, act: Callable | None = None, share: float = 0.5):
        """Call `act` once, when this share of all bytes is done; a share of 0 is at the start."""
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
    """Return a progress object that raises `error` when this share of all bytes is done."""

    def stop():
        raise error

    return Progress(stop, share)
