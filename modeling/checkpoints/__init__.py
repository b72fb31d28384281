"""Checkpoint folders: how they are read, what is checked of them, and how they are written.

Reading order: safetensors_files, torch_files (headers, without the numbers), checkpoint_files (the files of a folder),
stored, expert_index (which experts are where), conversions (how transformers' loader fuses them), checks (what is
refused), state_dicts (weights are no codes), device_map (on which device a module goes), parts, whole_folders (signs of
what is unfinished), saving (a folder is written whole or not at all).
"""

from .checkpoint_files import (
    check_shards,
    current_loading,
    find_weights,
    loading,
    read_header,
    wrapper_prefix,
)
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
from .parts import in_units, part_of, sum_by_part
from .safetensors_files import DTYPE_NAMES, DTYPES, WEIGHT_DTYPES, TensorHeader
from .saving import AtomicSaveMixin
from .state_dicts import TakesWeights
from .stored import Stored, headers_of, tensors_of
from .torch_files import read_torch
from .whole_folders import LOCK, UNFINISHED, check_whole, sync
