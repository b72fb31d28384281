"""New models made of the weights of others: experts from a dense model, fewer key/value heads, a decoder with a tower.

Reading order: upcycle, merge_kv_heads, vocabulary, assemble.
"""

from .assemble import assemble
from .merge_kv_heads import merge_kv_heads
from .upcycle import upcycle

__all__ = ["assemble", "merge_kv_heads", "upcycle"]
