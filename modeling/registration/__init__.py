"""Our model classes in the registries of transformers, and the class of a configuration.

Reading order: auto_classes, adoption.
"""

from .adoption import adopt, release
from .auto_classes import empty_model, model_class, register
