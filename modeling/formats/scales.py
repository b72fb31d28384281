"""Scales and codes of int4 and int8, chosen by the range of the weights or by the least squared error.

A weight is approximated by `code * scale + offset`. For fixed codes the scale and offset with the least squared error
are the linear regression of the weights on the codes. The search computes codes for several ranges, and takes the
regression with the least error: a narrower range clips the largest weights, and has finer steps for all others.

Shapes: N groups, G weights of a group.
"""

import torch

# Fractions of the full range that the search tries. For 4 bits about 0.9 is usually best.
_RANGES_OF_4_BITS = (1.0, 0.93, 0.86, 0.79)
_RANGES_OF_8_BITS = (1.0, 0.97, 0.94)


def asymmetric(weights_NG: torch.Tensor, search: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize to codes from 0 to 15, `[N, G]` uint8, and scales and offsets, `[N, 1]` bfloat16 each.

    A weight is about `(code - 8) * scale + offset`. Codes are chosen after scale and offset are rounded to bfloat16.

    Args:
        weights_NG: weights in float32.
        search: take the scale and offset with the least squared error over several ranges.
    """
    low, high = weights_NG.aminmax(dim=1, keepdim=True)
    scale = (high - low).div_(15)
    offset = torch.add(low, scale, alpha=8)
    if search:
        scale, offset = _best_line(weights_NG, scale, offset)
    # The scale of a group of equal weights is 0, by which codes could not be divided.
    scale = torch.where(scale > 0, scale, 1.0).to(torch.bfloat16)
    offset = offset.to(torch.bfloat16)
    per_scale = scale.float().reciprocal_()
    # Compute (weight - offset) / scale + 8 in one operation.
    codes = torch.addcmul(torch.sub(8, offset.float() * per_scale), weights_NG, per_scale)
    return codes.round_().clamp_(0, 15).to(torch.uint8), scale, offset


def _best_line(
    weights_NG: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and offset with the least squared error, `[N, 1]` each, from those of the full range."""
    mean = weights_NG.mean(1, keepdim=True)
    size = weights_NG.shape[1]
    codes = torch.empty_like(weights_NG)
    best = torch.full_like(scale, -1.0)
    best_scale, best_offset = scale, offset
    # All ranges have the same middle, which lies between codes 7 and 8.
    middle = torch.sub(offset, scale, alpha=0.5)
    for part in _RANGES_OF_4_BITS:
        step = scale * part
        # Codes minus 8.
        torch.sub(weights_NG, middle, out=codes).div_(step).sub_(0.5).round_().clamp_(-8, 7)
        sum_c = codes.sum(1, keepdim=True)
        spread = torch.linalg.vecdot(codes, codes)[:, None] - sum_c * sum_c / size
        product = torch.linalg.vecdot(codes, weights_NG)[:, None] - sum_c * mean
        # The more of the weights' variance the regression explains, the smaller is its error.
        explained = (product * product).div_(spread)
        is_better = explained > best
        best = torch.where(is_better, explained, best)
        slope = product / spread
        best_scale = torch.where(is_better, slope, best_scale)
        best_offset = torch.where(is_better, mean - slope * sum_c / size, best_offset)
    return best_scale, best_offset


def symmetric(weights_NG: torch.Tensor, search: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize as `asymmetric`, but to codes from -127 to 127, `[N, G]` int8, and scales alone, `[N, 1]` bfloat16."""
    largest = weights_NG.abs().amax(1, keepdim=True)
    scale = largest / 127
    if search:
        best, best_scale = torch.full_like(scale, -1.0), scale
        for part in _RANGES_OF_8_BITS:
            codes = torch.div(weights_NG, scale * part).round_().clamp_(-127, 127)
            product = torch.linalg.vecdot(codes, weights_NG)[:, None]
            spread = torch.linalg.vecdot(codes, codes)[:, None]
            explained = product * product / spread
            is_better = explained > best
            best = torch.where(is_better, explained, best)
            best_scale = torch.where(is_better, product / spread, best_scale)
        scale = best_scale
    # The scale of a group of zeros is 0. A scale that is NaN stays NaN.
    scale = torch.where(scale == 0, 1.0, scale).to(torch.bfloat16)
    codes = torch.mul(weights_NG, scale.float().reciprocal_())
    return codes.round_().clamp_(-127, 127).to(torch.int8), scale
