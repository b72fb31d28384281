"""Checkpoint folders in Meta's format: params.json beside consolidated weight files.

Reading order: name_tables, params_to_config, config_to_params, sizes, folder.
"""

from .config_to_params import add_kept, compare_fields
from .folder import KEPT, is_tuned, open_meta, save_meta
from .name_tables import llama_table
from .params_to_config import Params, Seen, read_decoder
from .sizes import measure, weight_files

__all__ = [
    "KEPT",
    "Params",
    "Seen",
    "add_kept",
    "compare_fields",
    "is_tuned",
    "llama_table",
    "measure",
    "open_meta",
    "read_decoder",
    "save_meta",
    "weight_files",
]
