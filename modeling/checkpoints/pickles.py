"""Where a pickle of torch.save places its tensors, read without torch and without calling what the pickle names.

A pickle is a program for a machine with a stack and a memory. torch runs it with a list of functions that it may
call, some of which can take all memory (`bytearray(10**12)`, a text encoded a hundred times over). Here the program
runs with nothing to call: names that a file of plain tensors needs stay names, any other name ends the reading, and
nothing grows beyond a small multiple of the pickle. A program that passes does the same in torch.

The instructions are those that torch's `weights_only=True` accepts, which `torch.save` writes.
"""

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch

from ...configuration.errors import CheckpointError
from .safetensors_files import DTYPE_BITS, MOST_AXES, MOST_INDICES, TensorHeader

# Pickles of the largest checkpoints have a few megabytes: 200 bytes and 42 instructions a tensor.
MOST_BYTES = 1 << 24
_FEW_INSTRUCTIONS = 100_000
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "ComplexDoubleStorage": "C128", "UntypedStorage": "U8",
}  # fmt: skip
# Newer dtypes have no storage classes of their own.
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64", "complex128": "C128",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
BITS = {**DTYPE_BITS, "C128": 128}
_REBUILD = "torch._utils._rebuild_"
# Functions by which torch rebuilds tensors that are not plain.
_OTHER_TENSORS = (_REBUILD, "torch._tensor.", "torch.serialization._get_layout", "torch.per_")
_NAMES = {
    "collections.OrderedDict",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "torch._tensor._rebuild_from_type_v2",
    *(_REBUILD + kind for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state")),
    *(f"torch.{module}{name}" for module in ("", "cuda.", "storage.") for name in _STORAGES),
    *(f"torch.{name}" for name in _DTYPES),
    # For bytes.
    "_codecs.encode",
    "builtins.bytes",
    "builtins.set",
}


class Storage(NamedTuple):
    """The bytes behind tensors: the dtype of their elements, their offset in the file, and how many they are."""

    dtype: str
    begin: int
    nbytes: int


# No tuple: a pickle could make one of those.
@dataclass(frozen=True)
class Named:
    """A class or function that a pickle names, or the instance or result that it would have made."""

    name: str


class Machine:
    """Runs pickles, one after another.

    Args:
        data: the bytes, which begin with the first pickle.
        find: returns the `Storage` for the dtype, key and number of elements that the pickle asks for, and for a view
            into it that older files name.
        origin: the file, for messages.
        allowed: names of further classes and functions, neither tensors nor containers of tensors.
    """

    def __init__(self, data: bytes, find: Callable[..., Storage], origin: str, allowed: Set[str]):
        self.data, self.find, self.origin, self.allowed = data, find, origin, allowed
        self.position = 0
        self.stack: list[Any]
        self.marks: list[list[Any]]
        self.memo: dict[int, Any]
        self.copied: int

    def run(self) -> Any:
        """Run the pickle at `position`.

        Returns:
            its content: dictionaries, lists, tuples, numbers and texts as they are, tensors as `TensorHeader`,
            anything else as `Named`. `position` is then the offset after the pickle.

        Raises:
            CheckpointError: the pickle is damaged, wants to call an unknown name, or is made to take memory or time
                beyond its size.
        """
        most = _FEW_INSTRUCTIONS + (len(self.data) - self.position) // 3
        self.stack, self.marks, self.memo, self.copied = [], [], {}, 0
        stream = BytesIO(self.data)
        stream.seek(self.position)
        try:
            for code, argument, begin in islice(pickletools.genops(stream), most):
                if code.name == "STOP":
                    self.position = stream.tell()
                    return self.stack.pop()
                if code.name == "GLOBAL":
                    # Two lines, in which pickletools would replace escape sequences.
                    argument = self.data[begin + 1 : stream.tell() - 1].decode().replace("\n", ".")
                instruction = _INSTRUCTIONS.get(code.name)
                if instruction is None:
                    self.fail(f"has an instruction ({code.name}) that no file of torch.save has")
                instruction(self, argument)
        except CheckpointError:
            raise
        # A damaged pickle raises many types: an empty stack, a number instead of a tuple.
        except Exception as error:
            raise CheckpointError(
                f"{self.origin}: is cut short or damaged ({type(error).__name__} in its pickle). Download or copy it "
                "again."
            ) from error
        self.fail(f"has more than {most} instructions in a pickle of {len(self.data)} bytes")

    def fail(self, problem: str) -> NoReturn:
        """Raise this file's error."""
        raise CheckpointError(f"{self.origin}: {problem}. Download or copy it again.")

    def since_mark(self) -> list[Any]:
        """What was pushed since the last mark, taken off the stack."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def last(self, count: int) -> list[Any]:
        """The last values, taken off the stack."""
        return [self.stack.pop() for _ in range(count)][::-1]

    def count_copies(self, copied: int) -> None:
        """Refuse a pickle that copies more than it holds: torch.save writes each list once."""
        self.copied += copied
        if self.copied > len(self.data):
            self.fail("copies its own content over and over")

    def put(self, target: Any, pairs: list[Any]) -> None:
        """Add alternating keys and values to a dictionary."""
        if type(target) is not dict or len(pairs) % 2:
            self.fail("enters pairs into what is no dictionary")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Nested tuples can take forever to hash, and chosen numbers can collide.
            if not (type(key) is str or type(key) is int and -(2**31) <= key < 2**31):
                self.fail(f"has a key that is a {type(key).__name__}, where names of tensors were expected")
            if key in target:
                self.fail(f"has {str(key)[:200]!r} twice")
            target[key] = value

    def name(self, whole: str) -> Named:
        """The stand-in for a class or function."""
        if whole.startswith("__builtin__."):
            # Python 2's name.
            whole = f"builtins.{whole.removeprefix('__builtin__.')}"
        if whole in _NAMES or whole in self.allowed:
            return Named(whole)
        shown = whole[:200]
        if shown.startswith(_OTHER_TENSORS):
            raise CheckpointError(
                f"{self.origin}: holds tensors of another kind ({shown}); plain ones were expected."
            )
        raise CheckpointError(
            f"{self.origin}: is no plain file of tensors, and may want to run code ({shown}). It is not opened; get "
            "the weights as safetensors or from their original source."
        )

    def call(self, function: Any, arguments: Any) -> Any:
        """Result of a function, if it is known without calling it."""
        if type(function) is not Named or type(arguments) is not tuple:
            self.fail("calls what is no function")
        match function.name, arguments:
            case ("torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2"), (
                Storage() as storage, begin, shape, strides, *rest
            ):  # fmt: skip
                self.check_plain(rest[1:])
                return self.tensor(storage, storage.dtype, begin, shape, strides)
            case "torch._utils._rebuild_tensor_v3", (
                Storage() as storage, begin, shape, strides, _, hooks, Named() as dtype, *rest
            ):  # fmt: skip
                self.check_plain([hooks, *rest])
                return self.tensor(storage, _DTYPES[dtype.name.removeprefix("torch.")], begin, shape, strides)
            case "torch._utils._rebuild_parameter", (TensorHeader() as tensor, _, hooks):
                self.check_plain([hooks])
                return tensor
            case "torch._utils._rebuild_parameter_with_state", (TensorHeader() as tensor, _, hooks, state):
                self.check_plain([hooks])
                self.check_state(state, torch.nn.Parameter)
                return tensor
            case "torch._tensor._rebuild_from_type_v2", (
                Named() as rebuild, Named(name="torch.Tensor" | "torch.nn.parameter.Parameter"), tuple() as inner, state
            ):  # fmt: skip
                self.check_state(state, torch.nn.Parameter)
                return self.call(rebuild, inner)
            case "collections.OrderedDict", ():
                return {}
            case "collections.OrderedDict", (list() as pairs,):
                self.count_copies(len(pairs))
                content: dict[Any, Any] = {}
                self.put(content, [part for key, value in pairs for part in (key, value)])
                return content
            case "torch.Size", ((list() | tuple()) as sizes,):
                self.count_copies(len(sizes))
                return tuple(sizes)
            case "_codecs.encode", (str() as text, "latin1" | "latin-1"):
                self.count_copies(len(text))
                return Named("bytes")
            case "builtins.set", (list() as items,):
                self.count_copies(len(items))
                if all(type(item) in (str, int, float) for item in items):
                    return Named("set")
            case (("builtins.bytes" | "builtins.set"), ()):
                return Named(function.name.removeprefix("builtins."))
            case "torch.device", (str(),) | (str(), int()):
                return Named("device")
        if function.name in self.allowed:
            return Named(function.name.rpartition(".")[2])
        self.fail(f"calls {function.name} in a way that torch.save does not write")

    def tensor(self, storage: Storage, dtype: str, begin: Any, shape: Any, strides: Any) -> TensorHeader:
        """A tensor's header, checked against the bytes behind it."""
        if not (
            type(shape) is type(strides) is tuple
            and len(shape) == len(strides) <= MOST_AXES
            and all(type(n) is int and 0 <= n <= MOST_INDICES for n in (begin, *shape, *strides))
        ):
            self.fail("has a tensor whose shape and strides are no sizes")
        if prod(shape) > MOST_INDICES:
            self.fail("has a tensor whose shape is beyond reason")
        bits = BITS[dtype]
        reach = 0
        if prod(shape):
            reach = begin + 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        if reach * bits > storage.nbytes * 8:
            self.fail(
                f"has a tensor of shape {list(shape)} and dtype {dtype} that reaches past the {storage.nbytes} bytes "
                "behind it"
            )
        # An axis of stride 0 repeats elements; any other axis that overlaps the axes below it is damage.
        below = 0
        for step, size in sorted(zip(strides, shape, strict=True)):
            if size > 1 and 0 < step <= below:
                self.fail(
                    f"has a tensor of shape {list(shape)} that overlaps itself (strides {list(strides)})"
                )
            below += max(size - 1, 0) * step
        row_major = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        is_plain = all(
            size == 1 or step == plain for size, step, plain in zip(shape, strides, row_major, strict=True)
        )
        return TensorHeader(dtype, shape, storage.begin + begin * bits // 8, None if is_plain else strides)

    def check_plain(self, extras: list[Any]) -> None:
        """Refuse a tensor with hooks, or one that torch would negate or conjugate when reading."""
        if any(extras):
            self.fail("has a tensor that is more than its numbers (with hooks, negated or conjugated)")

    def check_state(self, state: Any, owner: type) -> None:
        """Refuse attributes that would replace the object's own."""
        for part in state if type(state) is tuple and len(state) == 2 else [state]:
            if part is None:
                continue
            if type(part) is dict:
                self.count_copies(len(part))
                if not any(type(key) is not str or hasattr(owner, key) for key in part):
                    continue
            self.fail(f"changes what a {owner.__name__} is")


def _build(machine: Machine, _: Any) -> None:
    state = machine.stack.pop()
    made = machine.stack[-1]
    if type(made) is dict:
        machine.check_state(state, OrderedDict)
    elif type(made) is not Named:
        machine.fail("changes an object after it was made")


def _new(machine: Machine, _: Any) -> None:
    # Remove the arguments.
    machine.stack.pop()
    made = machine.stack.pop()
    if type(made) is not Named or made.name not in machine.allowed:
        machine.fail("makes an object that is no tensor")
    machine.stack.append(Named(made.name.rpartition(".")[2]))


def _persistent(machine: Machine, _: Any) -> None:
    match machine.stack.pop():
        case ("storage", Named() as kind, str(key), str(), int(numel), *part) if numel >= 0:
            dtype = _STORAGES[kind.name.rpartition(".")[2]]
            machine.stack.append(machine.find(dtype, key, numel, *part))
        case _:
            machine.fail("asks for what is no storage")


def _append(machine: Machine, items: list[Any]) -> None:
    if type(machine.stack[-1]) is not list:
        machine.fail("appends to what is no list")
    machine.stack[-1].extend(items)


def _put(machine: Machine, pairs: list[Any]) -> None:
    machine.put(machine.stack[-1], pairs)


def _mark(machine: Machine, _: Any) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _remember(machine: Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


def _call(machine: Machine, _: Any) -> None:
    arguments = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], arguments)


def _push(value: Callable[[Machine, Any], Any]) -> "_Instruction":
    def push(machine: Machine, argument: Any) -> None:
        # Evaluated first: it may replace the stack.
        pushed = value(machine, argument)
        machine.stack.append(pushed)

    return push


_Instruction = Callable[[Machine, Any], None]
_PLAIN = ("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "BINUNICODE")
# By pickletools' names.
_INSTRUCTIONS: dict[str, _Instruction] = {
    "PROTO": lambda machine, _: None,
    "NONE": _push(lambda machine, _: None),
    "NEWTRUE": _push(lambda machine, _: True),
    "NEWFALSE": _push(lambda machine, _: False),
    "EMPTY_TUPLE": _push(lambda machine, _: ()),
    "EMPTY_LIST": _push(lambda machine, _: []),
    "EMPTY_DICT": _push(lambda machine, _: {}),
    **dict.fromkeys(_PLAIN, _push(lambda machine, value: value)),
    # torch decodes as UTF-8 what pickletools decodes as Latin-1.
    "SHORT_BINSTRING": _push(lambda machine, text: text.encode("latin-1").decode()),
    "GLOBAL": _push(Machine.name),
    "MARK": _mark,
    "TUPLE": _push(lambda machine, _: tuple(machine.since_mark())),
    "TUPLE1": _push(lambda machine, _: tuple(machine.last(1))),
    "TUPLE2": _push(lambda machine, _: tuple(machine.last(2))),
    "TUPLE3": _push(lambda machine, _: tuple(machine.last(3))),
    "APPEND": lambda machine, _: _append(machine, machine.last(1)),
    "APPENDS": lambda machine, _: _append(machine, machine.since_mark()),
    "SETITEM": lambda machine, _: _put(machine, machine.last(2)),
    "SETITEMS": lambda machine, _: _put(machine, machine.since_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _push(lambda machine, index: machine.memo[index])),
    "BINPERSID": _persistent,
    "NEWOBJ": _new,
    "REDUCE": _call,
    "BUILD": _build,
}
