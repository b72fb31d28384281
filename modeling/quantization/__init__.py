"""Quantized weights: linear layers and routed experts whose matrices are packed.

Reading order: packed (the modules), published (folders that other programs have packed), quantizer (what transformers
calls); for bitsandbytes, bnb_experts (the experts, and what folders hold of them), bnb_rules (how the
loader reads them) and bnb_quantizers. plain_experts
warns of experts that a quantizer has left out. What the numbers are is in `formats`.
"""

from .bnb_quantizers import naming_plain_layers, packed_experts, register_bitsandbytes
from .packed import QuantizedExperts, QuantizedLinear
from .plain_experts import warn_of_plain_experts
from .published import Matrices, layout_of, own_config
from .quantizer import LlamoeQuantizer, format_for, register_quantizers, take_activations
