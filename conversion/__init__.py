"""Weights in and out: Meta's and open_clip's formats, Hugging Face's, and checkpoints made of others.

Everything goes through lazy tensors under stock Hugging Face keys: `open_checkpoint` gives them for every format, and
every command writes views of them, block by block.
"""

from .checkpoint import Checkpoint, Report
from .convert import convert, open_checkpoint
from .metaclip import convert_vision

__all__ = ["Checkpoint", "Report", "convert", "convert_vision", "open_checkpoint"]
