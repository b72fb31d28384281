"""Whether the kernels of `gpu_layer` are right on a device, before their first use there.

A kernel cannot be known to be right where it never ran. So it is launched on random numbers of the shapes, strides and
dtypes at hand, with factors that show, and each result is compared with its formula in float64. One that fails or is
wrong is not used for these as long as the process lives. Nothing is checked during the capture of a CUDA graph, which
holds what was checked before.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .waiting import log_if_slow

logger = logging.getLogger("llamoe")

# What is wrong with a kernel, by what decides of its code; empty if nothing is.
_FAILURES: dict[tuple, str] = {}


def is_right(kind: tuple, compute: Callable[..., torch.Tensor], *given: Any) -> bool:
    """Whether a kernel is right.

    Args:
        kind: its name, and what decides of the code that is compiled.
        compute: launches it.
        *given: arguments of `compute`.
    """
    device = given[0].device if isinstance(given[0], torch.Tensor) else given[0].parts.device
    kind = (*kind, device)
    if kind not in _FAILURES:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            _tell_of_capture(kind[0], device)
            return False
        with log_if_slow("llamoe: checking a kernel for few rows, once in this process"):
            failure = _find_difference(compute, given, device)
        if failure is None:
            return False
        _FAILURES[kind] = failure
        if failure:
            logger.warning(
                "llamoe does not use its kernel %s for few rows on %s: %s. torch's calls take its place.",
                kind[0],
                device,
                failure,
            )
    return not _FAILURES[kind]


def failures() -> list[str]:
    """What is wrong with kernels that this process has checked."""
    return [failure for failure in _FAILURES.values() if failure]


@functools.cache
def _tell_of_capture(name: str, device: torch.device) -> None:
    logger.info(
        "llamoe: a CUDA graph is captured on %s before the kernel %s for few rows was checked, so it is not used in "
        "it. One pass of few tokens before capturing has it checked.",
        device,
        name,
    )


@torch.no_grad()
def _find_difference(compute: Callable[..., torch.Tensor], given: tuple, device: torch.device) -> str | None:
    """How a kernel differs from its formula, or fails; None if that cannot be told now."""
    generator = torch.Generator(device).manual_seed(1)

    def drawn(each: Any) -> Any:
        if isinstance(each, float):
            # The model's own numbers prove less: an eps that 16 bits do not show, a temperature of one, a scale that
            # makes results too large for float16.
            return 1.5
        # New adapters are zeros, and with those anything would be right.
        if not isinstance(each, torch.Tensor) or not each.is_floating_point():
            return each
        empty = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)
        return empty.normal_(generator=generator)

    try:
        arguments = tree_map(drawn, given)
        found = compute(*arguments)
        wanted, allowed = FORMULAS[compute.__name__](*arguments)
    except torch.OutOfMemoryError:
        # It says nothing of the kernel, and later there may be room.
        return None
    # Compilers, assemblers and drivers raise errors of their own kinds, and a model must run without them.
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
    difference = (found.double() - wanted).abs()
    is_wrong = ~(difference <= allowed)
    if not is_wrong.any():
        return ""
    excess = torch.where(is_wrong, difference - allowed, -torch.inf).nan_to_num(torch.inf)
    place = int(excess.argmax())
    is_, should, most = (float(each.flatten()[place]) for each in (found, wanted, allowed))
    count = f"{int(is_wrong.sum())} of {wanted.numel()}"
    return f"{count} numbers are wrong, one is {is_:.6g} and should be {should:.6g} (± {most:.2g})"


# Each returns the results in float64, and what rounding explains: results are rounded wherever torch's calls round
# them, and sums are float32.

_STEP = torch.finfo(torch.float32).eps


def _rounding(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Twice what rounding changes numbers by, at most."""
    found = torch.finfo(dtype)
    return found.eps * (y.abs() + found.smallest_normal)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.double()
    normalized = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    y = normalized * weight.double()
    allowed = _rounding(normalized, x.dtype) * weight.double().abs() + _rounding(y, x.dtype)
    return y, allowed + 16 * _STEP * y.abs()


