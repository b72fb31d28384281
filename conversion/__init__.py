"""Weights in and out: Meta's and open_clip's formats, Hugging Face's, and checkpoints made of others.

Everything goes through lazy tensors under stock Hugging Face keys: `open_checkpoint` gives them for every format, and
every command writes views of them, block by block.

Reading order: io (a folder: lazy tensors, reading and writing files), tokenizers (a folder), checkpoint (a
configuration and lazy tensors, whatever they came from); hf, clip, meta (folders, one a format), open (which of them);
then a file a command: convert, upcycle, merge_kv_heads, assemble, verify (a folder), footprint, inspect; printing, cli
(the `llamoe` command). A file or folder imports only what stands before it.
"""

from .assemble import assemble
from .checkpoint import Checkpoint, Report
from .clip import convert_vision
from .convert import convert
from .inspect import Inspection, inspect
from .merge_kv_heads import merge_kv_heads
from .open import open_checkpoint
from .upcycle import upcycle
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
    "upcycle",
    "verify",
]
