"""Importing this lets Triton's interpreter run here: what Triton and numpy of some releases disagree about."""

import numpy as np
import triton.runtime.interpreter

# Triton 3.6 keeps scalars as arrays with one element, and asks `int` for the bounds of loops; numpy 2.4 refuses that.
patch_tensor = triton.runtime.interpreter._patch_lang_tensor


def patch_tensor_too(tensor, scope):
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.squeeze(self.handle.data)))


vars(triton.runtime.interpreter)["_patch_lang_tensor"] = patch_tensor_too
