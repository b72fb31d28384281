"""Checkpoint files: tensors that are read when needed, and folders that are written block by block.

Reading order: lazy_tensor, run_lock, source_changes, operations, name_table, plan, read_files, target_folder,
preallocated_files, write_checkpoint.
"""

from .lazy_tensor import LazyTensor, Slot, blocks, compute, from_tensor, join, stack
from .name_table import Condition, Drop, Row, Table, read_through, sources_of, write_through
from .operations import KEEP, TRANSPOSED, FusedRows, Operation, are_equal, one_of, permute_pairs, split
from .plan import Plan, Progress, parse_size, split_shards
from .read_files import (
    check_sums,
    open_pickle,
    open_safetensors,
    open_weights,
    read_bytes,
    read_json,
    same_place,
)
from .source_changes import Look, look_at, note, remember_looks
from .target_folder import check_apart, check_source, check_target
from .write_checkpoint import check_finite, write

__all__ = [
    "Condition",
    "Drop",
    "FusedRows",
    "KEEP",
    "LazyTensor",
    "Look",
    "Operation",
    "Plan",
    "Progress",
    "Row",
    "Slot",
    "TRANSPOSED",
    "Table",
    "are_equal",
    "blocks",
    "check_apart",
    "check_finite",
    "check_source",
    "check_sums",
    "check_target",
    "compute",
    "from_tensor",
    "join",
    "look_at",
    "note",
    "one_of",
    "open_pickle",
    "open_safetensors",
    "open_weights",
    "parse_size",
    "permute_pairs",
    "read_bytes",
    "read_json",
    "read_through",
    "remember_looks",
    "same_place",
    "sources_of",
    "split",
    "split_shards",
    "stack",
    "write",
    "write_through",
]
