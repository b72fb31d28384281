"""Weights in few bits: linear layers and routed experts whose matrices are packed.

Reading order: int4_layout (where a code stands in memory and files), scales (codes and scales of weights), formats (a
packed matrix: how it is made, multiplied and unpacked), products (calls and the operator for autograd and compilers),
experts and linear (the modules), loading (quantizing while a checkpoint is read), quantizer (what transformers calls).
"""

from .experts import QuantizedExperts
from .linear import QuantizedLinear
from .loading import QuantizeExperts, keep_dtypes, shapes_in_files
from .quantizer import LlamoeQuantizer, register_quantizers, saving_dequantized

__all__ = [
    "LlamoeQuantizer",
    "QuantizeExperts",
    "QuantizedExperts",
    "QuantizedLinear",
    "keep_dtypes",
    "register_quantizers",
    "saving_dequantized",
    "shapes_in_files",
]