def _thin(x_NI: torch.Tensor, factors: Any, ids_N: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    found, spread = [], []
    for a in factors:
        x_NI1, exists_N1 = (
            x_NI.to(a.dtype).double()[..., None],
            torch.ones_like(x_NI[:, :1], dtype=torch.bool),
        )
        if ids_N is None:
            a_NrI = a.double().expand(len(x_NI), -1, -1)
        else:
            exists_N1 = ((ids_N >= 0) & (ids_N < len(a)))[:, None]
            a_NrI = a[torch.where(exists_N1[:, 0], ids_N, 0)].double()
        found.append(torch.where(exists_N1, (a_NrI @ x_NI1)[..., 0], 0.0))
        spread.append(torch.where(exists_N1, (a_NrI.square() @ x_NI1.square())[..., 0], 0.0))
    return torch.cat(found, 1), 4 * _STEP * x_NI.shape[1] ** 0.5 * torch.cat(spread, 1).sqrt() + _STEP


def _update(rows: Any, dtype: torch.dtype, ids_N: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    total = rows.parts.double().sum(0)
    allowed = _rounding(total, dtype) + 4 * _STEP * rows.parts.double().abs().sum(0)
    if rows.thin is None:
        return total, allowed
    expert_N = torch.zeros(len(total), dtype=torch.long, device=total.device) if ids_N is None else ids_N
    exists_N = (expert_N >= 0) & (expert_N < len(rows.b))
    b_NOr = rows.b[torch.where(exists_N, expert_N, 0)].double()
    thin_Nr1 = rows.thin.double()[..., None]
    y = total + rows.scale * (b_NOr @ thin_Nr1)[..., 0]
    sums = abs(rows.scale) * (b_NOr.abs() @ thin_Nr1.abs())[..., 0]
    return y, allowed + _rounding(y, dtype) + 16 * _STEP * sums


def _gate(
    gate: Any, up: Any, dtype: torch.dtype, ids_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    (gate, gate_allowed), (up, up_allowed) = (_update(each, dtype, ids_N) for each in (gate, up))
    silu = gate * gate.sigmoid()
    y = silu * up
    # SiLU is nowhere steeper than 1.1.
    allowed = 1.1 * gate_allowed * (up.abs() + up_allowed) + silu.abs() * up_allowed
    allowed = allowed + _rounding(silu, dtype) * up.abs() + _rounding(y, dtype)
    return y, allowed + 16 * _STEP * y.abs()


def _turn(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: Any,
    sin: Any,
    positions: Any,
    is_interleaved: bool,
    eps: float | None,
    scales: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    x, dtype, size = torch.cat((query, key), 2).double(), query.dtype, query.shape[3]
    allowed = torch.zeros_like(x)
    if cos is not None:
        pairs = x.unflatten(3, (-1, 2)) if is_interleaved else x.unflatten(3, (2, -1)).transpose(3, 4)
        (first, second), cos, sin = pairs.unbind(4), cos.double(), sin.double()
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), 4)
        sizes = (first * cos).abs() + (second * sin).abs(), (second * cos).abs() + (first * sin).abs()
        sizes = torch.stack(sizes, 4)
        x, sizes = (
            each.flatten(3) if is_interleaved else each.transpose(3, 4).flatten(3) for each in (turned, sizes)
        )
        allowed = _rounding(x, dtype) + 8 * _STEP * sizes
    if eps is not None:
        root = (x.square().sum(3, keepdim=True) / size + eps).sqrt()
        # The root changes with all that it is of.
        allowed = allowed / root + (x / root).abs() * allowed.square().mean(3, keepdim=True).sqrt() / root
        x = x / root
        allowed = allowed + _rounding(x, dtype) + 16 * _STEP * x.abs()
    if positions is not None:
        steps = ((positions.double() + 1) / scales[0]).floor().clamp(min=0)
        factor = (torch.log1p(steps) * scales[1] + 1)[..., None, None]
        factor = torch.cat(
            (
                factor.expand(-1, -1, query.shape[2], 1),
                torch.ones_like(factor).expand(-1, -1, key.shape[2], 1),
            ),
            2,
        )
        x, allowed = x * factor, allowed * factor.abs()
        allowed = allowed + _rounding(x, dtype) + 16 * _STEP * x.abs()
    return x, allowed


FORMULAS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    each.__name__: each for each in (_norm, _thin, _update, _gate, _turn)
}
"""By the name of the function that launches a kernel."""
