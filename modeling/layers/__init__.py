"""Layers that every decoder and the vision tower are made of: norms, rotary embeddings, the feed-forward.

Reading order: normalization, rotary, feed_forward; none of them imports another one.
"""

from .feed_forward import FeedForward, activation
from .normalization import L2Norm, RMSNorm
from .rotary import RotaryEmbedding, rotary_2d_cos_sin, rotary_tables, rotate
