"""Quantized weights: linear layers and routed experts whose matrices are packed.

Reading order: packed (the modules), reading (how transformers' loader reads folders of packed linear layers),
packed_quantizer (base class of quantizers), published (folders that other programs have packed), quantizer (for
llamoe's formats), bnb (for bitsandbytes'). The formats themselves are in `formats`.
"""

from .bnb import naming_plain_layers, register_bitsandbytes
from .packed import QuantizedExperts, QuantizedLinear, packed_modules
from .published import Matrices, by_expert, layout_of, names_in_16_bit, of_stack, own_config
from .quantizer import LlamoeQuantizer, is_kept, register_quantizers, take_activations
