"""Output of the command: progress on standard error, results on standard output as text or JSON."""

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
    """Shows bytes, rate and time left; an `io.Progress`."""

    def __init__(self, progress: Progress):
        self.progress = progress
        # Until the number of bytes is known: sources are opened and tokenizers converted before.
        self.task = progress.add_task("preparing", total=None)

    def start(self, total: int) -> None:
        """Begin, or begin with something else; `total` is the number of bytes."""
        self.progress.reset(self.task, total=total)

    def advance(self, nbytes: int, file: str) -> None:
        """Count bytes of a file."""
        self.progress.update(self.task, advance=nbytes, description=escape(file))


class Lines:
    """Says once a minute how far it is, for logs; an `io.Progress`."""

    MINUTE = 60.0

    def __init__(self) -> None:
        self.total = self.done = 0
        self.begun = self.said = time.monotonic()

    def start(self, total: int) -> None:
        """Begin, or begin with something else; `total` is the number of bytes."""
        self.total, self.done, self.begun = total, 0, time.monotonic()

    def advance(self, nbytes: int, file: str) -> None:
        """Count bytes of a file."""
        self.done += nbytes
        now = time.monotonic()
        if now - self.said < self.MINUTE:
            return
        self.said = now
        left = (now - self.begun) * (self.total - self.done) / max(self.done, 1) / 60
        share = f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB"
        print(f"{file}: {share}, about {left:.0f} min left", file=sys.stderr, flush=True)


def shows_progress(is_silent: bool) -> bool:
    """Return whether progress is drawn: standard error is a terminal, and the user did not choose `--quiet`."""
    # rich's own answer is yes in a pipe, too, where FORCE_COLOR is set, as build servers do.
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
    """Show a line on a terminal while something takes a while."""
    if not shows_progress(is_silent):
        yield
        return
    with Console(stderr=True).status(escape(text)):
        yield


def print_sections(
    content: dict[str, Any], sections: list[tuple[str, list[tuple[str, str]]]], as_json: bool
) -> None:
    """Print a result: as JSON its content, else titles with rows of label and text."""
    if as_json:
        print(json.dumps(content, indent=2, default=str))
        return
    for title, rows in sections:
        print(title, end="\n" if title else "")
        width = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            print(f"  {label:<{width}}  {text}" if label else f"  {text}")
