"""Checkpoint folders in Hugging Face's format.

Reading order: expert_layout (experts stacked or one by one), folder.
"""

from .expert_layout import split_experts
from .folder import open_hf, open_shards, read_companions, read_config, save_hf

__all__ = [
    "open_hf",
    "open_shards",
    "read_companions",
    "read_config",
    "save_hf",
    "split_experts",
]
