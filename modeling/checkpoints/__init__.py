"""Checkpoint folders: reading, checking and writing them.

Reading order: safetensors_files, torch_files (headers of one file: its tensors without their data), checkpoint_files
(the weight files of a folder), stored (a tensor and the file that it is in), expert_index (the tensors of each expert),
conversions (fusing experts in transformers' loader), checks (of a load), state_dicts (check of `load_state_dict`),
device_map, parts (bytes by part of the model), whole_folders (unfinished folders), saving (`save_pretrained`).
"""

from .checkpoint_files import check_files, current_loading, find_weights, loading, read_header
from .checks import check_complete, check_made, check_tensors
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
)
from .parts import in_units, sum_by_part
from .safetensors_files import DTYPE_NAMES, DTYPES, TensorHeader
from .saving import AtomicSaveMixin
from .state_dicts import TakesWeights
from .stored import Stored, headers_of, tensors_of
from .torch_files import read_torch
from .whole_folders import LOCK, UNFINISHED, check_whole, sync
