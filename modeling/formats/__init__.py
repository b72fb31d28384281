"""Weight formats: how a weight matrix is stored, unpacked and multiplied. Formats work on tensors and use no modules.

Reading order: format (the interface), plain (floats of 16 to 64 bits), int4_layout (the order of 4-bit codes in memory
and files), scales (how they are chosen), few_bits (base class of the next two files), int4, int8, bnb (bitsandbytes'
formats), packed (a folder: conversion of other programs' quantized weights to int4 or plain weights).
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
