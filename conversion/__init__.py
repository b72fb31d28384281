"""Convert checkpoints between the formats of Meta, Mistral AI, open_clip, Hugging Face and llama.cpp.

`open_checkpoint` reads every format as lazy tensors, under the keys that transformers' modules have. Commands write
views of these tensors, block by block.

Reading order: io (a folder: lazy tensors, reading and writing files), tokenizers (a folder), checkpoint (a
configuration and lazy tensors, read from any format); hf, clip, consolidated, meta, mistral, gguf (a folder for each
format), open (recognises the format); then a file or folder for each command: convert, convert_vision, upcycle,
merge_kv_heads, assemble, quantize, verify, inspect. A file or folder imports only what stands before it in this list.
The command line is in `llamoe_command`.
"""

from .assemble import assemble
from .checkpoint import Checkpoint, Report
from .convert import convert
from .convert_vision import convert_vision
from .inspect import Inspection, inspect
from .merge_kv_heads import merge_kv_heads
from .open import open_checkpoint
from .quantize import quantize
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
    "quantize",
    "upcycle",
    "verify",
]
