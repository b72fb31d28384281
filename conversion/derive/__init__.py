"""New models made of the weights of others: experts from a dense model, fewer heads, a decoder with a tower, few bits.

Reading order: upcycle, merge_kv_heads, vocabulary, assemble, quantize.
"""

from .assemble import assemble
from .merge_kv_heads import merge_kv_heads
from .quantize import quantize
from .upcycle import upcycle

__all__ = ["assemble", "merge_kv_heads", "quantize", "upcycle"]
