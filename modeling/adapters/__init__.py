"""peft's adapters: read, checked, and renamed to a model's keys.

Reading order: safetensors_headers, files.
"""

from .files import HUB_ARGUMENTS, LoadsAdapters, mark, orient_swapped, remember_file
from .safetensors_headers import check_files

__all__ = ["HUB_ARGUMENTS", "LoadsAdapters", "check_files", "mark", "orient_swapped", "remember_file"]
