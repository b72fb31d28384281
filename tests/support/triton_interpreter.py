"""Importing this lets Triton's interpreter run here, and quickly: what it and numpy of some releases disagree about."""

import importlib
import sys

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
