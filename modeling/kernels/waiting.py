"""A message at the terminal while kernels are compiled and checked, which takes seconds at first use."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from transformers.utils import logging

# Seconds after which the text is shown.
_PATIENCE = 1.0


@contextlib.contextmanager
def log_if_slow(text: str) -> Iterator[None]:
    """Show a text on the terminal while the context lasts, if that is longer than a second.

    The text is shown like transformers' progress bars, and is silent where they are disabled.
    """
    shown: list[Any] = []

    def show() -> None:
        # Without a terminal `disable=None` draws nothing.
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
