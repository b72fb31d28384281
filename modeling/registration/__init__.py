"""Our model classes in the registries of transformers, and of vLLM.

Reading order: auto_classes, adoption, vllm_plugin (which vLLM imports, and nothing here).
"""

from .adoption import adopt, release
from .auto_classes import register

__all__ = ["adopt", "register", "release"]
