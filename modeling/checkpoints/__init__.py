"""Checkpoint folders: what is checked before they are read, how they are read, and how they are written.

Reading order: safetensors_files, pickles, torch_files (headers, without the numbers), checkpoint_files (does a folder
hold this model), mapped_memory (memory that is given back), expert_index (which experts are where), load_experts and
split_experts (how they are loaded), model_names and state_dicts (the same for `load_state_dict`), other_loaders
(accelerate's, Trainer's and torch's), device_map (on which device a module goes), parts, quantization, whole_folders
(locks, and signs of what is unfinished), saving (a folder is written whole or not at all).
"""

from .checkpoint_files import (
    WeightFiles,
    check_complete,
    check_files,
    check_fit,
    check_folder,
    check_layers,
    check_place,
    check_shards,
    current_loading,
    find_weights,
    loading,
    read_header,
)
from .device_map import (
    check_devices,
    check_offload,
    check_on_disk,
    device_of,
    owner_of,
    settle_device_map,
)
from .expert_index import (
    STACKS,
    WEIGHT,
    Stored,
    StoredStack,
    check_experts,
    expert_of,
    headers_of,
    index_experts,
    names_in_model,
    shape_of_one,
    suffixes_in_files,
    tensor_of_expert,
    tensors_of,
)
from .load_experts import take_experts
from .mapped_memory import forget_pages, is_mapped, return_freed_memory
from .other_loaders import replace_loaders, replace_trainers_loader
from .parts import in_units, part_of, sum_by_part
from .pickles import Named
from .quantization import warn_of_experts
from .safetensors_files import DTYPE_NAMES, DTYPES, WEIGHT_DTYPES, TensorHeader
from .saving import AtomicSaveMixin
from .split_experts import fuse_while_loading
from .state_dicts import TakesStateDicts
from .torch_files import read_records, read_torch
from .whole_folders import LOCK, UNFINISHED, FolderLock, check_whole, holder, sync
