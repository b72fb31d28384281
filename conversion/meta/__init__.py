"""Checkpoint folders in Meta's format: params.json beside consolidated weight files.

Reading order: name_tables, hidden_sizes, params, folder.
"""

from .folder import open_meta, save_meta
from .name_tables import llama_table
