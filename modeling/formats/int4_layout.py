"""The order of 4-bit codes in memory and in files.

Outputs are in blocks of 64. For each input a block has 32 bytes: byte j holds output j in its low four bits and output
32 + j in its high four bits. In a last block of 16, 32 or 48 outputs byte j holds outputs 2j and 2j + 1. It is the
order of ATen on CPUs with AVX-512 (native/cpu/int4mm_kernel.cpp, `weight_to_int4pack_kernel`).

Shapes: O outputs, I inputs (with padding), G groups of inputs, g inputs of a group.
"""

import sys
from collections.abc import Iterator

import torch

BLOCK = 64
OUTPUTS_MULTIPLE = 16
"""The number of outputs of a matrix must be a multiple of this number."""


def pack(codes_OI: torch.Tensor) -> torch.Tensor:
    """Pack codes from 0 to 15, `[O, I]` uint8, into bytes `[O, I / 2]` uint8; blocks may be packed one by one."""
    num_out, num_in = codes_OI.shape
    whole = num_out // BLOCK * BLOCK
    packed = codes_OI.new_empty(num_out, num_in // 2)
    for codes, bytes_ in ((codes_OI[:whole], packed[:whole]), (codes_OI[whole:], packed[whole:])):
        if len(codes):
            # A byte of a whole block holds one output of each half, a byte of a smaller block two neighbours.
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
    """Yield slices of outputs, each of one or several whole blocks; the last slice may be a smaller block.

    Args:
        tensor: weights or codes, whose first axis is outputs.
        num_in: I.
        most: number of weights in a slice on a CPU, to fit into its cache; a slice has at least one block.
        most_on_gpu: the same on a GPU, where a launch of a kernel costs more than memory.
    """
    whole = len(tensor) // BLOCK * BLOCK
    step = max((most if tensor.is_cpu else most_on_gpu) // (num_in * BLOCK), 1) * BLOCK
    for start in range(0, whole, step):
        yield slice(start, min(start + step, whole))
    if whole < len(tensor):
        yield slice(whole, len(tensor))


def unpack(packed: torch.Tensor, scales: torch.Tensor, out_IO: torch.Tensor) -> None:
    """Dequantize whole blocks of outputs, or a smaller one, into `out_IO`.

    Args:
        packed: `[O, I / 2]` uint8, one slice of `slices_of`.
        scales: `[G, O, 2]`: the scale, and the offset, which is the value of code 8.
        out_IO: `[I, O]` in float32 or bfloat16, with contiguous rows.
    """
    num_out, num_in = packed.shape[0], packed.shape[1] * 2
    if num_out % BLOCK:
        bytes_ = packed.view(num_in, -1)
        low, high = out_IO.unflatten(1, (-1, 2)).unbind(2)
    else:
        bytes_ = packed.view(-1, num_in, BLOCK // 2).transpose(0, 1)
        low, high = out_IO.unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
    # Subtract 8 while codes are signed bytes, which is faster than in the dtype of `out_IO`.
    low.copy_((bytes_ & 15).view(torch.int8).sub_(8))
    high.copy_((bytes_ >> 4).view(torch.int8).sub_(8))
    # `to` keeps strides if the dtype is the same, and `addcmul` takes three times as long with strided scales.
    scale_GO, offset_GO = (part.to(out_IO.dtype).contiguous() for part in scales.unbind(2))
    codes_GgO = out_IO.unflatten(0, (len(scales), -1))
    torch.addcmul(offset_GO[:, None], codes_GgO, scale_GO[:, None], out=codes_GgO)
