"""Checkpoint folders: what is checked before they are read, how they are read, and how they are written.

Reading order: safetensors_files, torch_files (headers, without the numbers), checkpoint_files (is a folder
whole), stored (does it hold this model), mapped_memory (memory that is given back), expert_index (which experts are
where), load_weights (what is fused or quantized while it is loaded), state_dicts (weights are no codes), device_map (on
which device a module goes), parts, whole_folders (locks, and signs of what is unfinished), saving (a folder is written
whole or not at all).
"""

from .checkpoint_files import (
    check_complete,
    check_files,
    check_folder,
    check_found,
    check_names,
    check_shards,
    current_loading,
    find_weights,
    loading,
    read_header,
    wrapper_prefix,
)
from .device_map import (
    check_on_disk,
    device_of,
    devices_here,
    owner_of,
    settle_places,
)
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
from .load_weights import make_weights
from .mapped_memory import forget_pages, return_freed_memory
from .parts import in_units, part_of, sum_by_part
from .safetensors_files import DTYPE_NAMES, DTYPES, WEIGHT_DTYPES, TensorHeader
from .saving import AtomicSaveMixin
from .state_dicts import TakesWeights
from .stored import Stored, check_fit, headers_of, tensors_of
from .torch_files import read_torch
from .whole_folders import LOCK, UNFINISHED, check_whole, sync
