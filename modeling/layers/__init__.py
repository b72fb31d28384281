"""Layers that decoders and the vision tower are made of: linear layers, norms, rotary embeddings, the feed-forward.

Reading order: linear, normalization, rotary, feed_forward.
"""

from .feed_forward import FeedForward, activation
from .linear import Linear, make_layers_plain
from .normalization import L2Norm, RMSNorm
from .rotary import RotaryEmbedding, rotary_2d_cos_sin, rotate
