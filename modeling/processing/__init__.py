"""Pictures and prompts for the multimodal model.

Reading order: pictures, processor.
"""

from .pictures import read_picture
from .processor import LlamoeProcessor, config_beside
