"""Files of torch.save made to run code, to hang, to take all memory, or to be other weights than they seem."""

import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.guarded import MEGABYTES
from support.hostile_files import PICKLES, archive, dictionary, legacy, stored, tensor, whole
from support.spoilt_folders import edit, refused
from support.tables import in_turn

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.modeling.checkpoints.checkpoint_files import read_header
from llamoe.modeling.checkpoints.torch_files import read_torch

pytestmark = pytest.mark.slow

# Pickles


def spoil(folder, content, **options):
    """Put an archive of this content into a folder in the place of its weights."""
    return archive(folder / "pytorch_model.bin", content, options.pop("records", {"0": bytes(4)}), **options)


@pytest.mark.parametrize("pickled", PICKLES)
def test_hostile_pickle(pickled, model_copy, guard):
    path = model_copy("bin")
    spoil(path, dictionary({"model.norm.weight": PICKLES[pickled]}))
    assert "pytorch_model.bin" in guard.refused("load", "pytorch_model.bin: ", folder=path)
    assert not (Path.cwd() / "was-run").exists()
    legacy(path / "pytorch_model.bin", dictionary({"model.norm.weight": PICKLES[pickled]}), ["0"], b"")
    guard.refused("load", "pytorch_model.bin: ", folder=path)


# What is refused here because it takes memory or time there: else these tests would show nothing.
HEAVY = ["bytearray", "float_tensor", "encoded_over_and_over", "copied_dictionaries", "copied_sizes"]


@pytest.mark.parametrize("pickled", HEAVY)
def test_hostile_pickle_is_one(pickled, tmp_path, guard):
    path = archive(tmp_path / "x.bin", dictionary({"x": PICKLES[pickled]}), {"0": bytes(4)})
    outcome = guard.run("torch_load", path=path)
    assert {"MemoryError", "OutOfTime", "RuntimeError"} & {*outcome.kinds}, outcome
    if "RuntimeError" in outcome.kinds:
        assert "memory" in outcome.message, outcome


@pytest.mark.parametrize(
    "name", ["archive/data.pkl", "archive/data/0", "archive/version", "archive/byteorder"]
)
def test_compressed_record(name, model_copy):
    path = model_copy("bin")
    spoil(path, dictionary({"x": tensor([1])}), compressed=[name.partition("/")[2]])
    refused(path, f"pytorch_model.bin: record {name} is compressed")


def test_pickle_that_unpacks_into_gigabytes(model_copy, guard, tmp_path):
    """A zip bomb: torch unpacks the record before it looks."""
    path = model_copy("bin") / "pytorch_model.bin"
    compressor = zlib.compressobj(1, wbits=-zlib.MAX_WBITS)
    # What is flushed in full stands by itself: one block is compressed, and written many times.
    block = compressor.compress(bytes(1 << 20)) + compressor.flush(zlib.Z_FULL_FLUSH)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", (MEGABYTES + 200) * block + compressor.flush())
        record = file.getinfo("archive/data.pkl")
        record.compress_type, record.file_size = zipfile.ZIP_DEFLATED, (MEGABYTES + 200) << 20
        file.writestr("archive/version", "3\n")
    assert path.stat().st_size < 20_000_000
    guard.refused("load", "is compressed", folder=path.parent)


def test_pickle_of_a_hundred_megabytes(model_copy, guard):
    path = model_copy("bin")
    spoil(path, 10**8 * pickle.EMPTY_LIST)
    guard.refused("load", r"data.pkl has 1000000\d\d bytes, where at most", folder=path)


def directory_of(content):
    """Where the directory of an archive begins, and its end record."""
    end = content.rindex(b"PK\5\6")
    return struct.unpack_from("<L", content, end + 16)[0], end


def overlapping(content):
    """Every record with numbers is said to be where the first is."""
    begin, _ = directory_of(content)
    changed = bytearray(content)
    entries = [at for at in range(begin, len(content)) if content[at : at + 4] == b"PK\1\2"]
    first = next(at for at in entries if b"/data/" in content[at + 46 : at + 70])
    for at in entries:
        if b"/data/" in content[at + 46 : at + 70]:
            changed[at + 42 : at + 46] = content[first + 42 : first + 46]
            changed[at + 46 : at + 60] = content[first + 46 : first + 60]
    return bytes(changed)


