"""Whether somebody writes down what is computed, for other numbers: a compiler, an exporter or a tracer.

What depends on values must then happen inside of an operator, and values must not be read.
"""

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from transformers.utils import is_tracing as transformers_is_tracing


def is_recorded(x: torch.Tensor) -> bool:
    """Whether a compiler or tracer writes down what is computed, for other numbers, or there are shapes only.

    What depends on the values then, such as how many rows an expert gets, has to happen inside of an operator: a loop
    over them would be written down as it went for these.
    """
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        # Tensors that stand for others (fake ones, those of a tracer) are of a class of their own.
        or type(x) is not torch.Tensor
        or x.is_meta
        or get_proxy_mode() is not None
    )


def is_tracing(x: torch.Tensor) -> bool:
    """Whether values must not be read: what transformers knows of, CUDA graphs among them, and `make_fx`."""
    return transformers_is_tracing(x) or get_proxy_mode() is not None
