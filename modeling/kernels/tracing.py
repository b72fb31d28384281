"""Checks for a compiler, exporter, tracer or transform of `torch.func`.

What they record is run with other values, too. So code that depends on a tensor's values must be inside an operator.
"""

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from transformers.utils import is_tracing as transformers_is_tracing

from .._private_api import has_modes, is_traced_by_jit, is_under_functorch


def is_recorded(x: torch.Tensor) -> bool:
    """Return whether a compiler, tracer or transform records this computation, or the tensor is on meta.

    Code that depends on values, such as a loop over each expert's rows, must then be inside an operator: otherwise it
    would be recorded for these values alone, and under `vmap` there is no single value to read.
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
    """Return whether `torch.export` or `torch.jit.trace` is recording a program for any number of rows."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` is active outside of a compilation."""
    return not torch.compiler.is_compiling() and is_under_functorch()


def is_tracing(x: torch.Tensor) -> bool:
    """Return True if values must not be read: as `is_recorded`, or while a CUDA graph is captured.

    Subclasses that wrap real tensors, such as DTensor, do not count as tracing.
    """
    return transformers_is_tracing(x) or x.is_meta or get_proxy_mode() is not None or is_under_functorch()


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values can be read without synchronising with a device, outside of tracing.

    transformers' `is_tracing` also asks whether a CUDA graph is being captured, which does not matter for a tensor on
    the CPU. In a CUDA build without a GPU, that one question costs more than all other checks of a decode step.
    """
    return not is_recorded(tensor) and tensor.is_cpu
