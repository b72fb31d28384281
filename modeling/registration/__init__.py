"""What other libraries must know of the model classes.

Reading order: peft_targets, auto_classes, adoption.
"""

from .adoption import adopt, release
from .auto_classes import register

__all__ = ["adopt", "register", "release"]
