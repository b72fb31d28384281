"""peft's adapters: read, checked, and renamed to a model's keys; and what peft must know of our models.

Reading order: safetensors_headers, expert_layout, stack_targets (which parameters an adapter means), fitting, loading,
adapted_parts (which LoRA adapts), expert_begin (how factors of experts begin), expert_lora (how they adapt experts),
packed_weights (what peft may do beside them), when_imported, peft_registration.
"""

from .adapted_parts import lora_config
from .loading import LoadsAdapters
from .peft_registration import register_with_peft

__all__ = ["LoadsAdapters", "lora_config", "register_with_peft"]
