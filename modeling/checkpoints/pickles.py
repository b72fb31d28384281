"""Where a pickle of torch.save places its tensors: Python's unpickler, which is given nothing to call.

A pickle is a program. torch runs it with a list of functions that it may call, some of which can take all memory
(`bytearray(10**12)`, a text encoded a hundred times over). Here names that a file of plain tensors needs stay names,
any other name ends the reading, and nothing grows beyond a small multiple of the pickle. A program that passes does
the same in torch.
"""

import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass
from io import BytesIO
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch

from ...configuration.errors import CheckpointError
from .._private_api import PythonUnpickler
from .safetensors_files import DTYPE_NAMES, MOST_AXES, MOST_INDICES, TensorHeader

# Pickles of the largest checkpoints have a few megabytes: 200 bytes and 42 instructions a tensor.
MOST_BYTES = 1 << 24
_FEW_INSTRUCTIONS = 100_000
# Those that torch's `weights_only=True` accepts and `torch.save` writes, by pickletools' names.
_INSTRUCTIONS = set(
    "PROTO STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT LONG1 BINUNICODE SHORT_BINSTRING GLOBAL MARK "
    "TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT "
    "BINGET LONG_BINGET BINPERSID NEWOBJ REDUCE BUILD".split()
)
_STORAGES = {
    "Double": torch.double, "Float": torch.float, "Half": torch.half, "BFloat16": torch.bfloat16, "Long": torch.long,
    "Int": torch.int, "Short": torch.short, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexFloat": torch.cfloat, "ComplexDouble": torch.cdouble, "Untyped": torch.uint8,
}  # fmt: skip
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
    *(f"torch.{module}{name}Storage" for module in ("", "cuda.", "storage.") for name in _STORAGES),
    # Newer dtypes have no storage classes of their own.
    *map(str, DTYPE_NAMES),
    # For bytes.
    "_codecs.encode",
    "builtins.bytes",
    "builtins.set",
}


class Storage(NamedTuple):
    """The bytes behind tensors: the dtype of their elements, their offset in the file, and how many they are."""

    dtype: torch.dtype
    begin: int
    nbytes: int


# No tuple: a pickle could make one of those.
@dataclass(frozen=True)
class Named:
    """A class or function that a pickle names, or the instance or result that it would have made."""

    name: str


