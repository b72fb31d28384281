"""Meta's own format: params.json beside consolidated files.

Reading order: name_tables, params_to_config, config_to_params, sizes, folder.
"""

from .folder import open_meta, save_meta

__all__ = ["open_meta", "save_meta"]
