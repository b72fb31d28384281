"""Quantized weights: linear layers and routed experts whose matrices are packed.

Reading order: packed (what the modules have in common), experts and linear (the modules), loading (quantizing while a
checkpoint is read), quantizer (what transformers calls). For bitsandbytes there are files of the same kind: bnb_files
(what folders hold), bnb_experts, bnb_loading, bnb_quantizers. What the numbers are is in `formats`.
"""

from .bnb_loading import packed_experts, unpack_routers
from .bnb_quantizers import (
    QuantizesExperts,
    naming_plain_layers,
    register_bitsandbytes,
    warn_of_plain_experts,
)
from .experts import QuantizedExperts
from .linear import QuantizedLinear
from .loading import check_found, dtype_to_quantize, packed_in_files
from .quantizer import LlamoeQuantizer, check_request, register_quantizers, saving_dequantized
