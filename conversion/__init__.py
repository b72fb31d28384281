"""Weights in and out: Meta's and open_clip's formats, Hugging Face's, and checkpoints made of others.

Everything goes through lazy tensors under stock Hugging Face keys: `open_checkpoint` gives them for every format, and
every command writes views of them, block by block. A file imports only files that stand above it in this order: lazy,
experts, source_files, files, outputs, run_lock, targets, writing, tables; for texts: chat_templates, sentence_pieces,
tiktoken_tables, processors, tokenizers; then checkpoint; for Meta: meta_tables, meta_params, meta_fit, meta_sizes,
meta; for pictures: image_processors, positions, metaclip_tables, open_clip_config, towers, metaclip; then convert,
upcycle, assemble, running, comparing, footprint, inspect, shared_parts, verdict, unreached, verify, printing, cli.
"""

from .assemble import assemble
from .checkpoint import Checkpoint, Report
from .convert import convert, open_checkpoint
from .inspect import Inspection, inspect
from .metaclip import convert_vision
from .upcycle import merge_kv_heads, upcycle
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
