"""Ways to damage files: bits, lengths, headers, archives, indexes, configurations; each is drawn at random."""

import io
import json
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from .originals import Original

Files = dict[str, bytes | None]


@dataclass
class Damage:
    """One damage.

    Attributes:
        how: description in words.
        changes: file name to its new content; None for a missing file.
        numbers: tensors of the changed bytes, where elements were changed: a reader without checksums cannot notice,
            but must return exactly these, bit for bit.
        tensors_changed: number of tensors whose elements may differ, where `numbers` does not name them.
        is_config: whether the changed file describes the model, so that another model may result.
    """

    how: str
    changes: Files
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors_changed: int = 0
    is_config: bool = False


def header_length(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def header_of(content: bytes) -> dict[str, Any]:
    return json.loads(content[8 : header_length(content)])


def with_header(content: bytes, header: dict[str, Any] | bytes) -> bytes:
    """A safetensors file with another header before its data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[header_length(content) :]


def with_numbers(original: Original, name: str, content: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a file with changed bytes, at the offsets of the undamaged file."""
    result = {}
    for key, tensor in original.tensors.items():
        raw = tensor.contiguous().numpy().tobytes()
        begin = original.files[name].find(raw)
        if begin >= 0 and content[begin : begin + len(raw)] != raw:
            result[key] = torch.frombuffer(bytearray(content[begin : begin + len(raw)]), dtype=tensor.dtype)
            result[key] = result[key].view(tensor.shape)
    return result


def stacks_of_changed_experts(original: Original, name: str, content: bytes) -> set[str]:
    """The stacks that change with a file that holds their experts one by one."""
    before, begin = original.files[name], header_length(original.files[name])
    stacks = set()
    for key, entry in header_of(before).items():
        if "data_offsets" in entry and key not in original.tensors:
            first, end = (begin + offset for offset in entry["data_offsets"])
            if content[first:end] != before[first:end]:
                layer, _, part = key.partition(".experts.")
                stacks.add(f"{layer} {'down' if 'down_proj' in part else 'gate_up'}")
    return stacks


def flip(rng: random.Random, original: Original) -> Damage:
    name = rng.choice(original.weight_files)
    content = bytearray(original.files[name])
    count = rng.choice([1, 1, 1, 2, 5, 40])
    # Mostly the header, which is a small part of the file.
    if rng.random() < 0.6 and name.endswith(".safetensors"):
        limit = header_length(original.files[name])
    elif rng.random() < 0.5:
        limit = min(len(content), 4096)
    else:
        limit = len(content)
    positions = sorted({rng.randrange(limit) for _ in range(count)})
    for position in positions:
        content[position] ^= 1 << rng.randrange(8)
    how = f"{len(positions)} bits of {name} from {positions[0]}"
    # Without checksums, the content is what torch itself reads.
    if original.name == "legacy":
        with suppress(Exception):
            return Damage(how, {name: bytes(content)}, torch.load(io.BytesIO(content), weights_only=True))
    stacks = len(stacks_of_changed_experts(original, name, bytes(content))) if original.name == "split" else 0
    return Damage(how, {name: bytes(content)}, with_numbers(original, name, bytes(content)), stacks)


def structure(content: bytes) -> list[tuple[int, int]]:
    """The parts of one of torch's archives that are not numbers of tensors, as ranges of bytes."""
    ranges, position = [], 0
    with zipfile.ZipFile(io.BytesIO(content)) as whole:
        for info in sorted(whole.infolist(), key=lambda info: info.header_offset):
            name, more = struct.unpack_from("<HH", content, info.header_offset + 26)
            begin = info.header_offset + 30 + name + more
            if "/data/" in info.filename:
                ranges.append((position, begin))
                position = begin + info.file_size
    return [*ranges, (position, len(content))]


def flip_structure(rng: random.Random, original: Original) -> Damage:
    """Bits of an archive's pickle and directories; each range is as likely as another one."""
    name = rng.choice(original.weight_files)
    content = bytearray(original.files[name])
    ranges = structure(original.files[name])
    positions = [rng.randrange(*rng.choice(ranges)) for _ in range(rng.choice([1, 1, 2, 3]))]
    for position in positions:
        content[position] ^= 1 << rng.randrange(8)
    return Damage(f"{len(positions)} bits of {name} from {positions[0]}", {name: bytes(content)})


def cut(rng: random.Random, original: Original) -> Damage:
    name = rng.choice([*original.weight_files, *original.json_files])
    length = rng.choice([0, 1, 7, 8, 9, rng.randrange(len(original.files[name]))])
    length = min(length, len(original.files[name]) - 1)
    return Damage(
        f"{name} cut to {length}", {name: original.files[name][:length]}, is_config=name.endswith(".json")
    )


def extend(rng: random.Random, original: Original) -> Damage:
    name = rng.choice(original.weight_files)
    more = rng.randbytes(rng.choice([1, 4, 8, 100, 4096]))
    if rng.random() < 0.3:
        more = bytes(len(more))
    content = more + original.files[name] if rng.random() < 0.2 else original.files[name] + more
    return Damage(f"{name} and {len(more)} bytes more", {name: content})


def lose(rng: random.Random, original: Original) -> Damage:
    name = rng.choice(list(original.files))
    return Damage(f"{name} is missing", {name: None}, is_config=name.endswith(".json"))


def swap_files(rng: random.Random, original: Original) -> Damage:
    if len(original.weight_files) < 2:
        return cut(rng, original)
    one, other = rng.sample(original.weight_files, 2)
    contents = {one: original.files[other], other: original.files[one]}
    if rng.random() < 0.3:
        contents.pop(other)
    return Damage(f"{one} holds what {other} held", contents)


def swap_headers(rng: random.Random, original: Original) -> Damage:
    names = [name for name in original.weight_files if name.endswith(".safetensors")]
    if len(names) < 2:
        return header(rng, original) if names else flip(rng, original)
    one, other = rng.sample(names, 2)
    a, b = original.files[one], original.files[other]
    if a[: header_length(a)] == b[: header_length(b)]:
        return flip(rng, original)
    return Damage(f"{one} has the header of {other}", {one: b[: header_length(b)] + a[header_length(a) :]})


def header(rng: random.Random, original: Original) -> Damage:
    """One change of a safetensors header."""
    names = [name for name in original.weight_files if name.endswith(".safetensors")]
    if not names:
        return archive(rng, original)
    name = rng.choice(names)
    content = original.files[name]
    entries = header_of(content)
    keys = [key for key in entries if key != "__metadata__"]
    key = rng.choice(keys)
    entry = entries[key]
    way = rng.choice(
        ["dtype", "shape", "offsets", "rename", "remove", "twice", "odd", "nested", "metadata", "transposed"]
    )
    raw: bytes | None = None
    match way:
        case "dtype":
            entry["dtype"] = rng.choice(
                ["I32", "U32", "F16", "BF16", "F64", "I8", "BOOL", "F8_E4M3", "C64", "f32", "", 7, None]
            )
        case "shape":
            axis = rng.randrange(len(entry["shape"]))
            entry["shape"][axis] = rng.choice([0, -1, 1, 2**31, 2**62, 10**25, 2.0, "3", None, True])
        case "transposed":
            if len(set(entry["shape"])) < 2:
                entry["shape"] = [1, *entry["shape"]]
            else:
                entry["shape"] = entry["shape"][::-1]
        case "offsets":
            entry["data_offsets"][rng.randrange(2)] += rng.choice([-4, 4, 1, -1, 10**25, -(10**25)])
        case "rename":
            fresh = rng.choice(
                [
                    key + "x",
                    key[:-1],
                    "x",
                    "",
                    key.replace("0", "1"),
                    key.replace("layers.", "layers.9"),
                    key.upper(),
                ]
            )
            entries = {fresh if old == key else old: value for old, value in entries.items()}
        case "remove":
            del entries[key]
        case "twice":
            text = json.dumps(entries)
            other = rng.choice(keys)
            raw = (text[:-1] + ", " + json.dumps(other) + ": " + json.dumps(entries[key]) + "}").encode()
        case "odd":
            entries[key] = rng.choice([None, 3, [], {}, "x", {"dtype": "F32"}, [entry]])
        case "nested":
            raw = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
        case "metadata":
            entries["__metadata__"] = rng.choice(
                [None, 3, {"a": 1}, {"format": "tf"}, {"format": "pt", "x": "y" * 10**5}, []]
            )
    return Damage(f"header of {name}: {way} of {key}", {name: with_header(content, raw or entries)})


def pickle(rng: random.Random, original: Original) -> Damage:
    """One change of an archive that leaves the records of numbers as they are."""
    return archive(rng, original, only_pickle=True)


def archive(rng: random.Random, original: Original, only_pickle: bool = False) -> Damage:
    """One change of a record of torch's zip archive, or of its directory."""
    names = [name for name in original.weight_files if original.files[name].startswith(b"PK")]
    if not names:
        return flip(rng, original)
    name = rng.choice(names)
    content = original.files[name]
    if rng.random() < 0.4:
        return _directory(rng, name, content)
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        infos = {info.filename: old.read(info) for info in old.infolist()}
    pickled = next(record for record in infos if record.endswith("data.pkl"))
    record = pickled if only_pickle or rng.random() < 0.6 else rng.choice(list(infos))
    way = rng.choice(
        ["op", "op", "op", "twice", "missing", "empty", "deflated", "shorter", "longer", "renamed", "swapped"]
    )
    result = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(result, "w") as new:
        warnings.simplefilter("ignore")
        partner = rng.choice(list(infos))
        for file, data in infos.items():
            method = zipfile.ZIP_STORED
            if file == record:
                match way:
                    case "op":
                        data = changed(rng, data)
                    case "twice":
                        new.writestr(file, changed(rng, data))
                    case "missing":
                        continue
                    case "empty":
                        data = b""
                    case "deflated":
                        method = zipfile.ZIP_DEFLATED
                    case "shorter":
                        data = data[: -rng.choice([1, 4])]
                    case "longer":
                        data += bytes(rng.choice([1, 4]))
                    case "renamed":
                        file = rng.choice(
                            [file + "x", "../" + file, "/" + file, file.replace("data", "date")]
                        )
                    case "swapped":
                        data = infos[partner]
            new.writestr(file, data, method)
    # Changed elements behind a correct checksum cannot be noticed.
    elements = int(way in ("op", "swapped", "twice") and "/data/" in record)
    return Damage(f"{name}: {way} of {record}", {name: result.getvalue()}, tensors_changed=elements)


def changed(rng: random.Random, data: bytes) -> bytes:
    """The data with a few bytes exchanged, put in or taken away."""
    if not data:
        return b"x"
    result = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        position = rng.randrange(len(result))
        match rng.choice(["flip", "set", "insert", "remove"]):
            case "flip":
                result[position] ^= 1 << rng.randrange(8)
            case "set":
                result[position] = rng.randrange(256)
            case "insert":
                result[position:position] = rng.randbytes(rng.choice([1, 4]))
            case "remove" if len(result) > 1:
                del result[position]
    return bytes(result)


def _directory(rng: random.Random, name: str, content: bytes) -> Damage:
    """Changed bytes of the central directory or the end record: sizes, offsets, checksums, counts."""
    begin = (
        content.rindex(b"PK\x01\x02", 0, len(content)) if rng.random() < 0.5 else content.index(b"PK\x01\x02")
    )
    changed = bytearray(content)
    for _ in range(rng.choice([1, 2, 6])):
        changed[rng.randrange(begin, len(changed))] = rng.choice([0, 255, rng.randrange(256)])
    return Damage(f"directory of {name} from {begin}", {name: bytes(changed)})


def duplicate(rng: random.Random, original: Original) -> Damage:
    """A tensor in two shards, with other elements in one of them."""
    names = [name for name in original.weight_files if name.endswith(".safetensors")]
    if len(names) < 2:
        return header(rng, original)
    one, other = rng.sample(names, 2)
    a, b = original.files[one], original.files[other]
    entries, mine = header_of(b), header_of(a)
    key = rng.choice([key for key in mine if key != "__metadata__"])
    begin, end = mine[key]["data_offsets"]
    data = bytes(reversed(a[header_length(a) :][begin:end]))
    size = len(b) - header_length(b)
    entries[key] = mine[key] | {"data_offsets": [size, size + end - begin]}
    return Damage(f"{key} of {one} in {other} too", {other: with_header(b + data, entries)})


ODD = [
    None,
    -1,
    0,
    1,
    3,
    10**7,
    2**40,
    10**30,
    0.5,
    -2.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../x",
    "ä" * 3000,
]
ODD += [
    [],
    [7],
    [[]],
    {},
    {"a": 1},
    True,
    False,
    "float16",
    [1, 2, 3],
    ["full_attention"],
    {"rope_type": "x"},
]


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def change_json(rng: random.Random, content: bytes, fields: list[str]) -> tuple[str, bytes]:
    """One change of a JSON file; `fields` are further fields that its reader knows."""
    whole = json.loads(content)
    way = rng.choice(["exchange"] * 5 + ["add"] * 3 + ["remove", "remove", "rename", "twice", "raw"])
    if way == "raw":
        raws = [
            b"",
            b"null",
            b"[]",
            b"3",
            b'"x"',
            b"{",
            b"[" * 100_000,
            b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
        ]
        raws += [
            b"\xff\xfe" + content,
            content.decode().encode("utf-16"),
            b"\xef\xbb\xbf" + content,
            content[:-2] + b",}",
            content * 2,
        ]
        raws += [
            content.replace(b"1", b"1" + b"0" * 5000, 1),
            content.replace(b":", b": NaN,", 1),
            b"\0" * 1000,
        ]
        number = rng.randrange(len(raws))
        return f"raw {number}", raws[number]
    all_places = sorted(places(whole), key=str)
    if way == "add" and fields and isinstance(whole, dict):
        name, value = rng.choice(fields), rng.choice(ODD)
        target = whole
        parts = [key for key, inner in whole.items() if isinstance(inner, dict) and key.endswith("_config")]
        if parts and rng.random() < 0.7:
            target = whole[rng.choice(parts)]
        target[name] = value
        return f"{name} = {str(value)[:30]}", json.dumps(whole).encode()
    if not all_places:
        return "empty", b"{}"
    path = rng.choice(all_places[: 400 if rng.random() < 0.5 else None])
    *above, last = path
    inner = whole
    for key in above:
        inner = inner[key]
    before = inner[last]
    match way:
        case "remove":
            del inner[last]
        case "rename" if isinstance(inner, dict):
            inner[f"{last}x"] = inner.pop(last)
        case "twice" if isinstance(inner, dict) and not above:
            text = json.dumps(whole)
            added = f", {json.dumps(last)}: {json.dumps(rng.choice(ODD))}}}"
            return f"{last} twice", (text[:-1] + added).encode()
        case _:
            near = [before + 1, before - 1, before * 2, -before] if type(before) in (int, float) else []
            inner[last] = value = rng.choice(ODD + 3 * near)
            return f"{'.'.join(map(str, path))} = {str(value)[:30]}", json.dumps(whole).encode()
    return f"{way} {'.'.join(map(str, path))}", json.dumps(whole).encode()


WEIGHTS: list[Callable[[random.Random, Original], Damage]] = [
    flip, flip, flip, cut, extend, lose, swap_files, swap_headers, header, header, header, archive, archive, duplicate,
]  # fmt: skip
