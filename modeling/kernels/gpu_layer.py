"""What stands between the products of a layer on a GPU, in inference: norms, rotation, what adapters add to few rows.

A step of decoding is bound by launches where weights are few or packed: torch launches six kernels to rotate queries
and keys, and with an adapter, as peft computes it, six more for each linear layer. Here both are one or two. In prompts
rotation and norms are bound by memory: a kernel reads and writes 4 bytes a number in 16 bits, torch's calls 38 and 8.
By calculation, for 7 billion parameters and 8192 tokens at 3.3 TB and 600 TFLOP a second (an H100, assumed), a layer
takes 0.6 ms less of 6; no card was timed.

Each function says None where its kernel does not serve: on other devices, with gradients, while a compiler or a tracer
records, for dtypes that it does not know, and where it was found wrong or cannot be compiled (`gpu_layer_check`). The
caller then computes what the kernel would have computed. `LLAMOE_GPU_SHORTCUTS=0` in the environment, read when llamoe
is imported, turns all of them off.

Shapes: N rows, O outputs, I inputs, r rank, S splits of a sum, E experts, D head_dim, B batch, T tokens.
"""

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .._private_api import torch_modes_active
from .cpp_kernels import Adapter
from .cpu import apply_gate, apply_linear, has_hooks, is_silu
from .gpu_layer_check import is_right
from .known_modules import unadapted
from .limits import TRITON_UNSORTED_MAX_ROWS
from .packed_rows import why_no_gpu_kernel
from .tracing import is_recorded

GPU_SHORTCUTS_ARE_ON = os.environ.get("LLAMOE_GPU_SHORTCUTS", "1") != "0"
"""Whether these kernels may be used at all."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Factors of a higher rank would not fit into registers; a layer with such an adapter is called as a module.
_MAX_RANK = 256
# Rows that are enough for a check.
_CHECKED = 8
# Layers that share their rows, as queries, keys and values do.
_MAX_FACTORS = 3


class Rows(NamedTuple):
    """Products of few rows, not yet finished: the parts of sums, and what an adapter adds to these.

    Attributes:
        parts: `[S, N, O]`, whose sum over the first axis, rounded to the dtype of `x`, is the product.
        thin: `[N, r]` float32, rows times an adapter's first factor; None without an adapter.
        b: `[E, O, r]`, the second factor, of experts one each.
        scale: the factor of the update.
    """

    parts: torch.Tensor
    thin: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0

    def columns(self, begin: int, end: int) -> "Rows":
        """Some of the outputs."""
        b = None if self.b is None else self.b[:, begin:end]
        return self._replace(parts=self.parts[..., begin:end], b=b)


def takes_few_rows(x: torch.Tensor) -> bool:
    """Whether the kernels here serve these rows `[..., size]`, and they are few."""
    return _takes_rows(x) and x.numel() <= TRITON_UNSORTED_MAX_ROWS * x.shape[-1]


def _takes_rows(x: torch.Tensor) -> bool:
    """Whether the kernels here serve rows, whatever their number."""
    return (
        is_on_gpu(x)
        and not torch.is_grad_enabled()
        # Before sizes are compared, which would add guards, or limit an exported program to few rows.
        and not is_recorded(x)
        and x.dtype in _DTYPES
        and x.numel() > 0
        and not torch.is_autocast_enabled("cuda")
        and not torch_modes_active(but_for_devices=True)
        and _serves(x.device)
    )


@functools.cache
def _serves(device: torch.device) -> bool:
    return GPU_SHORTCUTS_ARE_ON and why_no_gpu_kernel(device) is None


def is_on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor may have kernels here: asked for each product, so of the device's type alone."""
    return x.is_cuda


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not a shard, or another library's."""
    return type(tensor) in (torch.Tensor, nn.Parameter)


