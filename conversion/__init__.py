"""Weights in and out: formats of Meta, Mistral AI, open_clip and Hugging Face, and checkpoints made from others.

`open_checkpoint` reads every format as lazy tensors under stock Hugging Face keys. Every command writes views of these
tensors, block by block.

Reading order: io (a folder: lazy tensors, reading and writing files), tokenizers (a folder), checkpoint (a
configuration and lazy tensors, read from any format); hf, clip, meta, mistral (a folder for each format), open
(recognises the format); then a file or folder for each command: convert, derive (new models of others' weights:
upcycle, gqa, assemble, quantize), verify, inspect. A file or folder imports only what stands before it. The command is
in `llamoe_command`.
"""

from .checkpoint import Checkpoint, Report
from .clip import convert_vision
from .convert import convert
from .derive import assemble, merge_kv_heads, quantize, upcycle
from .inspect import Inspection, inspect
from .open import open_checkpoint
from .verify import Verification, verify

__all__ = [
    "Checkpoint",
    "Inspection",
    "Report",
    "Verification",
    "assemble",
    "convert",
    "convert_vision",
    "inspect",
    "merge_kv_heads",
    "open_checkpoint",
    "quantize",
    "upcycle",
    "verify",
]
