"""A pass of few rows through some modules: which kernels take its rows, and products by them.

Shapes: B batch, T tokens, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cpp_kernels import BITS, Matrix, Products, adapted, library, multiply, plain_matrix, prepare
from .cpp_layer import rms_norm
from .cpu import has_hooks, is_plain, linear_by_torch, plain_weight
from .float32_blocks import plain_max_rows
from .known_modules import recall, state_of, unadapted, unwatched_formula
from .limits import CPP_PACKED_MAX_ROWS


class Linears(NamedTuple):
    """The products of up to three layers that are given the same rows."""

    together: Products | None
    each: list[Products | None]


class Pass:
    """A pass of few rows."""

    def __init__(self, x: torch.Tensor, options: Mapping[str, Any], modules: Sequence[nn.Module] = ()):
        # Whose addresses the pass may use.
        self.kept: list[torch.Tensor | None] = []
        self.state = state = state_of(modules, self.kept)
        # Asked of a configuration once a pass: its attributes are slow.
        self.config: Any = None
        self.is_sdpa = self.is_llamoe = False
        self.dtype, self.shape, self.size = x.dtype, x.shape, x.shape[-1]
        num_rows = x.numel() // self.size
        self.takes_plain, self.takes_packed = (
            num_rows <= plain_max_rows(x.dtype),
            num_rows <= CPP_PACKED_MAX_ROWS,
        )
        self.has_kernels = x.dtype in BITS and library() is not None
        self.key = self.dtype, self.size, self.takes_plain, self.takes_packed, self.has_kernels
        self.decoders = {} if state is None else state.decoders.setdefault(self.key, {})
        asks = any(option is not None and option is not False for option in options.values())
        # Whether attention of one token may be two calls, which take angles instead of rotary tables.
        self.is_one_token = num_rows == 1 and self.has_kernels and not asks

    def normalize(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        """`norm(x)`."""
        fits = self.takes_plain and self._takes(x)
        address = self._recall([norm], lambda: self._norm(norm)) if fits else None
        return self._normalize(norm, address, x)

    def head(self, linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """`linear(x)`."""
        known = self._recall([linear], lambda: self._linears(linear))
        return linear(x) if known is None else self._multiply((linear,), known, x)[0]

    def _ask(self, config: Any) -> "Pass":
        """This pass, which then knows the implementations of attention and experts that a configuration names."""
        if config is not self.config:
            attend = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
            self.config, self.is_sdpa = config, attend is sdpa_attention_forward
            self.is_llamoe = getattr(config, "_experts_implementation", None) in (None, "llamoe")
        return self

    def _takes(self, x: torch.Tensor) -> bool:
        """Whether `x` is what the pass began with, as it is unless a module of another kind has returned it."""
        return x.shape == self.shape and self._is_readable(x)

    def _is_readable(self, x: torch.Tensor) -> bool:
        """Whether kernels may read a tensor."""
        return type(x) is torch.Tensor and x.dtype == self.dtype and x.is_cpu

    def _multiply(
        self, linears: Sequence[nn.Module], known: Linears, x: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """`[linear(x) for linear in linears]`; those of one format by one call."""
        together, fits = known.together, self._is_readable(x)
        if fits and together is not None and together.inputs == x.shape[-1]:
            y = multiply(x, together).view(*x.shape[:-1], -1)
            return (y,) if len(linears) == 1 else y.split_with_sizes(together.sizes, -1)
        return [
            multiply(x, products).view(*x.shape[:-1], -1)
            if fits and products is not None and products.inputs == x.shape[-1]
            else linear_by_torch(linear, x)
            for linear, products in zip(linears, known.each or [None] * len(linears), strict=True)
        ]

    def _normalize(self, norm: Any, address: int | None, x: torch.Tensor) -> torch.Tensor:
        return norm(x) if address is None else rms_norm(x, address, norm.eps)

    def _recall(self, watched: Sequence[Any], work_out: Callable[[], Any]) -> Any:
        """As `recall`, in this kind of pass."""
        return recall(self.key, self.state, self.kept, watched, work_out)

    def _linears(self, *linears: nn.Module) -> Linears:
        matrices = [self._matrix(linear) for linear in linears]
        together = prepare(matrices)
        each = [prepare([matrix]) for matrix in matrices] if together is None else []
        return Linears(together, each)

    def _matrix(self, linear: Any) -> Matrix | None:
        """A layer's matrix, where a compiled kernel takes these rows; otherwise None."""
        base, adapters = unadapted(linear)
        if adapters or base is not linear:
            return adapted(self._matrix(base), adapters) if self.has_kernels else None
        if type(linear) is nn.Linear:
            weight = plain_weight(linear, self.dtype) if self.takes_plain and linear.bias is None else None
            return None if weight is None else plain_matrix(weight)
        # Asked of the class: adapters' and other libraries' layers have no such attribute.
        is_packed = self.takes_packed and getattr(type(linear), "is_packed", False)
        is_known = is_packed and self.dtype == torch.bfloat16 and not has_hooks(linear)
        return linear.for_kernel() if is_known else None

    def _norm(self, norm: Any, inputs: Linears | None = None) -> int | None:
        """The address of an RMSNorm's weight; None where the module must be called.

        With more rows than kernels take of plain matrices, and before `inputs` that torch multiplies, it must be: a
        layer has the same bits then whoever computes it, as those that accelerate brings from elsewhere.
        """
        serves = self.takes_plain or inputs is None or inputs.together is not None or any(inputs.each)
        weight = norm._parameters["weight"] if serves and unwatched_formula(norm) == "rms_norm" else None
        is_known = self.has_kernels and is_plain(weight, self.dtype) and weight.shape == (self.size,)
        return weight.data_ptr() if is_known else None
