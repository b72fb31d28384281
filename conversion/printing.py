"""What the command shows: progress on standard error, results on standard output, as text or JSON."""

import contextlib
import dataclasses
import json
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
from rich.table import Table

from .checkpoint import Report


class Bar:
    """Shows bytes, rate and time left; what `writing.Progress` asks for."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.task = None

    def start(self, total: int) -> None:
        """Begin with so many bytes."""
        self.task = self.progress.add_task("", total=total)

    def advance(self, nbytes: int, file: str) -> None:
        """Count bytes of a file."""
        if self.task is not None:
            self.progress.update(self.task, advance=nbytes, description=escape(file))


@contextlib.contextmanager
def progress_bar(as_json: bool) -> Iterator[Bar | None]:
    """Give something to report progress to; None where nobody would see it."""
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress)


def print_report(report: Report, as_json: bool) -> None:
    """Show what a conversion did."""
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
    print_sections(dataclasses.asdict(report), [("", rows)], as_json)


def _shorten(names: list[str]) -> str:
    return ", ".join(names if len(names) < 4 else [*names[:2], "…", names[-1]])


def print_sections(
    content: dict[str, Any], sections: list[tuple[str, list[tuple[str, str]]]], as_json: bool
) -> None:
    """Show a result.

    Args:
        content: of the JSON.
        sections: title, and rows of label and text.
        as_json: which of the two.
    """
    if as_json:
        print(json.dumps(content, indent=2, default=str))
        return
    console = Console()
    for title, rows in sections:
        if not console.is_terminal:  # whole lines: what reads a pipe should not meet the width of a window
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
