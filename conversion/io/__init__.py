"""Checkpoint files: tensors that are read when needed, and folders that are written block by block.

Reading order: lazy_tensor, run_lock, source_changes, name_table, read_files, target_folder, preallocated_files,
write_checkpoint.
"""

from .lazy_tensor import LazyTensor, Slot, blocks, compute, from_tensor, join, stack
from .name_table import KEEP, Drop, Operation, Row, Table, read_through, split, write_through
from .read_files import check_sums, open_pickle, open_safetensors, open_weights, read_bytes, read_json
from .source_changes import Look, look_at, note, remember_looks
from .target_folder import check_apart, check_source, check_target
from .write_checkpoint import Plan, Progress, parse_size, split_shards, to_json, write

__all__ = [
    "Drop",
    "KEEP",
    "LazyTensor",
    "Look",
    "Operation",
    "Plan",
    "Progress",
    "Row",
    "Slot",
    "Table",
    "blocks",
    "check_apart",
    "check_source",
    "check_sums",
    "check_target",
    "compute",
    "from_tensor",
    "join",
    "look_at",
    "note",
    "open_pickle",
    "open_safetensors",
    "open_weights",
    "parse_size",
    "read_bytes",
    "read_json",
    "read_through",
    "remember_looks",
    "split",
    "split_shards",
    "stack",
    "to_json",
    "write",
    "write_through",
]