def with_end(change):
    def damage(content):
        begin, end = directory_of(content)
        return change(content[:begin], content[begin:end], content[end:])

    return damage


def entry_field(offset, form, value, which=b"archive/data/0"):
    """Change a number in the directory's entry of a record."""

    def damage(content):
        begin, _ = directory_of(content)
        at = content.index(which, begin) - 46
        return (
            content[: at + offset] + struct.pack(form, value) + content[at + offset + struct.calcsize(form) :]
        )

    return damage


def far(offset):
    """A record of the form for large archives, whose extra field says where it begins."""

    def damage(content):
        begin, end = directory_of(content)
        at = content.index(b"archive/data/0", begin) - 46
        entry = content[at : at + 30] + struct.pack("<H", 12) + content[at + 32 : at + 42] + b"\xff" * 4
        behind = at + 46 + len(b"archive/data/0")
        length = struct.unpack_from("<L", content, end + 12)[0] + 12
        extra = content[at + 46 : behind] + struct.pack("<HHQ", 1, 8, offset)
        end_record = content[end : end + 12] + struct.pack("<L", length) + content[end + 16 :]
        return content[:at] + entry + extra + content[behind:end] + end_record

    return damage


def shifted(content):
    """The numbers of a record are said to begin 16 bytes later, where the next record does not follow at once."""
    begin, _ = directory_of(content)
    at = struct.unpack_from("<L", content, content.index(b"archive/data/0", begin) - 4)[0]
    length = struct.unpack_from("<H", content, at + 28)[0]
    return content[: at + 28] + struct.pack("<H", length + 16) + content[at + 30 :]


def at_end(offset, value):
    """Write a number into the last 98 bytes, in the form for large archives: record, locator, end."""

    def change(head, body, end):
        fields = struct.unpack("<HHHHLLH", end[4:22])
        record = struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, *fields[2:4], *fields[4:6])
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(head) + len(body), 1)
        large = bytearray(record + locator + end)
        large[offset : offset + 4] = struct.pack("<L", value)
        return head + body + bytes(large)

    return with_end(change)


ARCHIVES = {
    "longer_record": entry_field(24, "<L", 10**9),
    "longer_record_both": lambda content: entry_field(20, "<L", 10**9)(entry_field(24, "<L", 10**9)(content)),
    "encrypted": entry_field(8, "<H", 1),
    "strongly_encrypted": entry_field(8, "<H", 1 << 6),
    "shifted": shifted,
    "on_another_disk": entry_field(34, "<H", 3),
    "directory_on_another_disk": at_end(16, 1),
    "end_on_another_disk": at_end(60, 2),
    "many_disks": at_end(72, 2),
    "far_away": entry_field(42, "<L", 2**31),
    "beyond_all_files": far(2**63),
    "beyond_all_numbers": far(2**64 - 2),
    "elsewhere": entry_field(42, "<L", 0),
    "overlapping": overlapping,
    "something_behind": lambda content: content + b"x",
    "something_before": lambda content: b"PK\3\4" + content,
    "comment": with_end(lambda head, body, end: head + body + end[:-2] + b"\1\0x"),
    "two_ends": with_end(lambda head, body, end: head + body + end + end),
    "fewer_entries": with_end(lambda head, body, end: head + body + end[:8] + b"\1\0\1\0" + end[12:]),
    "directory_of_gigabytes": with_end(
        lambda head, body, end: head + body + end[:12] + b"\xff\xff\xff\x7f" + end[16:]
    ),
    "without_end": with_end(lambda head, body, end: head + body),
    "far_directory": with_end(
        lambda head, body, end: head + body + b"PK\6\7" + bytes(4) + struct.pack("<QL", 0, 1) + end
    ),
}


