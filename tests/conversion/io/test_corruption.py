"""Damaged files give an error that names them or no difference at all; nothing half-made, the source untouched.

Damage that no reader can see is left out: another finite number in the data, two equal tensors exchanged.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.conversions import META_LLAMA_2, META_MAVERICK, looks_finished, sums
from support.models import draw, stock_dense_config, stock_text_config
from transformers import Llama4ForCausalLM, LlamaForCausalLM

from llamoe.conversion import convert

SMALL = dict(hidden_size=24, intermediate_size=20, head_dim=6, num_hidden_layers=2, vocab_size=31)


def few(examples: int):
    """The same few examples every time, or as many new ones as LLAMOE_FUZZ says; nothing remembered on the disk."""
    more = int(os.environ.get("LLAMOE_FUZZ", 0))
    return settings(
        max_examples=more or examples,
        derandomize=not more,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class Original:
    """A whole source folder, as bytes, and the tensors that its conversion gives."""

    def __init__(self, files: dict[str, bytes], tensors: dict[str, torch.Tensor]):
        self.files, self.tensors = files, tensors

    def __repr__(self) -> str:
        return f"Original({list(self.files)})"

    def weight_files(self) -> list[str]:
        return [name for name in self.files if name.endswith((".safetensors", ".pth", ".bin"))]


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def converted(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A sharded folder of safetensors, one of pickles in both of torch's formats, and two of Meta's."""
    place = tmp_path_factory.mktemp("originals")
    model = draw(LlamaForCausalLM, stock_dense_config(**SMALL))
    model.save_pretrained(place / "hf", max_shard_size="12KB")
    convert(place / "hf", place / "one")
    shutil.copytree(place / "hf", place / "bin", ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.save(model.state_dict(), place / "bin" / "pytorch_model.bin")
    shutil.copytree(place / "bin", place / "legacy")
    torch.save(
        model.state_dict(), place / "legacy" / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    experts = stock_text_config(
        **SMALL, intermediate_size_mlp=28, num_local_experts=3, interleave_moe_layer_step=2
    )
    draw(Llama4ForCausalLM, experts).save_pretrained(place / "stacked")
    convert(place / "stacked", place / "split", experts="split")
    small = {"dim": 24, "n_layers": 2, "multiple_of": 4}
    meta = replace(META_LLAMA_2, params=META_LLAMA_2.params | small)
    meta.write(place / "meta", meta.weights(), 2)
    mixture = {"num_experts": 3, "top_k": 1, "interleave_moe_layer_step": 2}
    params = META_MAVERICK.params | {**small, "head_dim": 4, "n_kv_heads": 2, "moe_args": mixture}
    meta4 = replace(META_MAVERICK, params=params, vocabulary=2304 + 1)
    meta4.write(place / "meta4", meta4.weights(), 1)
    result = {}
    for folder in list(place.iterdir()):
        convert(folder, place / "converted" / folder.name)
        result[folder.name] = Original(read_folder(folder), converted(place / "converted" / folder.name))
        assert result[folder.name].tensors
    return result


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


def structure(name: str, content: bytes) -> list[tuple[int, int]]:
    """The parts of a file that are no numbers of tensors, as ranges of bytes."""
    if name.endswith(".safetensors"):
        return [(0, 8 + int.from_bytes(content[:8], "little"))]
    if not content.startswith(b"PK"):
        return [(0, len(content))]
    ranges, position = [], 0
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            lengths = content[info.header_offset + 26 : info.header_offset + 30]
            begin = info.header_offset + 30 + int.from_bytes(lengths[:2], "little")
            begin += int.from_bytes(lengths[2:], "little")
            if "/data/" in info.filename:
                ranges.append((position, begin))
                position = begin + info.file_size
    return [*ranges, (position, len(content))]


def altered(data, content: bytes, ranges: list[tuple[int, int]]) -> bytes:
    """Some bytes inside of ranges exchanged, put in or taken away; each range as likely as another one."""
    changed = bytearray(content)
    # One way at a time: what is put in here and taken away there would move numbers, and no reader could tell.
    way = data.draw(st.sampled_from(["flip", "flip", "set", "zeros", "insert", "remove"]))
    for _ in range(data.draw(st.integers(1, 3))):
        begin, end = data.draw(
            st.sampled_from([span for span in ranges if span[0] < span[1] <= len(changed)])
        )
        position = data.draw(st.integers(begin, end - 1))
        match way:
            case "flip":
                changed[position] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                changed[position] = data.draw(st.integers(0, 255))
            case "zeros":
                stop = min(position + 4, end)
                changed[position:stop] = bytes(stop - position)
            case "insert":
                changed[position:position] = data.draw(st.binary(min_size=1, max_size=9))
            case "remove":
                del changed[position : min(position + data.draw(st.integers(1, 9)), end)]
                break
    return bytes(changed)


@given(data=st.data())
@few(30)
@pytest.mark.parametrize("kind", ["hf", "bin", "meta", "meta4"])
def test_altered_bytes_of_headers_directories_and_pickles(originals, kind, data):
    original = originals[kind]
    name = data.draw(st.sampled_from(original.weight_files()))
    content = original.files[name]
    check(original, {name: altered(data, content, structure(name, content))})


ODD_VALUES = [None, -1, 0, 1, 3, 10**7, 10**30, 0.5, -2.5, float("nan"), "", "x", [], [7], {}, {"a": 1}, True]


def places(value, path=()):
    """The path of every value inside a JSON object, itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed_json(data, content: bytes) -> bytes:
    """One value exchanged, taken away or under another name."""
    whole = json.loads(content)
    *path, last = data.draw(st.sampled_from(sorted(places(whole), key=str)))
    inner = whole
    for key in path:
        inner = inner[key]
    match data.draw(st.sampled_from(["exchange", "exchange", "remove", "rename"])):
        case "exchange":
            inner[last] = data.draw(st.sampled_from(ODD_VALUES))
        case "remove":
            del inner[last]
        case "rename" if isinstance(inner, dict):
            inner[f"{last}x"] = inner.pop(last)
    return json.dumps(whole).encode()


@given(data=st.data())
@few(20)
@pytest.mark.parametrize("kind", ["hf", "split", "meta", "meta4"])
def test_altered_json_files(originals, kind, data):
    original = originals[kind]
    name = data.draw(st.sampled_from([name for name in original.files if name.endswith(".json")]))
    content = original.files[name]
    alter = data.draw(
        st.sampled_from([changed_json, lambda data, content: altered(data, content, [(0, len(content))])])
    )
    check(original, {name: alter(data, content)})


@given(data=st.data())
@few(15)
@pytest.mark.parametrize("kind", ["meta", "meta4"])
def test_altered_tokenizers(originals, kind, data):
    original = originals[kind]
    content = original.files["tokenizer.model"]
    check(original, {"tokenizer.model": altered(data, content, [(0, len(content))])})


@given(data=st.data())
@few(30)
def test_altered_headers_of_safetensors(originals, data):
    original = originals["one"]
    content = original.files["model.safetensors"]
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    entry, others = header[name], [key for key in header if key not in ("__metadata__", name)]
    match data.draw(st.sampled_from(["dtype", "shape", "offsets", "axes", "name", "missing"])):
        case "dtype":  # of the same width, too: what is left are numbers that are no weights
            entry["dtype"] = data.draw(
                st.sampled_from(["I32", "U32", "F64", "F16", "I8", "F8_E4M3", "C64", "f32", 7])
            )
        case "shape":
            axis = data.draw(st.integers(0, len(entry["shape"]) - 1))
            entry["shape"][axis] = data.draw(
                st.sampled_from([0, -1, 1, 10**25, entry["shape"][axis] + 1, 2.0, "3"])
            )
        case "axes":
            entry["shape"] = data.draw(st.sampled_from([[*entry["shape"], 1], [1, *entry["shape"]], []]))
        case "offsets":
            side = data.draw(st.integers(0, 1))
            entry["data_offsets"][side] += data.draw(st.sampled_from([-1, 1, 4, -4, 10**25, -(10**25)]))
        case "name":
            new = data.draw(
                st.sampled_from([f"{name}x", name[1:], "", "\u0000", "model.layers.9.mlp.up_proj.weight"])
            )
            header[new] = header.pop(name)
        case "missing":
            del header[data.draw(st.sampled_from(others))]
    text = json.dumps(header).encode()
    check(
        original,
        {"model.safetensors": len(text).to_bytes(8, "little") + text + content[8 + length :]},
        may_pass=False,
        says=["model.safetensors"],
    )


@given(data=st.data())
@few(20)
@pytest.mark.parametrize("kind", ["one", "bin", "legacy", "meta"])
def test_files_cut_short_anywhere(originals, kind, data):
    original = originals[kind]
    name = data.draw(st.sampled_from(original.weight_files()))
    length = data.draw(st.integers(0, len(original.files[name]) - 1))
    check(original, {name: original.files[name][:length]}, may_pass=False, says=[name])


@pytest.mark.parametrize("kind", ["hf", "one", "split", "bin", "meta", "meta4"])
def test_missing_and_empty_files(originals, kind):
    original = originals[kind]
    needed = {"config.json", "params.json", "model.safetensors.index.json", *original.weight_files()}
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


def number_ranges(name: str, content: bytes) -> list[tuple[int, int]]:
    """Where the numbers of tensors are: what `structure` leaves."""
    ranges = structure(name, content)
    return [
        (a[1], b[0]) for a, b in zip(ranges, [*ranges[1:], (len(content), 0)], strict=True) if a[1] < b[0]
    ]


@given(data=st.data())
@few(15)
@pytest.mark.parametrize("kind", ["one", "meta4"])
def test_numbers_that_are_none_are_found_wherever_they_are(originals, kind, data):
    original = originals[kind]
    name = data.draw(st.sampled_from(original.weight_files()))
    content = bytearray(original.files[name])
    begin, end = data.draw(st.sampled_from(number_ranges(name, original.files[name])))
    position = begin + data.draw(st.integers(0, (end - begin) // 4 - 1)) * 4
    value = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    content[position : position + 4] = torch.tensor([value]).numpy().tobytes()
    # Frequencies and statistics are no weights: what they hold does not matter.
    check(
        original,
        {name: bytes(content)},
        may_pass=kind == "meta4",
        says=[name, "weight" if kind == "one" else ""],
    )


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


@pytest.mark.parametrize("kind", ["bin", "legacy", "meta"])
@pytest.mark.parametrize("attack", [RunsCode, Evaluates])
def test_pickles_that_want_to_run_code_are_refused_before_they_can(originals, kind, attack, tmp_path):
    original, mark = originals[kind], tmp_path / "mark"
    name = original.weight_files()[0]
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


@given(data=st.data())
@few(15)
def test_checksums_find_any_change_of_a_torch_file(originals, data):
    original = originals["meta"]
    name = data.draw(st.sampled_from(original.weight_files()))
    content = original.files[name]
    listed = b"".join(
        hashlib.md5(original.files[file]).hexdigest().encode() + f"  {file}\n".encode()
        for file in original.weight_files()
    )
    ranges = [*structure(name, content), *number_ranges(name, content)]
    damaged = altered(data, content, ranges)
    with_list = data.draw(st.booleans())
    changes = {name: damaged} | ({"checklist.chk": listed} if with_list else {})
    check(original, changes, may_pass=damaged == content or not with_list, says=[name], checksums=True)


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


@pytest.mark.parametrize("kind", ["hf", "stacked", "meta", "meta4"])
def test_sizes_beyond_reason_end_at_once(originals, kind):
    original = originals[kind]
    name = "params.json" if kind.startswith("meta") else "config.json"
    for path in places(json.loads(original.files[name])):
        for size in (10**7, 10**30):
            whole = json.loads(original.files[name])
            *above, last = path
            inner = whole
            for key in above:
                inner = inner[key]
            if isinstance(inner[last], int) and not isinstance(inner[last], bool):
                inner[last] = size
                begun = time.process_time()
                check(original, {name: json.dumps(whole).encode()})
                assert time.process_time() - begun < 2, path
