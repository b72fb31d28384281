"""What int4 and int8 share: scales and codes of weights, from their range or with the least squared error.

A weight w becomes `code * scale + offset`. For given codes the best scale and offset follow from a linear regression of
the weights on their codes, whose error is known without forming it. `search` tries several ranges, each a part of the
full one: a narrower range cuts off the largest weights, and resolves the others better.

Shapes: N groups, G weights of a group, O outputs, I inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..kernels import FEW_BITS_FLOAT_MAX_ROWS, rows_in_bytes
from .format import Format
from .int4_layout import BLOCK

# Parts of the full range that are tried, for 4 and for 8 bits. With 4 bits some 0.9 is mostly best.
_RANGES_OF_4_BITS = (1.0, 0.93, 0.86, 0.79)
_RANGES_OF_8_BITS = (1.0, 0.97, 0.94)


@dataclass(frozen=True, kw_only=True)
class FewBits(Format):
    """Codes of 4 or 8 bits and scales in bfloat16.

    Attributes:
        search: whether scales minimise the squared error.
        in_bytes: whether the kernels of a CPU quantize rows to 8 bits.
    """

    search: bool = True
    in_bytes: bool = False
    suffixes = ("", "_scale")
    compute_dtype = torch.bfloat16

    @cached_property
    def kernel_max_rows(self) -> int:
        """Up to this many rows the compiled kernels are faster than unpacking once."""
        return rows_in_bytes() if self.in_bytes else FEW_BITS_FLOAT_MAX_ROWS

    @property
    def exact(self) -> Format:
        return replace(self, in_bytes=False)

    def empty_parts(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        """Make the parts of a weight, to be filled."""
        parts = self.parts((weight_OI.shape[0], weight_OI.shape[1]))
        return [torch.empty(shape, dtype=dtype, device=weight_OI.device) for shape, dtype in parts]


def rows_of(weight_OI: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield outputs that are quantized at a time, in whole blocks, and their weights in float32."""
    # What a processor's cache holds, or, where launches cost, half a gigabyte: the largest heads in vocabularies.
    numbers = 1 << 17 if weight_OI.is_cpu else 1 << 27
    step = max(numbers // weight_OI.shape[1] // BLOCK, 1) * BLOCK
    for start in range(0, len(weight_OI), step):
        some = slice(start, start + step)
        yield some, weight_OI[some].contiguous().float()


def asymmetric(weights_NG: torch.Tensor, search: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 to 15, `[N, G]` uint8, and scales and offsets, `[N, 1]` bfloat16.

    A weight is about `(code - 8) * scale + offset`; the codes are the best for the rounded scales and offsets.

    Args:
        weights_NG: float32.
        search: whether several ranges are tried.
    """
    low, high = weights_NG.aminmax(dim=1, keepdim=True)
    scale = (high - low).div_(15)
    offset = torch.add(low, scale, alpha=8)
    if search:
        scale, offset = _best_line(weights_NG, scale, offset)
    # Groups whose weights are all equal.
    scale = torch.where(scale > 0, scale, 1.0).to(torch.bfloat16)
    offset = offset.to(torch.bfloat16)
    per_scale = scale.float().reciprocal_()
    # (weight - offset) / scale + 8 in one pass.
    codes = torch.addcmul(torch.sub(8, offset.float() * per_scale), weights_NG, per_scale)
    return codes.round_().clamp_(0, 15).to(torch.uint8), scale, offset


def _best_line(
    weights_NG: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset of the range with the least squared error, by regression of the weights on their codes."""
    mean = weights_NG.mean(1, keepdim=True)
    size = weights_NG.shape[1]
    codes = torch.empty_like(weights_NG)
    best = torch.full_like(scale, -1.0)
    best_scale, best_offset = scale, offset
    # The middle of the range stays; a narrower range is around it.
    middle = torch.sub(offset, scale, alpha=0.5)
    for part in _RANGES_OF_4_BITS:
        step = scale * part
        # Codes from -8 to 7.
        torch.sub(weights_NG, middle, out=codes).div_(step).sub_(0.5).round_().clamp_(-8, 7)
        sum_c = codes.sum(1, keepdim=True)
        spread = torch.linalg.vecdot(codes, codes)[:, None] - sum_c * sum_c / size
        product = torch.linalg.vecdot(codes, weights_NG)[:, None] - sum_c * mean
        # What the regression explains of the weights' variance.
        explained = (product * product).div_(spread)
        is_better = explained > best
        best = torch.where(is_better, explained, best)
        slope = product / spread
        best_scale = torch.where(is_better, slope, best_scale)
        best_offset = torch.where(is_better, mean - slope * sum_c / size, best_offset)
    return best_scale, best_offset


def symmetric(weights_NG: torch.Tensor, search: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes from -127 to 127, `[N, G]` int8, and scales, `[N, 1]` bfloat16; arguments as in `asymmetric`."""
    largest = weights_NG.abs().amax(1, keepdim=True)
    scale = largest / 127
    if search:
        best, found = torch.full_like(scale, -1.0), scale
        for part in _RANGES_OF_8_BITS:
            codes = torch.div(weights_NG, scale * part).round_().clamp_(-127, 127)
            product = torch.linalg.vecdot(codes, weights_NG)[:, None]
            spread = torch.linalg.vecdot(codes, codes)[:, None]
            explained = product * product / spread
            is_better = explained > best
            best = torch.where(is_better, explained, best)
            found = torch.where(is_better, product / spread, found)
        scale = found
    # Rows of zeros. What is not a number stays, and is found.
    scale = torch.where(scale == 0, 1.0, scale).to(torch.bfloat16)
    codes = torch.mul(weights_NG, scale.float().reciprocal_())
    return codes.round_().clamp_(-127, 127).to(torch.int8), scale