class Unpickler(PythonUnpickler):
    """Reads pickles, one after another.

    Args:
        data: the bytes, which begin with the first pickle.
        find: returns the `Storage` for the dtype, key and number of elements that the pickle asks for, and for a view
            into it that older files name.
        origin: the file, for messages.
        allowed: names of further classes and functions, neither tensors nor containers of tensors.
    """

    def __init__(self, data: bytes, find: Callable[..., Storage], origin: str, allowed: Set[str]):
        self.data, self.stream = data, BytesIO(data)
        self.find, self.origin, self.allowed = find, origin, allowed
        self.copied = 0
        super().__init__(self.stream, encoding="utf-8")

    def run(self) -> Any:
        """Read the pickle at the stream's position.

        Returns:
            its content: dictionaries, lists, tuples, numbers and texts as they are, tensors as `TensorHeader`,
            anything else as `Named`.

        Raises:
            CheckpointError: the pickle is damaged, wants to call an unknown name, or is made to take memory or time
                beyond its size.
        """
        begin, self.copied = self.stream.tell(), 0
        most = _FEW_INSTRUCTIONS + (len(self.data) - begin) // 3
        try:
            for count, (code, _, _) in enumerate(pickletools.genops(self.stream)):
                if code.name not in _INSTRUCTIONS:
                    self.fail(f"has an instruction ({code.name}) that no file of torch.save has")
                if count > most:
                    self.fail(f"has more than {most} instructions in a pickle of {len(self.data)} bytes")
            self.stream.seek(begin)
            return self.load()
        except CheckpointError:
            raise
        # A damaged pickle raises many types: an empty stack, a number instead of a tuple.
        except Exception as error:
            raise CheckpointError(
                f"{self.origin}: is cut short or damaged ({type(error).__name__} in its pickle). Download or copy it "
                "again."
            ) from error

    def fail(self, problem: str) -> NoReturn:
        """Raise this file's error."""
        raise CheckpointError(f"{self.origin}: {problem}. Download or copy it again.")

    def count_copies(self, copied: int) -> None:
        """Refuse a pickle that copies more than it holds: torch.save writes each list once."""
        self.copied += copied
        if self.copied > len(self.data):
            self.fail("copies its own content over and over")

    def find_class(self, module: str, name: str) -> Named:
        """The stand-in for a class or function."""
        # Python 2's name.
        whole = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if whole in _NAMES or whole in self.allowed:
            return Named(whole)
        shown = whole[:200]
        if shown.startswith(_OTHER_TENSORS):
            raise CheckpointError(
                f"{self.origin}: holds tensors of another kind ({shown}); plain ones were expected."
            )
        raise CheckpointError(
            f"{self.origin}: is not a plain file of tensors, and may want to run code ({shown}). It is not opened; get "
            "the weights as safetensors or from their original source."
        )

    def persistent_load(self, pid: Any) -> Storage:
        """The storage that a pickle asks for."""
        match pid:
            case ("storage", Named(name=name), str(key), str(), int(numel), *part) if numel >= 0:
                dtype = _STORAGES[name.rpartition(".")[2].removesuffix("Storage")]
                return self.find(dtype, key, numel, *part)
        self.fail("asks for what is not a storage")

    def load_setitems(self) -> None:
        """Add alternating keys and values to a dictionary."""
        pairs = self.pop_mark()
        target = self.stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            self.fail("enters pairs into what is not a dictionary")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Nested tuples can take forever to hash, and chosen numbers can collide.
            if not (type(key) is str or type(key) is int and -(2**31) <= key < 2**31):
                self.fail(f"has a key that is a {type(key).__name__}, where names of tensors were expected")
            if key in target:
                self.fail(f"has {str(key)[:200]!r} twice")
            target[key] = value

    def load_setitem(self) -> None:
        """Add one pair to a dictionary."""
        self.metastack.append(self.stack[:-2])
        self.stack = self.stack[-2:]
        self.load_setitems()

    def load_build(self) -> None:
        """Leave out the attributes of an object, if they are only its own."""
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) is dict:
            self.check_state(state, OrderedDict)
        elif type(made) is not Named:
            self.fail("changes an object after it was made")

    def load_newobj(self) -> None:
        """Name what an allowed class would make."""
        _, made = self.stack.pop(), self.stack.pop()
        if type(made) is not Named or made.name not in self.allowed:
            self.fail("makes an object that is not a tensor")
        self.append(Named(made.name.rpartition(".")[2]))

    def load_reduce(self) -> None:
        """Name or work out what a function would return."""
        arguments = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], arguments)

    def call(self, function: Any, arguments: Any) -> Any:
        """Result of a function, if it is known without calling it."""
        if type(function) is not Named or type(arguments) is not tuple:
            self.fail("calls what is not a function")
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
                return self.tensor(
                    storage, getattr(torch, dtype.name.removeprefix("torch.")), begin, shape, strides
                )
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

    def tensor(
        self, storage: Storage, dtype: torch.dtype, begin: Any, shape: Any, strides: Any
    ) -> TensorHeader:
        """A tensor's header, checked against the bytes behind it."""
        if not (
            type(shape) is type(strides) is tuple
            and len(shape) == len(strides) <= MOST_AXES
            and all(type(n) is int and 0 <= n <= MOST_INDICES for n in (begin, *shape, *strides))
            and prod(shape) <= MOST_INDICES
        ):
            self.fail("has a tensor whose shape and strides are not sizes")
        reach = 0
        if prod(shape):
            reach = begin + 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        if reach * dtype.itemsize > storage.nbytes:
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
        row_major = (prod(shape[axis + 1 :]) for axis in range(len(shape)))
        is_plain = all(
            size == 1 or step == plain for size, step, plain in zip(shape, strides, row_major, strict=True)
        )
        return TensorHeader(
            DTYPE_NAMES[dtype],
            shape,
            storage.begin + begin * dtype.itemsize,
            prod(shape) * dtype.itemsize,
            None if is_plain else strides,
        )

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

    dispatch = {
        **PythonUnpickler.dispatch,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.BUILD[0]: load_build,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.REDUCE[0]: load_reduce,
    }
