"""Name tables: how tensors of one format, the source, become tensors of another, the target, and the reverse.

A `Row` gives the tensors' names on both sides, the operation between them, and the axis along which the source's files
hold slices. A tensor without a row, and a row without its tensors, are errors. A `Drop` names a tensor that is left out
on purpose, with the reason.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from .lazy_tensor import LazyTensor
from .operations import KEEP, Operation


@dataclass(frozen=True)
class Row:
    """Tensors of the source and the tensors of the target that they become.

    Attributes:
        source: one name or several, in which `{i}`, with any letter, stands for a number.
        target: one name or several in the other format, with the same letters.
        operation: how the source tensors become the target tensors.
        axis: axis of the source tensors along which each file holds a slice; None if each file holds a copy.
    """

    source: str | tuple[str, ...]
    target: str | tuple[str, ...]
    operation: Operation = KEEP
    axis: int | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Names on the source side."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def targets(self) -> tuple[str, ...]:
        """Names on the target side."""
        return (self.target,) if isinstance(self.target, str) else self.target


@dataclass(frozen=True)
class Drop:
    """A tensor of the source that the target leaves out.

    In `pattern`, its name, `{i}` stands for a number and `*` for anything. `reason` says why nothing is lost.
    """

    pattern: str
    reason: str


Table = Sequence[Row | Drop]


def read_through(
    table: Table, files: Sequence[Mapping[str, LazyTensor]], sizes: Any
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Translate tensors from the source's names to the target's.

    Args:
        table: of the source's format.
        files: name to tensor, for each file of the source.
        sizes: the model's configuration.

    Returns:
        target name to tensor, and the name of each dropped source tensor to the reason.

    Raises:
        CheckpointError: a name is unknown or missing in a file, two names yield the same target, or a tensor has no
            axis along which files hold slices of it.
    """
    names = list(dict.fromkeys(name for file in files for name in file))
    rows = [row for row in table if isinstance(row, Row)]
    drops = [(_regex(drop.pattern), drop.reason) for drop in table if isinstance(drop, Drop)]
    groups, unknown = _sort_names(names, [row.sources for row in rows])
    dropped = {name: reason for name in unknown for regex, reason in drops if regex.fullmatch(name)}
    where = _file_of(files)
    _refuse_unknown([name for name in unknown if name not in dropped], where)
    results: dict[str, LazyTensor] = {}
    for (index, numbers), group in groups.items():
        row, values = rows[index], dict(numbers)
        keys = [pattern.format_map(values) for pattern in row.sources]
        for file in files:
            _refuse_missing([key for key in keys if key not in file], group, _file_of([file]))
        parts = [[file[key] for file in files] for key in keys]
        for tensor in chain(*parts):
            if row.axis is not None and tensor.ndim <= row.axis:
                expected = f"at least {row.axis + 1} axes"
                raise CheckpointError(
                    f"{tensor.origin} has shape {list(tensor.shape)}; expected: {expected}."
                )
        for pattern, tensor in zip(row.targets, row.operation.forward(parts, row.axis, sizes), strict=True):
            name = pattern.format_map(values)
            if name in results:
                raise CheckpointError(
                    f"{where}{name} is stored under two names, one of them {keys[0]}. Remove one."
                )
            results[name] = tensor
    return results, dropped


def write_through(
    table: Table, tensors: Mapping[str, LazyTensor], files: int, sizes: Any
) -> list[dict[str, LazyTensor]]:
    """Translate tensors from the target's names back to the source's, and split them over a number of files.

    Returns:
        for each file, source name to tensor.

    Raises:
        CheckpointError: a name is unknown, missing or ambiguous, or a size is not divisible by the number of files.
    """
    rows = [row for row in table if isinstance(row, Row)]
    groups, unknown = _sort_names(tensors, [row.targets for row in rows])
    where = _file_of([tensors])
    _refuse_unknown(unknown, where)
    results: list[dict[str, LazyTensor]] = [{} for _ in range(files)]
    for (index, numbers), group in groups.items():
        row, values = rows[index], dict(numbers)
        keys = [pattern.format_map(values) for pattern in row.targets]
        _refuse_missing([key for key in keys if key not in group], group, where)
        parts = row.operation.inverse([tensors[key] for key in keys], row.axis, files, sizes)
        for pattern, pieces in zip(row.sources, parts, strict=True):
            name = pattern.format_map(values)
            for result, piece in zip(results, pieces, strict=True):
                assert name not in result, f"two rows of the table write {name}"
                result[name] = piece
    return results


def _sort_names(
    names: Iterable[str], patterns: Sequence[tuple[str, ...]]
) -> tuple[dict[tuple[int, tuple[tuple[str, int], ...]], set[str]], list[str]]:
    """Group names by the first row that matches them and by the numbers in them; list the names that no row matches."""
    regexes = [[_regex(pattern) for pattern in row] for row in patterns]
    groups: dict[tuple[int, tuple[tuple[str, int], ...]], set[str]] = {}
    unknown = []
    for name in names:
        for index, alternatives in enumerate(regexes):
            if match := next((match for regex in alternatives if (match := regex.fullmatch(name))), None):
                numbers = {letter: int(number) for letter, number in match.groupdict().items()}
                groups.setdefault((index, tuple(sorted(numbers.items()))), set()).add(name)
                break
        else:
            unknown.append(name)
    return groups, unknown


def _regex(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern).replace(r"\*", ".*")
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>0|[1-9][0-9]*)", escaped))


def _file_of(files: Sequence[Mapping[str, LazyTensor]]) -> str:
    """Return the file of the first tensor and a colon, to begin a message; empty if its origin names no file."""
    origin = next((tensor.origin for file in files for tensor in file.values()), "")
    return f"{origin.rpartition(': ')[0]}: " if ": " in origin else ""


def _refuse_unknown(unknown: list[str], where: str) -> None:
    if unknown:
        raise CheckpointError(
            f"{where}unknown tensor{'s' if len(unknown) > 1 else ''} {listed(unknown)}: the checkpoint has another "
            "architecture, or has been changed."
        )


def _refuse_missing(missing: list[str], group: set[str], where: str) -> None:
    if missing:
        raise CheckpointError(f"{where}{listed(missing)} missing, beside {', '.join(sorted(group))}.")
