"""Choice of scales and codes for int4 and int8: from the weights' range, or with the least squared error.

A weight w becomes `code * scale + offset`. For given codes the best scale and offset are the linear regression of the
weights on their codes, whose squared error has a closed form. `search` tries several ranges: a narrower range clips the
largest weights, and resolves the others better.

Shapes: N groups, G weights of a group, O outputs, I inputs.
"""

import torch

# Fractions of the full range that the search tries, for 4 and for 8 bits. For 4 bits about 0.9 is usually best.
_RANGES_OF_4_BITS = (1.0, 0.93, 0.86, 0.79)
_RANGES_OF_8_BITS = (1.0, 0.97, 0.94)


def asymmetric(weights_NG: torch.Tensor, search: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize to codes from 0 to 15, `[N, G]` uint8, and scales and offsets, `[N, 1]` bfloat16.

    A weight is about `(code - 8) * scale + offset`; the codes are the best for the rounded scales and offsets.

    Args:
        weights_NG: float32.
        search: try several ranges.
    """
    low, high = weights_NG.aminmax(dim=1, keepdim=True)
    scale = (high - low).div_(15)
    offset = torch.add(low, scale, alpha=8)
    if search:
        scale, offset = _best_line(weights_NG, scale, offset)
    # If all weights of a group are equal, the scale would be 0.
    scale = torch.where(scale > 0, scale, 1.0).to(torch.bfloat16)
    offset = offset.to(torch.bfloat16)
    per_scale = scale.float().reciprocal_()
    # Compute (weight - offset) / scale + 8 in one operation.
    codes = torch.addcmul(torch.sub(8, offset.float() * per_scale), weights_NG, per_scale)
    return codes.round_().clamp_(0, 15).to(torch.uint8), scale, offset


def _best_line(
    weights_NG: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and offset with the least squared error over several ranges, by regression on the codes."""
    mean = weights_NG.mean(1, keepdim=True)
    size = weights_NG.shape[1]
    codes = torch.empty_like(weights_NG)
    best = torch.full_like(scale, -1.0)
    best_scale, best_offset = scale, offset
    # Narrower ranges keep the middle of the full range.
    middle = torch.sub(offset, scale, alpha=0.5)
    for part in _RANGES_OF_4_BITS:
        step = scale * part
        # Codes from -8 to 7.
        torch.sub(weights_NG, middle, out=codes).div_(step).sub_(0.5).round_().clamp_(-8, 7)
        sum_c = codes.sum(1, keepdim=True)
        spread = torch.linalg.vecdot(codes, codes)[:, None] - sum_c * sum_c / size
        product = torch.linalg.vecdot(codes, weights_NG)[:, None] - sum_c * mean
        # Variance of the weights that the regression explains.
        explained = (product * product).div_(spread)
        is_better = explained > best
        best = torch.where(is_better, explained, best)
        slope = product / spread
        best_scale = torch.where(is_better, slope, best_scale)
        best_offset = torch.where(is_better, mean - slope * sum_c / size, best_offset)
    return best_scale, best_offset


def symmetric(weights_NG: torch.Tensor, search: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to codes from -127 to 127, `[N, G]` int8, and scales, `[N, 1]` bfloat16, as `asymmetric` does."""
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
    # Rows of zeros have scale 0. NaN stays NaN, and is reported later.
    scale = torch.where(scale == 0, 1.0, scale).to(torch.bfloat16)
    codes = torch.mul(weights_NG, scale.float().reciprocal_())
    return codes.round_().clamp_(-127, 127).to(torch.int8), scale
