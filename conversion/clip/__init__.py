"""Vision towers of open_clip and MetaCLIP.

Reading order: image_processors, resize, name_tables, open_clip_config, tower_tensors, open_tower, convert_vision.
"""

from .convert_vision import convert_vision, fold, resize
from .image_processors import CLIP_MEAN, CLIP_STD, PROCESSOR, normalization
from .open_tower import open_tower, tower_kind

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "PROCESSOR",
    "convert_vision",
    "fold",
    "normalization",
    "open_tower",
    "resize",
    "tower_kind",
]
