"""Checkpoint folders in Hugging Face's format.

Reading order: expert_layout (experts stacked or one by one), folder.
"""

from .expert_layout import fuse_experts, split_experts
from .folder import open_hf, read_companions, read_config, save_hf, weight_files

__all__ = [
    "fuse_experts",
    "open_hf",
    "read_companions",
    "read_config",
    "save_hf",
    "split_experts",
    "weight_files",
]
