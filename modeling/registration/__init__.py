"""Our model classes in the registries of transformers, and the class of a configuration.

Reading order: auto_classes, adoption, empty.
"""

from .adoption import adopt, release
from .auto_classes import register
from .empty import empty_model, model_class
