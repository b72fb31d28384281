"""Checks for a compiler, exporter, tracer or transform of `torch.func`.

A recorded computation is later run with other values. So code that depends on a tensor's values, such as a loop over
each expert's rows, must be inside an operator, which is recorded as one step.
"""

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from transformers.utils import is_tracing as transformers_is_tracing

from .._private_api import has_modes, is_traced_by_jit, is_under_functorch


def is_recorded(x: torch.Tensor) -> bool:
    """Return True if a compiler, tracer or transform records this computation, or the tensor is on the meta device.

    Values must then not be read outside of operators; under `vmap` there is no single value to read.
    """
    return (
        torch.compiler.is_compiling()
        or is_traced_by_jit()
        # Fake tensors and those of a tracer are subclasses of Tensor.
        or type(x) is not torch.Tensor
        or x.is_meta
        or (has_modes() and get_proxy_mode() is not None)
        or is_under_functorch()
    )


def is_exported() -> bool:
    """Return True while `torch.export` or `torch.jit.trace` records a program, which must work for all sizes."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """Return True if a transform of `torch.func` is active, and no compiler is."""
    return not torch.compiler.is_compiling() and is_under_functorch()


def is_tracing(x: torch.Tensor) -> bool:
    """Return True if a computation is recorded (as `is_recorded`), or a CUDA graph is captured.

    Values must then not be read. Tensors of subclasses that hold values, such as DTensor, do not count as recorded
    here.
    """
    return transformers_is_tracing(x) or x.is_meta or get_proxy_mode() is not None or is_under_functorch()


def is_readable(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's values can be read at once: it is on the CPU, and nothing is recorded.

    Unlike `is_tracing` this does not ask CUDA whether a graph is captured, which does not matter for a tensor on the
    CPU. In a CUDA build without a GPU, that question costs more than all other checks of a decode step.
    """
    return not is_recorded(tensor) and tensor.is_cpu
