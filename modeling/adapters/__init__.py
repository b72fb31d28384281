"""peft's adapters: read, checked, and renamed to a model's keys; and what peft must know of our models.

Reading order: safetensors_headers, expert_layout, fitting, loading, lora_config (which parts LoRA adapts), expert_lora
(how it adapts experts), when_imported, peft_registration.
"""

from .loading import LoadsAdapters
from .lora_config import lora_config
from .peft_registration import register_with_peft

__all__ = ["LoadsAdapters", "lora_config", "register_with_peft"]
