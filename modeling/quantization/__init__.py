"""Quantized weights: linear layers and routed experts whose matrices are packed.

Reading order: packed (the modules), reading (how transformers' loader reads folders of packed linear layers),
packed_quantizer (what all quantizers do), published (folders that other programs have packed), quantizer (llamoe's
own), bnb (bitsandbytes'). plain_experts warns of experts that a quantizer has left out. What the numbers are is in
`formats`.
"""

from .bnb import naming_plain_layers, parts_in_files, register_bitsandbytes
from .packed import QuantizedExperts, QuantizedLinear, packed_modules
from .plain_experts import warn_of_plain_experts
from .published import Matrices, by_expert, layout_of, names_in_16_bit, own_config
from .quantizer import LlamoeQuantizer, format_for, register_quantizers, take_activations
