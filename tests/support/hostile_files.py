"""Makes files, byte by byte, that no library would write: of torch.save, safetensors and JSON."""

import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

MANY = 10**6
# Too deep for a stack of 8 MB, of which a level of recursion takes a hundred bytes or more.
DEEP = 3 * 10**5
MAGIC = 0x1950A86A20F9469CFC6C


def text(value: str) -> bytes:
    raw = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(raw)]) + raw


def named(name: str) -> bytes:
    module, _, last = name.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{last}\n".encode()


def tuple_of(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def call(name: str, *arguments: bytes) -> bytes:
    return named(name) + tuple_of(*arguments) + pickle.REDUCE


def keep(index: int) -> bytes:
    return pickle.LONG_BINPUT + struct.pack("<I", index)


def kept(index: int) -> bytes:
    return pickle.LONG_BINGET + struct.pack("<I", index)


def dictionary(items: Mapping[str | bytes, bytes]) -> bytes:
    pairs = b"".join((text(key) if isinstance(key, str) else key) + value for key, value in items.items())
    return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS


def storage(numel: int, kind: str = "FloatStorage", key: str = "0", *part: bytes) -> bytes:
    place = tuple_of(text("storage"), named(f"torch.{kind}"), text(key), text("cpu"), number(numel), *part)
    return place + pickle.BINPERSID


def tensor(shape, strides=None, numel=None, begin=0, extra: bytes = b"", **where) -> bytes:
    size = 1
    for axis in shape:
        size *= axis
    if strides is None:
        strides, step = [], 1
        for axis in reversed(shape):
            strides.insert(0, step)
            step *= axis
    sizes = tuple_of(*map(number, shape)) + tuple_of(*map(number, strides))
    hooks = call("collections.OrderedDict")
    held = storage(size if numel is None else numel, **where)
    arguments = [held, number(begin), sizes, pickle.NEWFALSE, hooks, extra]
    return call("torch._utils._rebuild_tensor_v2", *arguments)


def whole(content: bytes) -> bytes:
    return pickle.PROTO + b"\x02" + content + pickle.STOP


def archive(path: Path, content: bytes, records: Mapping[str, bytes] | None = None, **options) -> Path:
    """A zip archive as torch writes it, with a pickle and the numbers of storages by their keys.

    Args:
        path: the file.
        content: of the pickle, without its first and last instruction.
        records: key to numbers.
        **options: `compressed` names records that are, `others` gives further ones, `folder` names the first part.
    """
    folder = options.get("folder", "archive")
    files = {"data.pkl": whole(content), "byteorder": b"little"}
    files |= {f"data/{key}": numbers for key, numbers in (records or {}).items()}
    files |= {"version": b"3\n", **options.get("others", {})}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, data in files.items():
            packed = zipfile.ZIP_DEFLATED if name in options.get("compressed", ()) else zipfile.ZIP_STORED
            file.writestr(f"{folder}/{name}", data, packed)
    return path


def legacy(path: Path, content: bytes, keys: list[str], storages: bytes) -> Path:
    """A file as torch wrote it before 1.6; `storages` are the bytes of all of them, see `stored`.

    Its storages have one entry more: which part of another one they are, or none.
    """
    content = content.replace(pickle.TUPLE + pickle.BINPERSID, pickle.NONE + pickle.TUPLE + pickle.BINPERSID)
    system = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    begin = b"".join(pickle.dumps(value, protocol=2) for value in (MAGIC, 1001, system))
    path.write_bytes(begin + whole(content) + pickle.dumps(keys, protocol=2) + storages)
    return path


def stored(numel: int, numbers: bytes) -> bytes:
    """A storage as it stands in a file from before 1.6."""
    return struct.pack("<Q", numel) + numbers


def nested_tuples(depth: int) -> bytes:
    """A tuple that holds two of a tuple that holds two of a tuple …: small to write, for ever to walk through."""
    made = pickle.EMPTY_TUPLE + keep(0)
    for level in range(depth):
        made += kept(level) + pickle.TUPLE2 + keep(level + 1)
    return made


# Each fills a dictionary's value. torch's own reader, with `weights_only=True`, takes memory or time for most of them.
PICKLES: dict[str, bytes] = {
    "bytearray": call("builtins.bytearray", number(10**13)),
    "bytes": call("builtins.bytes", number(10**13)),
    "float_tensor": call("torch.FloatTensor", number(10**6), number(10**7)),
    "tensor": call("torch.Tensor", number(10**6), number(10**7)),
    "encoded_over_and_over": text("a" * MANY)
    + keep(0)
    + pickle.EMPTY_LIST
    + keep(1)
    + pickle.MARK
    + 3000 * (named("_codecs.encode") + kept(0) + text("latin1") + pickle.TUPLE2 + pickle.REDUCE)
    + pickle.APPENDS,
    "encoded_twice_as_long": 40 * named("_codecs.encode")
    + text("a")
    + text("latin1")
    + pickle.TUPLE2
    + pickle.REDUCE
    + 39 * (text("hex") + pickle.TUPLE2 + pickle.REDUCE),
    "encoded_wide": call("_codecs.encode", text("a" * MANY), text("utf-32")),
    "copied_dictionaries": pickle.EMPTY_LIST
    + keep(0)
    + pickle.MARK
    + b"".join(number(n) + number(n) + pickle.TUPLE2 for n in range(50_000))
    + pickle.APPENDS
    + pickle.EMPTY_LIST
    + pickle.MARK
    + 2000 * (named("collections.OrderedDict") + kept(0) + pickle.TUPLE1 + pickle.REDUCE)
    + pickle.APPENDS,
    "copied_sizes": tuple_of(100_000 * number(1))
    + keep(0)
    + pickle.EMPTY_LIST
    + pickle.MARK
    + 20_000 * (named("torch.Size") + kept(0) + pickle.TUPLE1 + pickle.REDUCE)
    + pickle.APPENDS,
    "nested_key": dictionary({nested_tuples(50): number(1)}),
    "nested_in_a_set": call("builtins.set", pickle.EMPTY_LIST + nested_tuples(50) + pickle.APPEND),
    "colliding_keys": dictionary({number(n * (2**61 - 1)): number(0) for n in range(1, 60_000)}),
    "far_memory": number(1) + keep(2**32 - 1),
    "deep_lists": DEEP * pickle.EMPTY_LIST + (DEEP - 1) * pickle.APPEND,
    "deep_marks": DEEP * pickle.MARK + DEEP * pickle.TUPLE,
    "many_axes": tuple_of(100_000 * number(1))
    + keep(0)
    + storage(1)
    + keep(1)
    + pickle.EMPTY_LIST
    + pickle.MARK
    + 10_000
    * (
        named("torch._utils._rebuild_tensor_v2")
        + tuple_of(kept(1), number(0), kept(0), kept(0), pickle.NEWFALSE, call("collections.OrderedDict"))
        + pickle.REDUCE
    )
    + pickle.APPENDS,
    "endless_shape": tensor([2**60, 2**60], strides=[0, 0], numel=1),
    "huge_storage": tensor([2**40, 2**20]),
    "past_the_storage": tensor([20, 20], numel=1),
    "past_the_storage_by_strides": tensor([2, 2], strides=[2**40, 1], numel=1),
    "begins_past_the_storage": tensor([1], begin=2**40),
    "negative_size": tensor([-1, 4], strides=[4, 1], numel=1),
    "negated": tensor([1], extra=dictionary({"neg": pickle.NEWTRUE})),
    "no_such_record": tensor([1], key="7"),
    "record_outside": tensor([1], key="../version"),
    "sparse": call("torch._utils._rebuild_sparse_tensor", number(0), number(0)),
    "quantized": call("torch._utils._rebuild_qtensor", number(0), number(0)),
    "on_meta": call("torch._utils._rebuild_meta_tensor_no_storage", number(0), number(0)),
    "runs_code": call("posix.mkdir", text("was-run")),
    "runs_builtin": call("builtins.eval", text("__import__('os').mkdir('was-run')")),
    "runs_by_a_name": named("torch._utils.os.mkdir") + tuple_of(text("was-run")) + pickle.REDUCE,
    "numpy": call("numpy.core.multiarray._reconstruct", number(0)),
    "state_of_a_dictionary": call("collections.OrderedDict")
    + dictionary({"items": named("collections.OrderedDict")})
    + pickle.BUILD,
    "state_of_a_tensor": call(
        "torch._utils._rebuild_parameter_with_state",
        tensor([1]),
        pickle.NEWFALSE,
        call("collections.OrderedDict"),
        dictionary({"data": tensor([1])}),
    ),
    "false_name": tuple_of(text("collections.OrderedDict")) + pickle.EMPTY_TUPLE + pickle.REDUCE,
    "empty_stack": pickle.TUPLE2 + pickle.TUPLE2,
    "unknown_instruction": b"\xff",
    "stack_global": b"\x8c\x05posix\x8c\x05mkdir\x93",
    "twice": dictionary({"a": number(1)}) + pickle.MARK + text("a") + number(2) + pickle.SETITEMS,
}


def safetensors(header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def deep(depth=200_000):
    return '{"a": ' + "[" * depth + "]" * depth + "}"


JSON = {
    "deep": (deep(), "not a valid JSON file.*recursion"),
    "twice": ('{"model_type": "llamoe_dense", "a": 1, "b": {"c": 1, "c": 2}}', "'c' stands twice"),
    "nan": ('{"model_type": "llamoe_dense", "rms_norm_eps": NaN}', "NaN is not a number"),
    "digits": ('{"hidden_size": ' + "9" * 10_000 + "}", "not a valid JSON file"),
    "many": ('{"a": [' + "0," * 10**7 + "0]}", "bytes, where at most"),
    "utf16": ('{"a": 1}'.encode("utf-16"), "not a valid JSON file"),
    "list": ("[1]", "JSON object"),
}
