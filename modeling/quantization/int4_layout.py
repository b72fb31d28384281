"""The layout of 4-bit codes, in memory and in files: the one that torch's kernel reads on CPUs with AVX-512.

Outputs are in blocks of 64. For each input a block has 32 bytes, of which byte j holds output j in its low four bits
and output 32 + j in its high ones. In a last block of 16, 32 or 48 outputs byte j holds outputs 2j and 2j + 1. (ATen,
native/cpu/int4mm_kernel.cpp, `weight_to_int4pack_kernel`. With other instruction sets torch packs differently.)

Unpacking a byte gives the two outputs side by side. So a matrix is unpacked in the order of its bytes, which is another
order of the outputs; products are reordered afterwards, since they are smaller than the matrix.

Shapes: O outputs, I inputs, B whole blocks.
"""

import torch

BLOCK = 64
ROWS_MULTIPLE = 16
"""The number of outputs must be a multiple of this."""


def pack(codes_OI: torch.Tensor) -> torch.Tensor:
    """Pack codes from 0 to 15, `[O, I]` uint8, into bytes `[O, I / 2]` uint8.

    Rows from a multiple of 64 to another one pack into the same rows of the result.
    """
    num_out, num_in = codes_OI.shape
    whole = num_out // BLOCK * BLOCK
    packed = codes_OI.new_empty(num_out, num_in // 2)
    for codes, bytes_ in ((codes_OI[:whole], packed[:whole]), (codes_OI[whole:], packed[whole:])):
        if len(codes):
            # Of a whole block the two halves share bytes, of the last one neighbours.
            low, high = (
                codes.view(-1, 2, BLOCK // 2, num_in).unbind(1)
                if len(codes) % BLOCK == 0
                else codes.view(1, -1, 2, num_in).unbind(2)
            )
            bytes_.view(len(low), num_in, -1).copy_((low | high << 4).mT)
    return packed


def byte_rows(packed: torch.Tensor, inputs: slice) -> torch.Tensor:
    """The bytes of some inputs, `[inputs, O / 2]` int32."""
    num_out, num_in = packed.shape[0], packed.shape[1] * 2
    whole = num_out // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(packed[:whole].view(-1, num_in, BLOCK // 2)[:, inputs].transpose(0, 1))
    if whole < num_out:
        parts.append(packed[whole:].view(num_in, -1)[inputs])
    return torch.cat([part.to(torch.int32).flatten(1) for part in parts], dim=1)


def to_byte_order(values: torch.Tensor) -> torch.Tensor:
    """`[..., O]` in the order in which bytes hold the outputs."""
    whole = values.shape[-1] // BLOCK * BLOCK
    blocks = values[..., :whole].unflatten(-1, (-1, 2, BLOCK // 2)).transpose(-1, -2).flatten(-3)
    return torch.cat([blocks, values[..., whole:]], dim=-1)


def from_byte_order(values: torch.Tensor) -> torch.Tensor:
    """The reverse of `to_byte_order`."""
    whole = values.shape[-1] // BLOCK * BLOCK
    blocks = values[..., :whole].unflatten(-1, (-1, BLOCK // 2, 2)).transpose(-1, -2).flatten(-3)
    return torch.cat([blocks, values[..., whole:]], dim=-1)
