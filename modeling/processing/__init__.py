"""The processor of the multimodal model, which turns pictures and prompts into model inputs.

Reading order: pictures, processor.
"""

from .pictures import read_picture
from .processor import LlamoeProcessor, config_beside
