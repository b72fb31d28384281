"""Weight formats: plain weights of 16 to 64 bits, int4, int8, and bitsandbytes' formats.

Reading order: format (the interface), plain, int4_layout (the order of 4-bit codes in memory and files), few_bits (base
class of int4 and int8), scales (how both choose scales), int4, int8, bnb, packed (a folder: 4-bit and 8-bit weights of
other programs, converted to int4 or plain weights). Formats work on tensors and use no modules.
"""

from .bnb import Bnb
from .format import (
    MAKERS,
    Format,
    Parts,
    Sizes,
    format_of,
    has_gpu_kernel,
    may_have_gpu_kernel,
)
from .int4 import Int4
from .int8 import Int8
from .plain import Plain
