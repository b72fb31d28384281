"""Weights in and out: Meta's and open_clip's formats, Hugging Face's, and checkpoints made of others.

A file imports only files that stand above it in this order: `lazy`, `files`, `writing`, `tables`, `checkpoint`,
`tokenizers`, `meta_tables`, `meta`, `metaclip`, `convert`, `upcycle`, `assemble`, `inspect`, `verify`, `cli`.
"""

from .checkpoint import Checkpoint, Report
from .convert import convert, open_checkpoint

__all__ = ["Checkpoint", "Report", "convert", "open_checkpoint"]
