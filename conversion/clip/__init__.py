"""Vision towers of open_clip and MetaCLIP.

Reading order: image_processors, resize, name_tables, open_clip_config, tower_tensors, open_tower, convert_vision.
"""

from .convert_vision import convert_vision, fold, open_tower, resize
from .image_processors import CLIP_MEAN, CLIP_STD, PROCESSOR, normalization

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "PROCESSOR",
    "convert_vision",
    "fold",
    "normalization",
    "open_tower",
    "resize",
]
