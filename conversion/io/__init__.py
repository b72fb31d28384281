"""Checkpoint files: tensors that are read when needed, and folders that are written block by block.

Reading order: lazy_tensor, packed_matrix, operations, name_table, plan, read_files, preallocated_files,
write_checkpoint, write_options.
"""

from ...configuration.json_files import read_json
from .lazy_tensor import Computed, LazyTensor, blocks, dtype_name, join, stack
from .name_table import Drop, Row, Table, read_through, sources_of, write_through
from .operations import (
    KEEP,
    TRANSPOSED,
    FusedRows,
    Operation,
    are_equal,
    by_expert,
    one_of,
    permute_pairs,
    split,
)
from .packed_matrix import PackedMatrix
from .plan import Plan, Progress, split_shards
from .read_files import FileTensor, open_weights
from .write_checkpoint import check_apart, check_finite, check_target, write
from .write_options import DEFAULTS, WriteOptions
