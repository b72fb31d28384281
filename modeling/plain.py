"""When a CPU may take a shorter way to the same numbers: nobody looks on, and only numbers are wanted.

A step of decoding on a CPU is bound by reading weights and by the number of calls. Both can be had cheaper than by the
general call, but not where gradients or derivatives are recorded, somebody's hooks or modes see every call, a compiler
or tracer reads along, or tensors stand for others. Hooks of single modules are for the caller to ask about.
"""

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import _has_any_global_hook
from transformers.utils import is_tracing as transformers_is_tracing

from ._compat import is_under_functorch

FEW_ROWS = 3
"""Tokens up to which norms and products take other calls. With more, norms keep every bit, and products gain little."""


def is_plain(x: torch.Tensor) -> bool:
    """Whether this is float32 on the CPU, and nothing but its numbers is asked for."""
    return (
        not torch.is_grad_enabled()
        and type(x) is torch.Tensor
        # Asked before anything of the tensor, which would be guards, or parts of the trace.
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and x.is_cpu
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not is_under_functorch()
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not _has_any_global_hook()
    )


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
