"""Print progress to standard error, and results to standard output as text or JSON."""

import contextlib
import json
import sys
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
    """A progress bar with bytes, rate and time left, for the argument `progress` of `llamoe.conversion`."""

    def __init__(self, progress: Progress):
        self.progress = progress
        # The number of bytes is unknown until sources are opened and tokenizers converted.
        self.task = progress.add_task("preparing", total=None)

    def start(self, total: int) -> None:
        """Start counting from zero, to `total` bytes."""
        self.progress.reset(self.task, total=total)

    def advance(self, nbytes: int, file: str) -> None:
        """Add bytes that were read from a file."""
        self.progress.update(self.task, advance=nbytes, description=escape(file))


def shows_progress(is_silent: bool) -> bool:
    """Return True if progress is drawn: standard error is a terminal, and the user did not choose `--quiet`."""
    # rich itself would also draw into a pipe if FORCE_COLOR is set, as it is on build servers.
    return not is_silent and sys.stderr.isatty()


@contextlib.contextmanager
def progress_bar(is_silent: bool) -> Iterator[Bar | None]:
    """Yield a progress bar, or None if progress is not shown."""
    if not shows_progress(is_silent):
        yield None
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
    """Print a result, either `content` as JSON, or `sections`, each a title and rows of label and text."""
    if as_json:
        print(json.dumps(content, indent=2, default=str))
        return
    for title, rows in sections:
        print(title, end="\n" if title else "")
        width = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            print(f"  {label:<{width}}  {text}" if label else f"  {text}")
