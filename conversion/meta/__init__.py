"""Checkpoint folders in Meta's format: params.json beside consolidated weight files; what Mistral AI's share with them.

Reading order: name_tables, params_to_config, config_to_params, sizes, params_folder, folder.
"""

from .config_to_params import compare_fields
from .folder import open_meta, save_meta
from .name_tables import llama_table
from .params_folder import (
    is_tuned,
    open_files,
    read_tensors,
    read_whole_config,
    tensors_with_head,
    write_folder,
    write_tokenizer,
)
from .params_to_config import Params, Seen, read_decoder
from .sizes import measure, weight_files