@pytest.mark.parametrize("damage", ARCHIVES)
def test_damaged_archive(damage, model_copy, guard):
    path = model_copy("bin")
    file = spoil(
        path,
        dictionary({"x": tensor([1]), "y": tensor([1], key="1")}),
        records={"0": bytes(4), "1": bytes(4)},
    )
    assert read_torch(file).keys() == {"x", "y"}
    file.write_bytes(ARCHIVES[damage](file.read_bytes()))
    guard.refused("load", "pytorch_model.bin: ", folder=path)


def test_records_whose_names_differ_in_case(model_copy):
    """torch looks a record up without regard to case, and takes either."""
    path = model_copy("bin")
    spoil(path, dictionary({"x": tensor([1])}), others={"DATA.PKL": whole(dictionary({}))})
    refused(path, "DATA.PKL is twice there")


@pytest.mark.parametrize("alignment", [b"0", b"-1", b"x", b"", b"9" * 5000])
def test_alignment_that_torch_divides_by(alignment, model_copy, guard):
    """torch ends the process; it asks for it where config.json names no dtype."""
    path = model_copy("bin")
    edit(path / "config.json", dtype=None)
    spoil(
        path,
        dictionary({"x": tensor([1])}),
        others={".storage_alignment": alignment, ".format_version": b"1"},
    )
    guard.refused("load", "alignment", folder=path)


LEGACY = {
    "huge_storage": (dictionary({"x": tensor([2**40, 2**20])}), ["0"], b"", "not where it should be"),
    "cut_short": (dictionary({"x": tensor([4])}), ["0"], stored(4, bytes(8)), "needs .* has"),
    "too_long": (dictionary({"x": tensor([1])}), ["0"], stored(1, bytes(9)), "needs .* has"),
    "other_key": (dictionary({"x": tensor([1])}), ["1"], b"", "in which order"),
    "key_twice": (
        dictionary({"x": tensor([1])}),
        ["0", "0"],
        2 * stored(1, bytes(4)),
        "not where it should be",
    ),
    "two_sizes": (
        dictionary({"x": tensor([1]), "y": tensor([2])}),
        ["0"],
        stored(1, bytes(4)),
        "part of a storage",
    ),
    "no_keys": (dictionary({}), 5, b"", "in which order"),
}


@pytest.mark.parametrize("damage", LEGACY)
def test_hostile_legacy_file(damage, model_copy, guard):
    content, keys, storages, says = LEGACY[damage]
    path = model_copy("bin")
    legacy(path / "pytorch_model.bin", content, keys, storages)
    guard.refused("load", says, folder=path)


def test_legacy_file_is_read_where_it_should_be(tmp_path):
    file = legacy(
        tmp_path / "x.bin",
        dictionary({"x": tensor([2]), "y": tensor([1], key="1", begin=1, numel=2)}),
        ["1", "0"],
        stored(2, struct.pack("<2f", 5, 6)) + stored(2, struct.pack("<2f", 7, 8)),
    )
    expected = torch.load(file, weights_only=True)
    assert expected["x"].tolist() == [7, 8] and expected["y"].tolist() == [6]
    found = read_torch(file)
    content = file.read_bytes()
    assert struct.unpack_from("<2f", content, found["x"].begin) == (7, 8)
    assert struct.unpack_from("<f", content, found["y"].begin) == (6,)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "kind"), in_turn(DTYPES, ["bin", "legacy", "sharded_bin", "safetensors"]), ids=str
)
def test_dtype_that_no_weight_has(kind, dtype, model_copy, monkeypatch):
    """torch copies whole numbers into a model's weights without a word."""
    monkeypatch.setattr(
        "transformers.PreTrainedModel._load_pretrained_model",
        lambda *_, **__: pytest.fail("weights were read"),
    )
    path = model_copy({"safetensors": "single", "legacy": "bin"}.get(kind, kind))
    name = "model.layers.1.mlp.up_proj.weight"
    for file in [*path.glob("*.bin"), *path.glob("*.safetensors")]:
        weights = load_file(file) if kind == "safetensors" else torch.load(file)
        if name in weights:
            weights[name] = (weights[name] * 50).to(dtype)
            if kind == "safetensors":
                save_file(weights, file)
            else:
                torch.save(weights, file, _use_new_zipfile_serialization=kind != "legacy")
            break
    assert str(file) in refused(
        path, f"{name} has dtype {read_header(file)[name].dtype}, which is not a dtype of plain weights"
    )


