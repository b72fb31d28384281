"""Importing this lets Triton's interpreter run here, and quickly: what it and numpy of some releases disagree about."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import numpy as np

# A process that was forked may have Triton imported for compiling. The extension in it serves both.
for name in list(sys.modules):
    if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
        del sys.modules[name]

interpreter = importlib.import_module("triton.runtime.interpreter")

# Triton 3.6 keeps scalars as arrays with one element, and asks `int` for the bounds of loops; numpy 2.4 refuses that.
patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_too(tensor, scope):
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.squeeze(self.handle.data)))


vars(interpreter)["_patch_lang_tensor"] = patch_tensor_too

# The interpreter puts its own functions in the place of the language's before every call of a kernel and of each
# function in it, which took half of the time. They are the same ones for all functions of a module, so once is enough.
patch_language = interpreter._patch_lang
patched_for = set()


def patch_language_once(function):
    if function.__module__ not in patched_for:
        patched_for.add(function.__module__)
        patch_language(function)
    # Nothing in it, so that nothing is undone: this process only ever interprets.
    return interpreter._LangPatchScope()


vars(interpreter)["_patch_lang"] = patch_language_once

# It makes a table of all types for every value. Types of one name are one in numpy.
numpy_type = interpreter._get_np_dtype
numpy_types = {}


def numpy_type_once(kind):
    if kind.name not in numpy_types:
        numpy_types[kind.name] = numpy_type(kind)
    return numpy_types[kind.name]


vars(interpreter)["_get_np_dtype"] = numpy_type_once

# Nine tenths of the time that remained went into the types of values, a new one for each, and into what the rest of
# Triton asks of their shapes. What they hold is the same for all of a kind, so it is made once.
core, semantic = (importlib.import_module(f"triton.language.{name}") for name in ("core", "semantic"))
make_block_type, make_tensor = core.block_type.__init__, core.tensor.__init__
block_types, shapes = {}, {}


def make_block_type_once(self, element_ty, shape):
    values = shape.values if type(shape) is core.tuple else shape
    key = element_ty.name, *(each.value if type(each) is core.constexpr else each for each in values)
    if key not in block_types:
        make_block_type(self, element_ty, shape)
        block_types[key] = self.__dict__.copy()
    self.__dict__.update(block_types[key], element_ty=element_ty)


def make_tensor_of_known_shape(self, handle, type):
    key = (*type.shape.values,) if type.is_block() else ()
    if key not in shapes:
        make_tensor(self, handle, type)
        shapes[key] = {"numel": self.numel, "shape": self.shape}
    self.__dict__.update(shapes[key], handle=handle, type=type, dtype=type.scalar)


broadcast = semantic.TritonSemantic.broadcast_impl_value
unwrap = core._unwrap_if_constexpr


def broadcast_what_differs(self, lhs, rhs):
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
        return lhs, rhs
    return broadcast(self, lhs, rhs)


def unwrap_quickly(value):
    if type(value) is core.constexpr:
        return value.value
    return value if type(value) in (int, core.dtype) else unwrap(value)


# It computes each sum and product of integers again, in more bits, for an assertion that is left out unless one debugs.
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

# It takes floats apart to convert them, and bfloat16 is the upper half of a float32.
convert_float = interpreter._convert_float


def convert_halves(data, kind, wanted, rounding):
    if rounding is None and (kind.name, wanted.name) == ("bf16", "fp32"):
        return data.astype(np.uint32) << 16
    if rounding is None and (kind.name, wanted.name) == ("fp32", "bf16"):
        return (data.view(np.uint32) >> 16).astype(np.uint16)
    return convert_float(data, kind, wanted, rounding)


core.block_type.__init__ = make_block_type_once
core.tensor.__init__ = make_tensor_of_known_shape
vars(core)["_unwrap_if_constexpr"] = unwrap_quickly
semantic.TritonSemantic.broadcast_impl_value = broadcast_what_differs
vars(interpreter)["_convert_float"] = convert_halves


def spoil(monkeypatch, folder, old, new):
    """Put kernels in the place of ours whose source has `new` where `old` stood."""
    from llamoe.modeling.kernels import packed_rows_triton

    text = Path(packed_rows_triton.__file__).read_text()
    assert text.count(old) == 1
    file = folder / "spoilt.py"
    file.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("spoilt", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(packed_rows_triton, "product_kernel", module.product_kernel)
