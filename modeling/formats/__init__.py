"""What the numbers of a matrix are: plain ones of 16 to 64 bits, int4, int8, and bitsandbytes' formats.

Reading order: format (the questions that each format answers), plain, int4_layout (where a code stands in memory and
files), scales (what int4 and int8 share), int4, int8, bnb, packed (a folder: what other programs' 4-bit weights mean,
and int4's parts of them). Formats know no modules.
"""

from .bnb import Bnb4Bit, Bnb8Bit, Separate
from .format import (
    MAKERS,
    Format,
    Parts,
    Sizes,
    format_of,
    has_gpu_kernel,
    knows_gpu_kernel,
    may_have_gpu_kernel,
)
from .int4 import Int4
from .int8 import Int8
from .plain import Plain
