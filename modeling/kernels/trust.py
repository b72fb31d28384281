"""Up to how many rows the kernels for few rows may be used, tried on the device before first use and remembered.

A kernel cannot be known to be right on a device on which it never ran. So the first pass without gradients tries it
(`trial`), once for each device, driver, Triton, torch, kernel source, and dtype, sizes and strides of the experts. A
kernel that fails or is wrong is not used there. A right one is timed against the path it would replace, to find up to
how many rows it is no slower. The answer is a small file in `$LLAMOE_CACHE`, else `$XDG_CACHE_HOME/llamoe`, else
`~/.cache/llamoe`. Other processes read it, and ranks that start together wait for the one that tries. Without a
writable folder every process tries for itself.

A trial takes some tens of seconds and synchronises with the device, so it cannot run in a compiled graph, a trace, or a
CUDA graph's capture: there the answer is only looked up, and without one the kernel is not used. `try_kernels` in
`moe.dispatch` runs the trial beforehand.

Shapes: E experts, H hidden size, I intermediate size, F = 2 I.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

try:
    import fcntl
except ImportError:
    # On Windows.
    fcntl = None

from .few_rows import TRITON_MAX_ROWS
from .trial import (
    Way,
    device_facts,
    find_difference,
    find_difference_apart,
    find_fastest_rows,
    first_line,
    is_lack_of_memory,
)
from .waiting import told_if_long

logger = logging.getLogger("llamoe")


class Answer(NamedTuple):
    """Result of the kernels' trial for one kind of experts on one device."""

    rows: int
    """Up to this number of rows the kernels are used."""
    failure: str = ""
    """What is wrong with them; empty if nothing is."""
    times: str = ""
    """The measured times, in words."""


# Answers of this process: by device and description, and by question.
_ANSWERS: dict[tuple[torch.device, str], Answer] = {}
_ANSWERS_TO: dict[str, Answer] = {}
_ASKED_IN_VAIN: set[tuple[torch.device, str]] = set()
_TRYING = threading.Lock()
# An answer is void once one of these files changes.
_SOURCES = ("few_rows.py", "few_rows_triton.py", "trial.py", "trust.py")
# Seconds for which a process waits while another one is trying.
_PATIENCE = 900


def rows_to_trust(
    device: torch.device,
    experts: str,
    stacks: tuple[torch.Tensor, torch.Tensor],
    ways: Callable[[], tuple[Way, Way]],
) -> int:
    """Number of rows up to which to use the kernels, 0 for never; tries them if no answer is stored.

    `experts` describes the `stacks`, `[E, H, F]` and `[E, I, H]`, as `describe` does; `ways` returns the kernels' way
    through them, and the way it would replace.
    """
    answer = _ANSWERS.get((device, experts))
    if answer is not None:
        return answer.rows
    if _is_capturing(device):
        return rows_known(device, experts)
    with _TRYING:
        answer = _recall(device, experts)
        if answer is None:
            question = _question(device, experts)
            path = _file_for(question)
            told = told_if_long(f"llamoe: trying the kernel for few rows on {question['device']}, once")
            with told, _the_only_one(path):
                answer = _read(path, question)
                if answer is None and (answer := _try(device, experts, stacks, ways)) is not None:
                    _write(path, question, answer)
            # Without memory for a trial, this process does not use the kernels.
            _keep(device, experts, question, answer or Answer(0, times="there was no memory to try it"))
    return _ANSWERS[device, experts].rows


# A compiler runs this function while it traces, and takes its result as a constant.
@torch.compiler.assume_constant_result
def rows_known(device: torch.device, experts: str) -> int:
    """Number of rows as in `rows_to_trust`, or 0 without a stored answer; nothing runs on the device."""
    key = device, experts
    answer = _ANSWERS.get(key) or _recall(*key)
    if answer is None and key not in _ASKED_IN_VAIN:
        _ASKED_IN_VAIN.add(key)
        logger.info(
            "llamoe: a graph is made before the kernel for few rows was tried on %s (%s), so it is not used in it. "
            "One pass without gradients before compiling or capturing has it tried.",
            device,
            experts,
        )
    return 0 if answer is None else answer.rows


