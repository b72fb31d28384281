"""Damaged files give an error that names them or no difference at all; nothing half-made, the source untouched.

What is drawn at random is in `tests/fuzz`, for these folders and more; here is what a draw would seldom hit.
"""

import hashlib
import io
import json
import os
import pickle
import random
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fuzz.damage import places, structure
from fuzz.originals import originals as make_originals
from safetensors.torch import load_file
from support.conversions import looks_finished, sums
from support.counting import calls_of

from llamoe.conversion import convert

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def originals():
    """Those that damage is drawn for."""
    return make_originals()


def converted(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def check(original, changes: dict[str, bytes | None], may_pass=True, says=(), must_pass=False, **options):
    """Convert with some files changed (None: missing), and check all that is promised.

    Args:
        may_pass, must_pass: whether the damage may, or must not, be an error; the tensors are the same if it is none.
        says: words that an error must hold, besides the name of a file or the source's folder.
    """
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place) / "source", Path(place) / "target"
        source.mkdir()
        for name, content in (original.files | changes).items():
            if content is not None:
                (source / name).write_bytes(content)
        before = sums(source)
        try:
            convert(source, target, **options)
        except (ValueError, OSError) as error:
            if must_pass:
                raise
            message = str(error)
            assert str(source) in message, message
            assert all(word in message for word in says), message
            assert not looks_finished(target), message
            assert not target.exists(), (message, list(target.iterdir()))
        else:
            assert may_pass, "the damage went unseen"
            tensors = converted(target)
            assert tensors.keys() == original.tensors.keys()
            assert [name for name in tensors if not torch.equal(tensors[name], original.tensors[name])] == []
        assert sums(source) == before


@pytest.mark.parametrize("kind", ["shards", "one", "split", "bin", "meta", "meta4"])
def test_missing_and_empty_files(originals, kind):
    original = originals[kind]
    needed = {"config.json", "params.json", "model.safetensors.index.json", *original.weight_files}
    for name in needed & set(original.files):
        check(original, {name: b""}, may_pass=False, says=[name])
        check(original, {name: None}, may_pass=False)


def test_a_file_in_excess_of_metas_is_not_taken_for_a_part(originals):
    original = originals["meta"]
    check(original, {"consolidated.02.pth": original.files["consolidated.01.pth"]}, may_pass=False)
    check(
        original,
        {"consolidated.00.pth": None, "consolidated.02.pth": original.files["consolidated.00.pth"]},
        False,
    )


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        ("one", "first", float("nan")),
        ("one", "last", -float("inf")),
        ("meta4", "first", float("inf")),
        ("meta4", "last", float("nan")),
    ],
)
def test_numbers_that_are_none_are_found_wherever_they_are(originals, kind, place, value):
    """Frequencies and statistics of Meta's files are not weights: what they hold does not matter."""
    original = originals[kind]
    [name] = original.weight_files
    content = bytearray(original.files[name])
    if kind == "one":
        begin, end = 8 + int.from_bytes(content[:8], "little"), len(content)
    else:
        begin, end = next(ranges for ranges in numbers(content))
    position = begin if place == "first" else end - 4
    content[position : position + 4] = torch.tensor([value]).numpy().tobytes()
    check(original, {name: bytes(content)}, may_pass=False, says=[name, "weight"])


def numbers(content: bytes) -> Iterator[tuple[int, int]]:
    """Where the tensors of one of torch's archives are."""
    ranges = structure(bytes(content))
    return ((before[1], after[0]) for before, after in pairwise(ranges))


