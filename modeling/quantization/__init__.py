"""Weights in few bits: linear layers and routed experts whose matrices are packed.

Reading order: int4_layout (where a code stands in memory and files), scales (codes and scales of weights), formats (a
packed matrix: how it is made, multiplied and unpacked), products (calls and the operator for autograd and compilers),
packed (what the modules have in common), experts and linear (the modules), loading (quantizing while a checkpoint is
read), quantizer (what transformers calls). bitsandbytes' formats have files of the
same kind: bnb_formats, bnb_files (what folders hold), bnb_experts, bnb_loading, bnb_quantizers.
"""

from .bnb_formats import Bnb4Bit, Bnb8Bit
from .bnb_loading import packed_experts, unpack_routers
from .bnb_quantizers import (
    QuantizesExperts,
    naming_plain_layers,
    register_bitsandbytes,
    tell_of_plain_experts,
)
from .experts import QuantizedExperts
from .formats import Format
from .int4_layout import torchs_block
from .linear import QuantizedLinear
from .loading import check_found, dtype_to_quantize, keep_dtypes, shapes_in_files
from .products import multiply_groups as multiply_packed_groups
from .quantizer import LlamoeQuantizer, check_request, register_quantizers, saving_dequantized

__all__ = [
    "Bnb4Bit",
    "Bnb8Bit",
    "Format",
    "LlamoeQuantizer",
    "QuantizedExperts",
    "QuantizedLinear",
    "QuantizesExperts",
    "check_found",
    "check_request",
    "dtype_to_quantize",
    "keep_dtypes",
    "multiply_packed_groups",
    "naming_plain_layers",
    "packed_experts",
    "register_bitsandbytes",
    "register_quantizers",
    "saving_dequantized",
    "shapes_in_files",
    "tell_of_plain_experts",
    "torchs_block",
    "unpack_routers",
]
