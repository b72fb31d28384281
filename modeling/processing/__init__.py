"""Pictures and prompts for the multimodal model.

Reading order: pixels, pictures, image_processor, processor.
"""

from .pictures import read_picture
from .processor import LlamoeProcessor, config_beside
