"""Output of the command: progress on standard error, results on standard output as text or JSON."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
from rich.table import Table

if TYPE_CHECKING:
    from llamoe.conversion import Report


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


def shows_progress(is_silent: bool) -> bool:
    """Whether somebody sees progress: standard error is a terminal, and the user has not asked for silence."""
    # rich's own answer is yes in a pipe, too, where FORCE_COLOR is set, as build servers do.
    return not is_silent and sys.stderr.isatty()


@contextlib.contextmanager
def progress_bar(is_silent: bool) -> Iterator[Bar | None]:
    """A progress bar; None where nobody would see it."""
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
    """A line that says what takes a while, until it is done; nothing where nobody would see it."""
    if not shows_progress(is_silent):
        yield
        return
    with Console(stderr=True).status(escape(text)):
        yield


def print_report(report: "Report", as_json: bool) -> None:
    """Print what a conversion did."""
    verb = "would write" if report.dry_run else "wrote"
    rows = [
        ("source", f"{report.source} ({report.kind})"),
        (verb, f"{report.target} ({report.to})"),
        ("files", f"{len(report.files):,}: {_shorten(report.files)}"),
        ("tensors", f"{report.tensors:,}, {report.bytes / 1e9:.3f} GB"),
        ("seconds", f"{report.seconds:.1f}, {report.bytes / 1e9 / max(report.seconds, 1e-9):.2f} GB/s"),
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in report.dropped.items():
        reasons.setdefault(reason, []).append(name)
    rows += [("left out", f"{_shorten(names)}: {reason}") for reason, names in reasons.items()]
    rows += [("note", note) for note in report.notes]
    sections = [("", rows)]
    if report.parts:
        # Here, since the import takes seconds; with a report it is done already.
        from llamoe.modeling.checkpoints import in_units

        parts = {**report.parts, "in all": tuple(map(sum, zip(*report.parts.values(), strict=True)))}
        sizes = [(part, ", ".join(map(in_units, before_after))) for part, before_after in parts.items()]
        sections.append(("bytes before, after", sizes))
    print_sections(dataclasses.asdict(report), sections, as_json)


def _shorten(names: list[str]) -> str:
    return ", ".join(names if len(names) < 4 else [*names[:2], "…", names[-1]])


def print_sections(
    content: dict[str, Any], sections: list[tuple[str, list[tuple[str, str]]]], as_json: bool
) -> None:
    """Print a result: as JSON its content, else titles with rows of label and text."""
    if as_json:
        print(json.dumps(content, indent=2, default=str))
        return
    console = Console()
    for title, rows in sections:
        # Programs that read a pipe get whole lines, not lines wrapped to a window's width.
        if not console.is_terminal:
            print(title, end="\n" if title else "")
            width = max((len(label) for label, _ in rows), default=0)
            for label, text in rows:
                print(f"  {label:<{width}}  {text}" if label else f"  {text}")
            continue
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in rows:
            table.add_row(f"  {escape(label)}", escape(text))
        if title:
            console.print(f"[bold]{escape(title)}[/bold]")
        console.print(table)
