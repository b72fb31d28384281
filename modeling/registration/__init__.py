"""Our model classes in the registries of transformers.

Reading order: auto_classes, adoption.
"""

from .adoption import adopt, release
from .auto_classes import register

__all__ = ["adopt", "register", "release"]
