"""Checkpoint folders: how they are read, what is checked of them, and how they are written.

Reading order: safetensors_files, torch_files (headers, without the tensors' data), checkpoint_files (the files of a
folder), stored, expert_index (location of each expert), conversions (fusing experts in transformers' loader), checks,
state_dicts (check of `load_state_dict`), device_map, parts, whole_folders (detection of unfinished folders), saving
(atomic writing of a folder).
"""

from .checkpoint_files import current_loading, find_weights, loading, read_header
from .checks import check_complete, check_files, check_made, check_tensors
from .conversions import SPLIT_LLAMA4, fuse_in_place, transposed_for_shards
from .device_map import device_of, owner_of, settle_places
from .expert_index import (
    WEIGHT,
    StoredStack,
    check_experts,
    expert_of,
    index_experts,
    names_in_model,
    shape_of_one,
    suffixes_in_files,
)
from .parts import in_units, sum_by_part
from .safetensors_files import DTYPE_NAMES, DTYPES, TensorHeader
from .saving import AtomicSaveMixin
from .state_dicts import TakesWeights
from .stored import Stored, headers_of, tensors_of
from .torch_files import read_torch
from .whole_folders import LOCK, UNFINISHED, check_whole, sync
