"""The layout of 4-bit codes, in memory and in files: the one that torch's kernel reads on CPUs with AVX-512.

Outputs are in blocks of 64. For each input a block has 32 bytes, of which byte j holds output j in its low four bits
and output 32 + j in its high ones. In a last block of 16, 32 or 48 outputs byte j holds outputs 2j and 2j + 1. (ATen,
native/cpu/int4mm_kernel.cpp, `weight_to_int4pack_kernel`. With other instruction sets torch packs differently.)

Shapes: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch

from ..kernels import BLOCK_WEIGHTS

BLOCK = 64
ROWS_MULTIPLE = 16
"""The number of outputs must be a multiple of this."""


def pack(codes_OI: torch.Tensor) -> torch.Tensor:
    """Pack codes from 0 to 15, `[O, I]` uint8, into bytes `[O, I / 2]` uint8.

    Blocks of 64 outputs are independent, so they can be packed one after the other.
    """
    num_out, num_in = codes_OI.shape
    whole = num_out // BLOCK * BLOCK
    packed = codes_OI.new_empty(num_out, num_in // 2)
    for codes, bytes_ in ((codes_OI[:whole], packed[:whole]), (codes_OI[whole:], packed[whole:])):
        if len(codes):
            # In a whole block a byte holds one output of each half; in a smaller last block, two neighbouring outputs.
            low, high = (
                codes.view(-1, 2, BLOCK // 2, num_in).unbind(1)
                if len(codes) % BLOCK == 0
                else codes.view(1, -1, 2, num_in).unbind(2)
            )
            bytes_.view(len(low), num_in, -1).copy_((low | high << 4).mT)
    return packed


def pieces(packed: torch.Tensor, most: int = BLOCK_WEIGHTS) -> Iterator[slice]:
    """Yield slices of outputs: whole blocks with up to `most` weights (at least one block), then a last, smaller block.

    On a GPU, where launches cost more than memory, the first slice has all whole blocks.
    """
    num_out, weights = len(packed), packed.shape[1] * 2
    whole = num_out // BLOCK * BLOCK
    step = max(most // (weights * BLOCK), 1) * BLOCK if packed.is_cpu else max(whole, 1)
    for start in range(0, whole, step):
        yield slice(start, min(start + step, whole))
    if whole < num_out:
        yield slice(whole, num_out)


def unpack(packed: torch.Tensor, scales: torch.Tensor, out_IO: torch.Tensor) -> None:
    """Unpack one of the slices of `pieces` into `out_IO`.

    Args:
        packed: `[O, I / 2]` uint8.
        scales: `[I / group_size, O, 2]`, scale, and the value of code 8.
        out_IO: `[I, O]` in float32 or bfloat16, with contiguous rows.
    """
    num_out, num_in = packed.shape[0], packed.shape[1] * 2
    if num_out % BLOCK:
        bytes_ = packed.view(num_in, -1)
        low, high = out_IO.unflatten(1, (-1, 2)).unbind(2)
    else:
        # Copy the 32 bytes of an input and block as two complex128 numbers, if they are aligned: it is faster.
        is_odd = packed.data_ptr() % 16 or packed.storage_offset() % 16
        numbers = (packed.clone() if is_odd else packed).view(-1).view(torch.complex128)
        pairs = numbers.view(-1, num_in, 2).transpose(0, 1).contiguous()
        bytes_ = pairs.view(torch.uint8).view(num_in, -1, BLOCK // 2)
        low, high = out_IO.unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
    # Subtract 8 while codes are bytes, and signed: this is faster than on larger numbers.
    low.copy_((bytes_ & 15).view(torch.int8).sub_(8))
    high.copy_((bytes_ >> 4).view(torch.int8).sub_(8))
    # `to` keeps the strides of a tensor of this dtype; products with strided scales take three times as long.
    scale_GO, offset_GO = (each.to(out_IO.dtype).contiguous() for each in scales.unbind(2))
    codes_GgO = out_IO.unflatten(0, (len(scales), -1))
    torch.addcmul(offset_GO[:, None], codes_GgO, scale_GO[:, None], out=codes_GgO)


@lru_cache
def is_torchs_layout() -> bool:
    """Return whether torch's 4-bit kernel reads this layout on this machine."""
    codes = torch.arange(BLOCK * BLOCK, dtype=torch.int32, device="cpu").view(BLOCK, BLOCK) * 7 // 5 % 16
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2).view(BLOCK, -1)
    return torch.equal(theirs, pack(codes.to(torch.uint8)))