def rms_norm_on_gpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """`x / sqrt(mean(x ** 2) + eps)`, rounded to the dtype of both, times the weight; of any number of rows."""
    if (
        not _takes_rows(x)
        or not is_ordinary(weight)
        or (weight.dtype, weight.device, weight.shape) != (x.dtype, x.device, x.shape[-1:])
        or not weight.is_contiguous()
    ):
        return None
    x, size = x.contiguous(), x.shape[-1]
    if not is_right(("norm", x.dtype, size), _norm, x.view(-1, size)[:_CHECKED], weight, eps):
        return None
    return _norm(x, weight, eps)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y, size = torch.empty_like(x), x.shape[-1]
    block = min(_power_of_two(size), 4096)
    launch("rms_norm_kernel", (x.numel() // size,), x, weight, y, size, eps, BLOCK=block)
    return y


class Turn(NamedTuple):
    """What a layer does with queries and keys before attention.

    Attributes:
        tables: of `rotary_tables`; empty without rotation.
        is_interleaved: as there.
        eps: of a norm without a weight; None without one.
        temperature: positions `[B or 1, T]` by which queries grow, `floor_scale` and `attn_scale`; None if they do not.
    """

    tables: tuple[torch.Tensor, ...] = ()
    is_interleaved: bool = False
    eps: float | None = None
    temperature: tuple[torch.Tensor, float, float] | None = None


def turn_on_gpu(query: torch.Tensor, key: torch.Tensor, turn: Turn) -> torch.Tensor | None:
    """Queries and keys `[B, T, heads, D]`, joined along the heads, behind rotation, norm and temperature."""
    batch, length, heads, size = query.shape
    if not _takes_rows(query) or size % 2 or key.dtype != query.dtype:
        return None
    tables, by_row = turn.tables, {length, batch * length}
    if tables and tables[0].is_complex():
        angles = torch.view_as_real(tables[0])
        tables = angles[..., 0], angles[..., 1]
    elif tables and turn.is_interleaved:
        return None
    elif tables:
        own, other = tables
        tables = own[..., : size // 2], other[..., size // 2 :]
    for table in tables:
        is_dense = table.dim() == 4 and table.stride(0) == table.shape[1] * table.stride(1)
        if (table.dtype, table.device) != (torch.float32, query.device) or table.shape[-1] * 2 != size:
            return None
        if not is_dense:
            return None
        by_row &= {table.shape[0] * table.shape[1]}
    positions, scales = None, (1.0, 0.0)
    if turn.temperature is not None:
        positions, *numbers = turn.temperature
        by_row &= {positions.numel()} if positions.device == query.device else set()
        positions, scales = positions.contiguous(), tuple(map(float, numbers))
    if not by_row:
        return None
    strides = [(table.stride(1), table.stride(3)) for table in tables]
    how = turn.is_interleaved, turn.eps, scales
    kind = ("turn", query.dtype, heads, key.shape[2], size, *strides)
    kind += turn.is_interleaved, turn.eps is None, positions is None
    rows = query.contiguous(), key.contiguous(), *(tables or (None, None)), positions
    some = (None if each is None else each[:1, :_CHECKED] for each in rows)
    return _turn(*rows, *how) if is_right(kind, _turn, *some, *how) else None


def _turn(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    is_interleaved: bool,
    eps: float | None,
    scales: tuple[float, float],
) -> torch.Tensor:
    batch, length, heads, size = query.shape
    both, rotates = query.new_empty(batch, length, heads + key.shape[2], size), cos is not None
    table: Any = cos if rotates else positions
    launch(
        "rotate_kernel",
        (batch * length, both.shape[2]),
        query,
        key,
        cos if rotates else query,
        sin if rotates else query,
        query if positions is None else positions,
        both,
        1 if table is None else table.shape[0] * table.shape[1],
        table.stride(1) if rotates else 0,
        table.stride(3) if rotates else 0,
        eps or 0.0,
        *scales,
        HEADS=heads,
        HALF=size // 2,
        ROTATES=rotates,
        INTERLEAVED=is_interleaved,
        NORMALIZES=eps is not None,
        TUNES=positions is not None,
        BLOCK=_power_of_two(size // 2),
        num_warps=1,
    )
    return both


def _rows(linears: Sequence[nn.Module], x: torch.Tensor, is_gated: bool = False) -> list[Rows] | None:
    """The products of the same rows with up to three linear layers; None where modules had better be called.

    That is where no layer has an adapter, unless layers that are gated have parts of sums to be added. Layers with
    several adapters, or such as the kernels do not add, are called as modules among the others.

    Args:
        linears: `nn.Linear`s, or modules of adapters or quantizers that replace them.
        x: `[..., I]`.
        is_gated: whether one launch finishes all of them.
    """
    if not takes_few_rows(x):
        return None
    found = [unadapted(linear) for linear in linears]
    adapters = [others[0] if len(others) == 1 and _takes(others[0], x) else None for _, others in found]
    factors = [adapter.a for adapter in adapters if adapter is not None]
    if not factors and not (is_gated and all(hasattr(type(each), "parts_of_product") for each in linears)):
        return None
    # One launch reads all factors as one dtype.
    is_mixed = len({factor.dtype for factor in factors}) > 1
    x_NI = x.reshape(-1, x.shape[-1]).contiguous()
    thin = thin_rows(x_NI, factors) if factors and not is_mixed else None
    if factors and thin is None:
        return None
    rows, begin = [], 0
    for linear, (base, _), adapter in zip(linears, found, adapters, strict=True):
        layer = linear if adapter is None else base
        parts = _parts(layer, x_NI) if is_gated or adapter is not None else None
        parts = layer(x).reshape(1, len(x_NI), -1) if parts is None else parts
        if adapter is None or thin is None:
            rows.append(Rows(parts))
        else:
            end = begin + len(adapter.a)
            rows.append(Rows(parts, thin[:, begin:end], adapter.b[None], float(adapter.scale)))
            begin = end
    return rows


def _parts(linear: nn.Module, x_NI: torch.Tensor) -> torch.Tensor | None:
    """`[S, N, O]`, of which a linear layer's product is the sum; None of a layer that must be called."""
    of_parts = getattr(type(linear), "parts_of_product", None)
    return None if of_parts is None or has_hooks(linear) else of_parts(linear, x_NI)


def _takes(adapter: Adapter, x: torch.Tensor) -> bool:
    a, b, *_ = adapter
    return (
        all(each.dtype in _DTYPES and each.device == x.device and is_ordinary(each) for each in (a, b))
        and a.shape[1] == x.shape[-1]
        and a.is_contiguous()
        and len(a) <= _MAX_RANK
    )


def thin_rows(
    x_NI: torch.Tensor, factors: Sequence[torch.Tensor], ids_N: torch.Tensor | None = None
) -> torch.Tensor | None:
    """`[N, all ranks]` float32: rows times factors `[r, I]`, or `[E, r, I]` with each row's expert."""
    ranks = [each.shape[-2] for each in factors]
    kind = ("thin", x_NI.dtype, factors[0].dtype, *ranks, factors[0].stride(), ids_N is None)
    given = x_NI, factors, ids_N
    return _thin(*given) if is_right(kind, _thin, *given) else None


def _thin(x_NI: torch.Tensor, factors: Sequence[torch.Tensor], ids_N: torch.Tensor | None) -> torch.Tensor:
    (num_rows, num_in), ranks = x_NI.shape, [each.shape[-2] for each in factors]
    out = x_NI.new_empty(num_rows, sum(ranks), dtype=torch.float32)
    stride_expert, stride_rank, stride_in = (0, 0, 0, *factors[0].stride())[-3:]
    launch(
        "thin_kernel",
        out.shape,
        x_NI,
        *factors,
        *factors[:1] * (_MAX_FACTORS - len(factors)),
        x_NI if ids_N is None else ids_N,
        out,
        1 if ids_N is None else len(factors[0]),
        num_in,
        stride_expert,
        stride_rank,
        stride_in,
        BY_ID=ids_N is not None,
        SECOND=ranks[0],
        THIRD=sum(ranks[:2]),
        BLOCK=min(_power_of_two(num_in), 1024),
    )
    return out


def apply_linears(linears: Sequence[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    """`[linear(x) for linear in linears]` of up to three layers, for any number of rows."""
    return _finished(_rows(linears, x), linears, x)


def _finished(
    found: Sequence[Rows] | None, linears: Sequence[nn.Module], x: torch.Tensor
) -> list[torch.Tensor]:
    """Each layer's outputs. What was called is not called again: something may watch it."""
    finished = [update_rows(each, x.dtype) for each in found or ()]
    return [
        apply_linear(linear, x) if y_NO is None else y_NO.view(*x.shape[:-1], -1)
        for linear, y_NO in zip(linears, finished or [None] * len(linears), strict=True)
    ]


def apply_gated(gate: nn.Module, up: nn.Module, act_fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`act_fn(gate(x)) * up(x)` for any number of rows."""
    found = _rows((gate, up), x, is_gated=True) if is_silu(act_fn) else None
    y_NO = None if found is None else gate_rows(*found, x.dtype)
    if y_NO is not None:
        return y_NO.view(*x.shape[:-1], -1)
    return apply_gate(act_fn, *_finished(found, (gate, up), x))


def update_rows(rows: Rows, dtype: torch.dtype, ids_N: torch.Tensor | None = None) -> torch.Tensor | None:
    """`[N, O]`: the products with their updates; `ids_N` has the expert of each row, if there are experts."""
    if len(rows.parts) == 1:
        # As the layer gave it.
        dtype = rows.parts.dtype
        if rows.thin is None:
            return rows.parts[0]
    kind = ("update", dtype, *_kind(rows), ids_N is None)
    given = rows, dtype, ids_N
    return _update(*given) if is_right(kind, _update, *given) else None


def _update(rows: Rows, dtype: torch.dtype, ids_N: torch.Tensor | None) -> torch.Tensor:
    _, num_rows, num_out = rows.parts.shape
    out = rows.parts.new_empty(num_rows, num_out, dtype=dtype)
    arguments, constants = _of(rows, "")
    block = _block(constants["RANKS"])
    launch(
        "update_kernel",
        (num_rows, -(-num_out // block)),
        *arguments,
        out if ids_N is None else ids_N,
        out,
        1 if rows.b is None else len(rows.b),
        num_out,
        **constants,
        BY_ID=ids_N is not None,
        BLOCK=block,
    )
    return out


def gate_rows(
    gate: Rows, up: Rows, dtype: torch.dtype, ids_N: torch.Tensor | None = None
) -> torch.Tensor | None:
    """`[N, O]`: `silu(gate) * up` of both with their updates."""
    if any(len(each.parts) == 1 and each.parts.dtype != dtype for each in (gate, up)):
        return None
    kind = ("gate", dtype, *_kind(gate), *_kind(up), ids_N is None)
    given = gate, up, dtype, ids_N
    return _gate(*given) if is_right(kind, _gate, *given) else None


def _gate(gate: Rows, up: Rows, dtype: torch.dtype, ids_N: torch.Tensor | None) -> torch.Tensor:
    _, num_rows, num_out = gate.parts.shape
    out = gate.parts.new_empty(num_rows, num_out, dtype=dtype)
    (of_gate, constants), (of_up, more) = _of(gate, "GATE_"), _of(up, "UP_")
    block = _block(max(constants["GATE_RANKS"], more["UP_RANKS"]))
    launch(
        "gate_kernel",
        (num_rows, -(-num_out // block)),
        *of_gate,
        *of_up,
        out if ids_N is None else ids_N,
        out,
        next((len(each.b) for each in (gate, up) if each.b is not None), 1),
        num_out,
        **constants,
        **more,
        BY_ID=ids_N is not None,
        BLOCK=block,
    )
    return out


def _kind(rows: Rows) -> tuple:
    """What decides of the code that is compiled."""
    found = rows.parts.dtype, len(rows.parts), rows.parts.shape[2], rows.parts.stride(1)
    if rows.thin is None or rows.b is None:
        return found
    return *found, rows.thin.shape[1], rows.thin.stride(0), rows.b.dtype, rows.b.stride()


def _of(rows: Rows, prefix: str) -> tuple[list[Any], dict[str, int]]:
    """A kernel's arguments for some products, and its constants."""
    parts, thin, b, scale = rows
    rank = 0 if thin is None else thin.shape[1]
    arguments = [parts, *parts.stride()[:2]]
    if thin is None or b is None:
        arguments += [parts, 0, parts, 0, 0, 0, 1.0]
    else:
        arguments += [thin, thin.stride(0), b, *b.stride(), scale]
    names = {"SPLITS": len(parts), "RANK": rank, "RANKS": _power_of_two(rank)}
    return arguments, {prefix + name: value for name, value in names.items()}


def _block(ranks: int) -> int:
    """Outputs of a program: with their factors as many numbers as its threads have registers for."""
    return max(16, min(256, 4096 // ranks))


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def launch(name: str, grid: Sequence[int], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Launch a kernel of `layer_triton` on the device of its first tensor."""
    # Imported late: importing Triton takes long, and it is not installed everywhere.
    from . import layer_triton

    device = arguments[0].device
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        getattr(layer_triton, name)[tuple(grid)](*arguments, num_warps=num_warps, **constants)
