"""A message in the terminal while kernels are compiled and checked, which takes seconds at first use."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from transformers.utils import logging

# Seconds after which the text is shown.
_PATIENCE = 1.0


@contextlib.contextmanager
def log_if_slow(text: str) -> Iterator[None]:
    """Show a text in the terminal from the second second of the context to its end.

    The text is shown as a progress bar of transformers, so it is not shown if these are disabled.
    """
    shown: list[Any] = []

    def show() -> None:
        # With `disable=None` nothing is shown outside of a terminal.
        shown.append(logging.tqdm(desc=text, bar_format="{desc}", leave=False, disable=None))

    timer = threading.Timer(_PATIENCE, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for line in shown:
            line.close()
