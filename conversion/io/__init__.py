"""Checkpoint files: tensors that are read when needed, and folders that are written block by block.

Reading order: lazy_tensor, operations, name_table, target_folder, plan, read_files, preallocated_files,
write_checkpoint.
"""

from .lazy_tensor import LazyTensor, Slot, blocks, check_alike, compute, dtype_name, from_tensor, join, stack
from .name_table import Condition, Drop, Row, Table, read_through, sources_of, write_through
from .operations import KEEP, TRANSPOSED, FusedRows, Operation, are_equal, one_of, permute_pairs, split
from .plan import Plan, Progress, split_shards
from .read_files import (
    check_sums,
    open_pickle,
    open_safetensors,
    open_weights,
    read_bytes,
    read_json,
    same_place,
)
from .target_folder import Look, check_apart, check_target, look_at, look_at_source
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
    "check_alike",
    "check_apart",
    "check_finite",
    "check_sums",
    "check_target",
    "compute",
    "dtype_name",
    "from_tensor",
    "join",
    "look_at",
    "look_at_source",
    "one_of",
    "open_pickle",
    "open_safetensors",
    "open_weights",
    "permute_pairs",
    "read_bytes",
    "read_json",
    "read_through",
    "same_place",
    "sources_of",
    "split",
    "split_shards",
    "stack",
    "write",
    "write_through",
]
