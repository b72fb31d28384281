"""What a decoder layer of few rows on a CPU is made of besides products: calls of the compiled kernels.

Shapes: N rows, H hidden size, F intermediate size, K cached keys; in a mixture E experts, of which a row has `top_k`.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .cpp_kernels import BITS, Matrix, Products, are_alike, library, place


def rms_norm(x: torch.Tensor, weight: int, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last axis, where there are kernels.

    Args:
        x: `[..., H]` in bfloat16 or float32 on the CPU.
        weight: address of `[H]` in the same dtype.
        eps: added to the mean square.
    """
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    library().rms_norm(BITS[x.dtype], x.data_ptr(), weight, y.data_ptr(), x.numel() // size, size, eps)
    return y


class Swiglu(NamedTuple):
    """The matrices of a feed-forward by their addresses, which are right as long as the tensors are there."""

    inputs: int
    outputs: int
    placed: Any


def prepare_swiglu(gate: Matrix, up: Matrix | None, down: Matrix) -> Swiglu | None:
    """What computes `down(silu(gate(x)) * up(x))`; None where the matrices do not fit, or there is no kernel.

    Args:
        gate: F outputs, or those of gate followed by those of up.
        up: F outputs, or None.
        down: F inputs, or more after padding.
    """
    size = gate.outputs // 2 if up is None else gate.outputs
    matrices = [gate, down] if up is None else [gate, up, down]
    fits = (
        are_alike(matrices)
        and (up is None or (up.inputs, up.outputs) == (gate.inputs, size))
        and 0 <= down.inputs - size < max(gate.group_size, 1)
    )
    return Swiglu(gate.inputs, down.outputs, place(matrices)) if fits and library() is not None else None


def swiglu(x: torch.Tensor, matrices: Swiglu) -> torch.Tensor:
    """`down(silu(gate(x)) * up(x))`, `[N, H]`."""
    inputs, outputs, placed = matrices
    x, num_rows = x.contiguous(), x.numel() // inputs
    y = x.new_empty(num_rows, outputs)
    threads = torch.get_num_threads()
    library().feed_forward(x.data_ptr(), y.data_ptr(), num_rows, placed, len(placed), threads)
    return y


def normalized_swiglu(x: torch.Tensor, norm: int, eps: float, matrices: Swiglu) -> torch.Tensor:
    """`x + swiglu(rms_norm(x))` for as many outputs as inputs, output-first; `norm` as in `rms_norm`."""
    inputs, _, placed = matrices
    x = x.contiguous()
    y = torch.empty_like(x)
    rows = BITS[x.dtype], x.data_ptr(), norm, eps, y.data_ptr(), x.numel() // inputs
    library().normalized_feed_forward(*rows, placed, len(placed), torch.get_num_threads())
    return y


def cpp_feed_forward(
    x_NH: torch.Tensor, gate: Matrix, up: Matrix | None, down: Matrix
) -> torch.Tensor | None:
    """`down(silu(gate(x)) * up(x))`, `[N, H]` in the dtype of the rows; None where there is no kernel.

    Args:
        x_NH: on the CPU; float32 for matrices of 32 bits, otherwise bfloat16.
        gate: as in `prepare_swiglu`, like the others.
    """
    matrices = prepare_swiglu(gate, up, down)
    return None if matrices is None or matrices.inputs != x_NH.shape[1] else swiglu(x_NH, matrices)


def has_feed_forward(num_in: int, gate: Matrix, down: Matrix) -> bool:
    """Whether `cpp_feed_forward` has a kernel for rows of so many numbers, where gate and up are one matrix."""
    matrices = prepare_swiglu(gate, None, down)
    return matrices is not None and matrices.inputs == num_in


class Routing(NamedTuple):
    """A router by its addresses, which are right as long as its tensors are there."""

    top_k: int
    placed: Any
    how: Any


class _How(ctypes.Structure):
    """How a router chooses, as the kernels know it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("top_k", "takes_softmax", "chooses_by_softmax", "normalizes")),
        ("scales_input", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
    )


def prepare_routing(
    router: Matrix, top_k: int, bias_E: torch.Tensor | None = None, **how: bool
) -> Routing | None:
    """What chooses experts for rows; None where there is no kernel.

    Args:
        router: plain, E outputs.
        top_k: experts of a row.
        bias_E: float32, added to the logits where experts are chosen; it stays where it is.
        **how: `takes_softmax`, `chooses_by_softmax`, `normalizes` and `scales_input`, attributes of a `Router`.
    """
    if library() is None or not chooses_as_torch(router.outputs, top_k):
        return None
    return _routing(router, top_k, bias_E, **how)


def _routing(router: Matrix, top_k: int, bias_E: torch.Tensor | None = None, **how: bool) -> Routing:
    address = None if bias_E is None else bias_E.data_ptr()
    return Routing(top_k, place([router]), _How(top_k=top_k, bias=address, **how))


@lru_cache
def chooses_as_torch(num_experts: int, top_k: int) -> bool:
    """Whether the kernel takes the same ones of equal logits as `torch.topk`, which promises no order of them."""
    generator = torch.Generator("cpu").manual_seed(0)
    # Whatever dtype and device are the default where this is asked first.
    given = {"dtype": torch.float32, "device": "cpu"}
    logits_NE = torch.randint(0, 4, (40, num_experts), generator=generator, **given)
    router = Matrix(32, 0, torch.eye(num_experts, **given), None)
    routing = _routing(router, top_k)
    with torch.device("cpu"), torch.inference_mode():
        _, _, ids_NK = route(logits_NE, None, 0.0, routing)
        return torch.equal(ids_NK, logits_NE.topk(top_k, -1).indices)


def route(
    x: torch.Tensor, norm: int | None, eps: float, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rms_norm(x)`, the scores of its experts `[N, top_k]` and their indices, as a `Router` returns both.

    Args:
        x: `[..., H]` in the router's dtype.
        norm: as in `rms_norm`; None for rows that are normalized already.
        eps: as in `rms_norm`.
        routing: the router.
    """
    top_k, placed, how = routing
    x, num_rows = x.contiguous(), x.numel() // placed[0].inputs
    y = x if norm is None else torch.empty_like(x)
    ids_NK = x.new_empty(num_rows, top_k, dtype=torch.int64)
    scores_NK = x.new_empty(num_rows, top_k, dtype=torch.float32)
    library().route(
        BITS[x.dtype], x.data_ptr(), norm, eps, y.data_ptr(), num_rows, placed, ctypes.byref(how), ids_NK.data_ptr(),
        scores_NK.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return y, scores_NK.to(x.dtype) if how.scales_input else scores_NK, ids_NK


class Stacks(NamedTuple):
    """The experts of a layer in memory.

    Attributes:
        first: of the first expert gate and up in one, and down.
        strides: of each of both the bytes from one expert's codes to the next one's, and from scales to scales.
    """

    first: Sequence[Matrix]
    strides: Sequence[tuple[int, int]]


class Mixture(NamedTuple):
    """A router and its experts by their addresses, which are right as long as the tensors are there."""

    routing: Routing
    placed: Any
    strides: Any


def prepare_mixture(
    routing: Routing, router: Matrix, stacks: Stacks, shared: Sequence[Matrix] | None
) -> Mixture | None:
    """What computes a mixture; None where sizes or formats do not fit.

    Args:
        routing: made of the router.
        router: H inputs, E outputs.
        stacks: E experts.
        shared: gate, up and down of the shared expert, if there is one.
    """
    size, (gate_up, down) = router.inputs, stacks.first
    whole = [prepare_swiglu(gate_up, None, down), *([prepare_swiglu(*shared)] if shared else [])]
    if any(each is None or (each.inputs, each.outputs) != (size, size) for each in whole):
        return None
    (codes, scales) = zip(*stacks.strides, strict=True)
    strides = (ctypes.c_int64 * 4)(*codes, *scales)
    return Mixture(routing, place([router, gate_up, down, *(shared or ())]), strides)


def normalized_mixture(x: torch.Tensor, norm: int, eps: float, mixture: Mixture) -> torch.Tensor:
    """`x` plus the mixture of `rms_norm(x)`; `norm` as in `rms_norm`."""
    (_, _, how), placed, strides = mixture
    x = x.contiguous()
    y = torch.empty_like(x)
    rows = BITS[x.dtype], x.data_ptr(), norm, eps, y.data_ptr(), x.numel() // placed[0].inputs
    threads = torch.get_num_threads()
    library().mixture(*rows, placed, len(placed), strides, ctypes.byref(how), threads)
    return y


class _FirstHalf(ctypes.Structure):
    _fields_ = (
        *(("bits", ctypes.c_int64), ("norm", ctypes.c_void_p), ("inputs", ctypes.c_void_p)),
        *(("output", ctypes.c_void_p), ("head_dim", ctypes.c_int64), ("is_interleaved", ctypes.c_int64)),
        *((name, ctypes.c_float) for name in ("eps", "qk_eps", "scaling")),
    )


class _SecondHalf(ctypes.Structure):
    _fields_ = (
        *(("norm", ctypes.c_void_p), ("matrices", ctypes.c_void_p), ("count", ctypes.c_int64)),
        *(("strides", ctypes.c_void_p), ("how", ctypes.c_void_p), ("eps", ctypes.c_float)),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *(("first", ctypes.c_void_p), ("second", ctypes.c_void_p)),
        *(("is_rotated", ctypes.c_int64), ("is_tuned", ctypes.c_int64)),
    )


class _Room(ctypes.Structure):
    _fields_ = (
        *(("keys", ctypes.c_void_p), ("values", ctypes.c_void_p)),
        *((name, ctypes.c_int64) for name in ("head_stride", "stride", "count")),
    )


class FirstHalf(NamedTuple):
    """Norm and attention by their addresses, which are right as long as the tensors are there."""

    sizes: list[int]
    """Queries, keys and values of a token, in channels."""
    head_dim: int
    placed: Any
    kept: Any
    """What `placed` has addresses of."""


class SecondHalf(NamedTuple):
    """Norm and feed-forward or mixture, likewise."""

    placed: Any
    kept: Any


def prepare_first_half(
    dtype: torch.dtype,
    norm: int,
    eps: float,
    inputs: Products,
    output: Products,
    head_dim: int,
    scaling: float,
    is_interleaved: bool,
    qk_eps: float,
) -> FirstHalf | None:
    """What computes norm and attention of one token; None where the sizes do not fit.

    Args:
        dtype: of rows and cache.
        norm: of the RMSNorm before, as in `rms_norm`.
        eps: its eps.
        inputs: those of queries, keys and values, for rows of this dtype.
        output: that of the output projection.
        head_dim: channels of a head.
        scaling: factor of the scores.
        is_interleaved: whether the channels of a rotated pair stand side by side, or half a head apart.
        qk_eps: eps of the norm of each head of queries and keys after rotation; negative for none.
    """
    queries, keys, values = inputs.sizes
    heads, key_heads = queries // head_dim, keys // head_dim
    if (
        queries % head_dim
        or keys % head_dim
        or keys != values
        or not key_heads
        or heads % key_heads
        or (output.inputs, output.sizes) != (queries, [inputs.inputs])
    ):
        return None
    addresses = map(ctypes.addressof, (inputs.placed, output.placed))
    placed = _FirstHalf(BITS[dtype], norm, *addresses, head_dim, is_interleaved, eps, qk_eps, scaling)
    return FirstHalf(inputs.sizes, head_dim, placed, (inputs, output))


def prepare_second_half(norm: int, eps: float, whole: Swiglu | Mixture) -> SecondHalf:
    """What computes the other half after `finish`; `norm` as in `rms_norm`."""
    choice = (whole.strides, whole.routing.how) if isinstance(whole, Mixture) else ()
    matrices, *others = map(ctypes.addressof, (whole.placed, *choice))
    return SecondHalf(_SecondHalf(norm, matrices, len(whole.placed), *(others or (None, None)), eps), whole)


def project(
    x: torch.Tensor, half: FirstHalf, angles: tuple[torch.Tensor, ...], query_scale: float
) -> torch.Tensor:
    """Queries, keys and values of one token, `[channels]` side by side.

    Args:
        x: of one token, contiguous, `[..., H]` on the CPU.
        half: the norm before and the projections.
        angles: cosines and sines `[head_dim / 2]` float32, by which queries and keys are rotated; or nothing.
        query_scale: what queries are multiplied by at last.
    """
    y = x.new_empty(sum(half.sizes))
    tables = [angle.data_ptr() for angle in angles] or (None, None)
    placed, threads = ctypes.byref(half.placed), torch.get_num_threads()
    library().project(placed, x.data_ptr(), *tables, query_scale, y.data_ptr(), threads)
    return y


def finish(
    x: torch.Tensor,
    half: FirstHalf,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """`x + output(attention)` for one token that sees all keys.

    Args:
        x: what `project` was given.
        half: attention.
        queries: what `project` returned.
        keys: `[1, key heads, K, head_dim]` in the same dtype, with channels side by side.
        values: likewise.
    """
    y = torch.empty_like(x)
    cached = [(each.data_ptr(), each.stride(1), each.stride(2)) for each in (keys, values)]
    library().finish(
        ctypes.byref(half.placed), queries.data_ptr(), *cached[0], *cached[1], keys.shape[2], x.data_ptr(),
        y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return y


class Layers(NamedTuple):
    """All layers of a decoder by their addresses, which are right as long as the tensors are there."""

    placed: Any
    kept: Any
    """What `placed` has addresses of."""


def prepare_layers(layers: Sequence[tuple[FirstHalf, SecondHalf, bool, bool]]) -> Layers:
    """What computes layers one after the other: both halves, whether angles rotate, and whether queries are scaled."""
    placed = (_Layer * len(layers))()
    for each, (first, second, is_rotated, is_tuned) in zip(placed, layers, strict=True):
        each.first, each.second = ctypes.addressof(first.placed), ctypes.addressof(second.placed)
        each.is_rotated, each.is_tuned = is_rotated, is_tuned
    return Layers(placed, list(layers))


def place_rooms(rooms: Sequence[tuple[int, int, int, int, int]]) -> Any:
    """Room for tokens in the caches of layers, as `decode` takes it.

    Args:
        rooms: of each layer the addresses of keys and values, the numbers between two heads and between two tokens, and
            how many tokens are there; behind them is place for those that will be decoded.
    """
    return (_Room * len(rooms))(*rooms)


def decode(
    x: torch.Tensor, layers: Layers, rooms: Any, angles: Sequence[int], query_scale: float
) -> torch.Tensor:
    """One token through all layers, each of which writes its key and value behind those that are there.

    Args:
        x: as in `project`.
        layers: made for rows of this dtype.
        rooms: of keys and values in the same dtype, from `place_rooms`. They have a token more afterwards. Threads that
            share a model need their own.
        angles: addresses of what `project` is given, like `query_scale`, for the layers that have them.
    """
    y = torch.empty_like(x)
    placed, tables = layers.placed, angles or (None, None)
    library().decode(
        placed, len(placed), rooms, x.data_ptr(), *tables, query_scale, y.data_ptr(), torch.get_num_threads()
    )
    return y