def rewritten(content: bytes, change) -> bytes:
    """A zip archive written anew; `change` gives the records of each name and content, with how to compress them."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(result, "w") as new:
        for info in old.infolist():
            for name, record, method in change(info.filename, old.read(info)):
                new.writestr(name, record, method)
    return result.getvalue()


RECORDS = {
    "twice": lambda name, record: [(name, record, 0), (name, record[::-1], 0)],
    "twice, the same": lambda name, record: [(name, record, 0)] * 2,
    "missing": lambda name, record: [],
    "empty": lambda name, record: [(name, b"", 0)],
    "compressed": lambda name, record: [(name, record, zipfile.ZIP_DEFLATED)],
    "too short": lambda name, record: [(name, record[:-4], 0)],
    "too long": lambda name, record: [(name, record + bytes(4), 0)],
    "called something else": lambda name, record: [(f"{name}x", record, 0)],
    "upwards": lambda name, record: [(f"../{name}", record, 0)],
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("which", ["data.pkl", "data/3"])
@pytest.mark.parametrize("how", RECORDS)
def test_records_of_an_archive_that_are_not_as_torch_writes_them(originals, which, how):
    original = originals["bin"]

    def change(name, record):
        return RECORDS[how](name, record) if name.endswith(f"/{which}") else [(name, record, 0)]

    content = rewritten(original.files["pytorch_model.bin"], change)
    # A pickle that is longer ends where it ended, and is the same.
    may_pass = which == "data.pkl" and how in ("too long", "compressed")
    check(original, {"pytorch_model.bin": content}, may_pass=may_pass, says=["pytorch_model.bin"])


class RunsCode:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class Evaluates(RunsCode):
    def __reduce__(self):
        return eval, (f"__import__('os').system({self.command!r})",)


@pytest.mark.parametrize(
    ("kind", "attack"), [("bin", RunsCode), ("legacy", Evaluates), ("legacy", RunsCode), ("meta", Evaluates)]
)
def test_pickles_that_want_to_run_code_are_refused_before_they_can(originals, kind, attack, tmp_path):
    original, mark = originals[kind], tmp_path / "mark"
    name = original.weight_files[0]
    code = attack(f"touch {mark}")
    state = {"model.norm.weight": torch.ones(24), "more": code}
    for content in (state, code, [code], {"state_dict": code}):
        buffer = io.BytesIO()
        torch.save(content, buffer, _use_new_zipfile_serialization=kind != "legacy")
        check(original, {name: buffer.getvalue()}, may_pass=False, says=[name, "run code"])
    check(original, {name: pickle.dumps(code)}, may_pass=False, says=[name])
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["bin", "legacy"])
def test_pickles_of_something_else_are_refused(originals, kind):
    original = originals[kind]
    state = dict(originals["one"].tensors)
    key = "model.norm.weight"
    for content in (
        [],
        torch.ones(3),
        7,
        {},
        {"state_dict": {}},
        {3: torch.ones(24)},
        {**state, key: state[key].to_sparse()},
        {**state, key: state[key].to(torch.complex64)},
        {**state, key: state[key].int()},
        {**state, key: 3.5},
        {**state, key: state[key][None]},
        {**state, "more": torch.ones(2)},
        {**state, key: torch.ones((), dtype=torch.float32)},
    ):
        buffer = io.BytesIO()
        torch.save(content, buffer, _use_new_zipfile_serialization=kind == "bin")
        check(original, {"pytorch_model.bin": buffer.getvalue()}, may_pass=False)


def test_tensors_in_any_strides_are_read_as_they_are(originals):
    original = originals["bin"]
    state = {name: value.clone() for name, value in originals["one"].tensors.items()}
    state = {name: value.T.contiguous().T if value.ndim == 2 else value for name, value in state.items()}
    for wrapped in (state, {"state_dict": state}, {"model": state, "epoch": 3}):
        buffer = io.BytesIO()
        torch.save(wrapped, buffer)
        check(original, {"pytorch_model.bin": buffer.getvalue()}, must_pass=True)


def test_files_without_checksums_are_read(originals):
    original = originals["bin"]
    buffer = io.BytesIO()
    with torch.utils.serialization.config.patch("save.compute_crc32", False):
        torch.save(dict(originals["one"].tensors), buffer)
    check(original, {"pytorch_model.bin": buffer.getvalue()}, must_pass=True)
    check(original, {"pytorch_model.bin": buffer.getvalue()}, checksums=True, must_pass=True)


@pytest.mark.parametrize("seed", range(2))
def test_checksums_find_any_change_of_a_torch_file(originals, seed):
    original, dice = originals["meta"], random.Random(seed)
    listed = b"".join(
        hashlib.md5(original.files[file]).hexdigest().encode() + f"  {file}\n".encode()
        for file in original.weight_files
    )
    name = dice.choice(original.weight_files)
    content = original.files[name]
    damaged = bytearray(content)
    # Of a tensor, whose record has a checksum, and anywhere, for which the list has one.
    begin, end = dice.choice([*numbers(content)])
    damaged[dice.randrange(begin, end)] ^= 1 << dice.randrange(8)
    check(original, {name: bytes(damaged)}, False, [name], checksums=True)
    damaged = bytearray(content)
    damaged[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    check(original, {name: bytes(damaged), "checklist.chk": listed}, False, [name], checksums=True)


def test_a_wrong_list_of_checksums_matters_only_where_it_is_asked_for(originals):
    original = originals["meta"]
    for listed in (b"0" * 32 + b"  consolidated.01.pth\n", b"0" * 32 + b" *consolidated.01.pth\n"):
        check(original, {"checklist.chk": listed}, must_pass=True)
        check(
            original,
            {"checklist.chk": listed},
            False,
            ["consolidated.01.pth", "checklist.chk"],
            checksums=True,
        )
    check(original, {"checklist.chk": bytes(range(128, 256))}, False, ["checklist.chk"], checksums=True)


@pytest.mark.parametrize(("kind", "size"), [("stock", 10**7), ("meta4", 10**30), ("stock", 10**30)])
def test_sizes_beyond_reason_end_at_once(originals, kind, size):
    original = originals[kind]
    name = "params.json" if kind.startswith("meta") else "config.json"
    for path in places(json.loads(original.files[name])):
        whole = json.loads(original.files[name])
        *above, last = path
        inner = whole
        for key in above:
            inner = inner[key]
        if isinstance(inner[last], int) and not isinstance(inner[last], bool):
            inner[last] = size
            content = json.dumps(whole).encode()
            calls, _ = calls_of(partial(check, original, {name: content}))
            assert calls < 400_000, (path, calls)