@pytest.mark.parametrize("kind", ["bin", "sharded_bin"])
def test_mistyped_number_of_heads(kind, model_copy, guard):
    """Stock makes and fills all of the model before it says that one tensor has another shape."""
    path = model_copy(kind)
    edit(path / "config.json", num_attention_heads=60_000, num_key_value_heads=60_000, head_dim=512)
    guard.refused("load", r"has shape \[.*\], but the model that config.json describes has", folder=path)


def test_view_that_is_expanded_when_it_is_copied(model_copy, guard):
    """A storage of four bytes that says it is a matrix of a terabyte."""
    path = model_copy("bin")
    weights = torch.load(path / "pytorch_model.bin")
    weights["lm_head.weight"] = torch.ones(1).expand(2**20, 2**20)
    torch.save(weights, path / "pytorch_model.bin")
    assert (path / "pytorch_model.bin").stat().st_size < 10**6
    guard.refused("load", r"lm_head.weight has shape \[1048576, 1048576\]", folder=path)


def test_weights_under_another_key(model_copy):
    path = model_copy("bin")
    torch.save({"state_dict": torch.load(path / "pytorch_model.bin")}, path / "pytorch_model.bin")
    refused(path, "no tensor at its top.* but state_dict")


def test_objects_that_torch_was_told_of(model_copy):
    """`torch.serialization.add_safe_globals` is torch's own way to allow what a file of yours holds."""
    path = model_copy("bin")
    weights = torch.load(path / "pytorch_model.bin")
    torch.save({**weights, "made": Note(3)}, path / "pytorch_model.bin")
    refused(path, "may want to run code .*Note")
    with torch.serialization.safe_globals([Note]):
        llamoe.LlamoeDenseForCausalLM.from_pretrained(path)


class Note:
    """Something that is saved beside weights."""

    def __init__(self, number):
        self.number = number


SAVED = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "part": torch.arange(12.0).view(3, 4)[1:, 2:],
    "half": torch.arange(3).half(),
    "parameter": torch.nn.Parameter(torch.arange(3.0)),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "conjugate": torch.arange(3.0).to(torch.complex64).conj(),
    "expanded": torch.ones(1).expand(2, 3),
    "unsigned": torch.arange(3).to(torch.uint16),
    "float8": torch.arange(3.0).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", SAVED)
def test_header_is_what_torch_reads(name, old, tmp_path):
    """Shape, dtype and numbers where the header says, for all that torch itself saves."""
    if old and name in ("unsigned", "float8"):
        pytest.skip("torch does not read its own files of these dtypes in the format before 1.6")
    value = SAVED[name]
    shared = {"x": value, "again": value, "notes": {"epoch": 3, "rate": 0.5, "names": ("a", None, True)}}
    torch.save(shared, tmp_path / "x.bin", _use_new_zipfile_serialization=not old)
    if name == "conjugate":  # its numbers are not those that stand in the file
        with pytest.raises(CheckpointError, match="conjugated"):
            read_torch(tmp_path / "x.bin")
        return
    content = read_torch(tmp_path / "x.bin")
    assert content["notes"] == shared["notes"]
    expected = torch.load(tmp_path / "x.bin", weights_only=True)["x"].detach()
    for header in (content["x"], content["again"]):
        assert header.shape == tuple(expected.shape)
        assert (header.strides or expected.contiguous().stride()) == expected.stride() or not expected.numel()
        raw = (tmp_path / "x.bin").read_bytes()[header.begin :]
        size = expected.element_size()
        places = torch.arange(expected.untyped_storage().nbytes() // size).as_strided(
            expected.shape, expected.stride()
        )
        found = b"".join(raw[place * size :][:size] for place in places.flatten().tolist())
        assert found == expected.contiguous().flatten().view(torch.uint8).numpy().tobytes()
