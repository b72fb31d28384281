"""Print progress to standard error, and results to standard output as text or JSON."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Bar:
    """A progress bar with bytes, rate and time left, as an `io.Progress`."""

    def __init__(self, progress: Progress):
        self.progress = progress
        # The number of bytes is unknown while sources are opened and tokenizers converted.
        self.task = progress.add_task("preparing", total=None)

    def start(self, total: int) -> None:
        """Start counting from zero, to `total` bytes."""
        self.progress.reset(self.task, total=total)

    def advance(self, nbytes: int, file: str) -> None:
        """Add bytes that were read from a file."""
        self.progress.update(self.task, advance=nbytes, description=escape(file))


class Lines:
    """A line a minute with bytes and time left, for logs, as an `io.Progress`."""

    MINUTE = 60.0

    def __init__(self) -> None:
        self.total = self.done = 0
        self.begun = self.printed = time.monotonic()

    def start(self, total: int) -> None:
        """Start counting from zero, to `total` bytes."""
        self.total, self.done, self.begun = total, 0, time.monotonic()

    def advance(self, nbytes: int, file: str) -> None:
        """Add bytes that were read from a file."""
        self.done += nbytes
        now = time.monotonic()
        if now - self.printed < self.MINUTE:
            return
        self.printed = now
        left = (now - self.begun) * (self.total - self.done) / max(self.done, 1) / 60
        share = f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB"
        print(f"{file}: {share}, about {left:.0f} min left", file=sys.stderr, flush=True)


def shows_progress(is_silent: bool) -> bool:
    """Return True if progress is drawn: standard error is a terminal, and the user did not choose `--quiet`."""
    # rich would draw into a pipe, too, if FORCE_COLOR is set, as on build servers.
    return not is_silent and sys.stderr.isatty()


@contextlib.contextmanager
def progress_bar(is_silent: bool) -> Iterator[Bar | Lines | None]:
    """Show progress as a bar on a terminal, as lines elsewhere; yield None with `--quiet`."""
    if not shows_progress(is_silent):
        yield None if is_silent else Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress)


@contextlib.contextmanager
def status(text: str, is_silent: bool) -> Iterator[None]:
    """Show a status line on a terminal while the block runs."""
    if not shows_progress(is_silent):
        yield
        return
    with Console(stderr=True).status(escape(text)):
        yield


def print_sections(
    content: dict[str, Any], sections: list[tuple[str, list[tuple[str, str]]]], as_json: bool
) -> None:
    """Print a result: its content as JSON, or its sections as titles with rows of label and text."""
    if as_json:
        print(json.dumps(content, indent=2, default=str))
        return
    for title, rows in sections:
        print(title, end="\n" if title else "")
        width = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            print(f"  {label:<{width}}  {text}" if label else f"  {text}")
