"""Vision towers of open_clip, MetaCLIP and CLIP.

Reading order: pictures, name_tables, open_clip_config, open_tower.
"""

from .open_tower import open_clip, open_open_clip, tower_companions, tower_kind
from .pictures import CLIP_MEAN, CLIP_STD, PROCESSOR, normalization, read_processor, resize
