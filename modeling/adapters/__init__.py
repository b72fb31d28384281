"""peft's adapters: read, and renamed to a model's keys; and what peft must know of our models.

Reading order: files, expert_layout, stack_targets (which parameters an adapter means), fitting, loading, adapted_parts
(which LoRA adapts), expert_lora (how they adapt), when_imported, packed_weights (what peft may do beside them),
linear_lora, peft_registration.
"""

from .adapted_parts import lora_config
from .loading import LoadsAdapters
from .peft_registration import register_with_peft
