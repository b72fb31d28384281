"""The layout of 4-bit codes, in memory and in files.

Outputs are in blocks of 64. For each input a block has 32 bytes, of which byte j holds output j in its low four bits
and output 32 + j in its high ones. In a last block of 16, 32 or 48 outputs byte j holds outputs 2j and 2j + 1. (ATen
packs so on CPUs with AVX-512: native/cpu/int4mm_kernel.cpp, `weight_to_int4pack_kernel`.)

Shapes: O outputs, I inputs, G groups of inputs.
"""

import sys
from collections.abc import Iterator

import torch

BLOCK = 64
OUTPUTS_MULTIPLE = 16
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


def slices_of(
    tensor: torch.Tensor, num_in: int, most: int, most_on_gpu: int = sys.maxsize
) -> Iterator[slice]:
    """Yield slices of outputs: whole blocks, then a last, smaller block; a slice has `most` weights, or is one block.

    Args:
        tensor: weights or codes, with an axis for outputs in front.
        num_in: I.
        most: for a CPU, whose cache holds a slice.
        most_on_gpu: for a GPU, where launches cost more than memory.
    """
    whole = len(tensor) // BLOCK * BLOCK
    step = max((most if tensor.is_cpu else most_on_gpu) // (num_in * BLOCK), 1) * BLOCK
    for start in range(0, whole, step):
        yield slice(start, min(start + step, whole))
    if whole < len(tensor):
        yield slice(whole, len(tensor))


def unpack(packed: torch.Tensor, scales: torch.Tensor, out_IO: torch.Tensor) -> None:
    """Unpack the outputs of one slice of `slices_of` into `out_IO`.

    Args:
        packed: `[O, I / 2]` uint8.
        scales: `[G, O, 2]`, scale, and the value of code 8.
        out_IO: `[I, O]` in float32 or bfloat16, with contiguous rows.
    """
    num_out, num_in = packed.shape[0], packed.shape[1] * 2
    if num_out % BLOCK:
        bytes_ = packed.view(num_in, -1)
        low, high = out_IO.unflatten(1, (-1, 2)).unbind(2)
    else:
        bytes_ = packed.view(-1, num_in, BLOCK // 2).transpose(0, 1)
        low, high = out_IO.unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
    # Subtract 8 while codes are bytes, and signed: this is faster than on larger numbers.
    low.copy_((bytes_ & 15).view(torch.int8).sub_(8))
    high.copy_((bytes_ >> 4).view(torch.int8).sub_(8))
    # `to` keeps the strides of a tensor of this dtype; products with strided scales take three times as long.
    scale_GO, offset_GO = (part.to(out_IO.dtype).contiguous() for part in scales.unbind(2))
    codes_GgO = out_IO.unflatten(0, (len(scales), -1))
    torch.addcmul(offset_GO[:, None], codes_GgO, scale_GO[:, None], out=codes_GgO)
