"""peft's adapters: read, checked, and renamed to a model's keys; and what peft must know of our models.

Reading order: safetensors_headers, expert_layout, fitting, loading, when_imported, peft_registration.
"""

from .loading import LoadsAdapters
from .peft_registration import register_with_peft

__all__ = ["LoadsAdapters", "register_with_peft"]
