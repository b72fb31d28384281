"""Vision towers of open_clip, MetaCLIP and CLIP.

Reading order: image_processors, resize, name_tables, open_clip_config, open_tower.
"""

from .image_processors import CLIP_MEAN, CLIP_STD, PROCESSOR, normalization
from .open_tower import open_tower, tower_kind
from .resize import read_processor, resize
