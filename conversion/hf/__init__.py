"""Checkpoint folders in Hugging Face's format.

Reading order: expert_layout (experts in stacks or one by one), published and bitsandbytes (weights that other programs
have packed), packed_weights (weights in llamoe's formats), folder.
"""

from .expert_layout import fuse_experts
from .folder import open_hf, open_shards, read_companions, read_config, save_hf
from .packed_weights import in_words, packed_weights
