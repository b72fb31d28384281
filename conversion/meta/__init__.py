"""Checkpoint folders in Meta's format: params.json beside consolidated weight files.

Reading order: name_tables, params_to_config, config_to_params, sizes, folder.
"""

from .folder import open_meta, save_meta

__all__ = ["open_meta", "save_meta"]