def answers_on(device: torch.device) -> dict[str, Answer]:
    """All answers that are stored for a device with these versions, by the description of the experts.

    Nothing runs on the device. Triton must be installed.
    """
    found = {}
    path = _file_for(_question(device, ""))
    for file in sorted(path.parent.glob("few_rows-*.json")) if path is not None else ():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            question = _question(device, json.loads(file.read_text())["question"]["experts"])
            # None if it was asked of another device, or of other versions.
            if (answer := _read(file, question)) is not None:
                found[question["experts"]] = answer
    return found


def _is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _recall(device: torch.device, experts: str) -> Answer | None:
    """Look an answer up, in this process and on disk."""
    question = _question(device, experts)
    answer = _ANSWERS_TO.get(_hash(question)) or _read(_file_for(question), question)
    if answer is not None:
        _keep(device, experts, question, answer)
    return answer


def _keep(device: torch.device, experts: str, question: dict[str, str], answer: Answer) -> None:
    """Store an answer, and tell the user what it means the first time."""
    name = _hash(question)
    is_new = name not in _ANSWERS_TO
    _ANSWERS[device, experts] = _ANSWERS_TO[name] = answer
    if not is_new:
        return
    what = f"the kernel for few rows on {question['device']} (experts {experts})"
    if answer.failure:
        logger.warning(
            "llamoe does not use %s: %s. torch's grouped product takes its place, or a loop where that does not fit. "
            "The finding is kept in %s. LLAMOE_EXPERTS=llamoe_kernel uses the kernel all the same.",
            what,
            answer.failure,
            _file_for(question),
        )
    else:
        logger.info("llamoe uses %s for up to %d rows. %s", what, answer.rows, answer.times)


def _try(
    device: torch.device,
    experts: str,
    stacks: tuple[torch.Tensor, torch.Tensor],
    ways: Callable[[], tuple[Way, Way]],
) -> Answer | None:
    """Try the kernels; None if memory is too short."""
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            failure = find_difference_apart(experts, device) or find_difference(*stacks)
            if failure:
                return Answer(0, failure)
            rows, times = find_fastest_rows(*ways(), stacks[1])
            return Answer(rows, times=f"Kernel and other way, by rows: {times}")
        except Exception as error:
            return None if is_lack_of_memory(error) else Answer(0, f"trying it fails: {first_line(error)}")


def _question(device: torch.device, experts: str) -> dict[str, str]:
    """Everything that an answer depends on."""
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "source": _source()}
    return {**device_facts(device), **versions, "experts": experts}


def _source() -> str:
    """Hash the files that hold the kernels and the trial."""
    files = (Path(__file__).with_name(name) for name in _SOURCES)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _hash(content: dict | list) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_for(question: dict[str, str]) -> Path | None:
    """File of a question's answer; None for a user without a home folder."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get("LLAMOE_CACHE") or Path(base) / "llamoe").expanduser()
    except RuntimeError:
        return None
    return folder / f"few_rows-{_hash(question)}.json"


def _read(path: Path | None, question: dict[str, str]) -> Answer | None:
    """Read an answer; None if it is missing, incomplete, changed, or for another question."""
    try:
        content = json.loads(path.read_text()) if path is not None else {}
        answer = Answer(**content["answer"])
        whole = content["question"] == question and content["seal"] == _hash([question, *answer])
        return answer if whole and type(answer.rows) is int and 0 <= answer.rows <= TRITON_MAX_ROWS else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(path: Path | None, question: dict[str, str], answer: Answer) -> None:
    """Write an answer, whole or not at all; a folder that cannot be written is no error."""
    if path is None:
        return
    content = {"question": question, "answer": answer._asdict(), "seal": _hash([question, *answer])}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".few_rows-", delete=False) as file:
            try:
                json.dump(content, file, indent=1)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        logger.info("llamoe cannot keep what it found of a kernel in %s: %s", path, error)


@contextlib.contextmanager
def _the_only_one(path: Path | None) -> Iterator[None]:
    """Let one process at a time try, while the others wait. Best effort: it only saves time."""
    with contextlib.ExitStack() as stack:
        if path is not None and fcntl is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(path.with_suffix(".lock"), "w"))
                for _ in range(_PATIENCE):
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    time.sleep(1)
        yield
