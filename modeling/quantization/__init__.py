"""Linear layers and routed experts with packed weights, and the quantizers by which transformers loads and saves them.

Reading order: packed (the modules), reading (rules for files with packed linear layers), packed_quantizer (base class
of the quantizers), published (folders of other programs), quantizer (for llamoe's formats), bnb (for bitsandbytes'
formats). `formats` says how weights are packed and multiplied.
"""

from .bnb import naming_plain_layers, register_bitsandbytes
from .packed import QuantizedExperts, QuantizedLinear, packed_modules
from .published import Matrices, by_expert, layout_of, names_in_16_bit, of_stack, own_config
from .quantizer import LlamoeQuantizer, is_kept, register_quantizers, take_activations
