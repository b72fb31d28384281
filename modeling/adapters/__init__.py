"""peft's adapters: LoRA on stacks of experts, and what peft must know of our models.

Reading order: expert_layout (the factors of stacks), unsupported (what adapters cannot do), adapted_parts (a config for
parts of a model), stack_targets (which parameters an adapter changes), loading, expert_lora (peft's layers beside
ours), _private_api (what peft does otherwise), when_imported, peft_registration.
"""

from .adapted_parts import lora_config
from .loading import LoadsAdapters
from .peft_registration import register_with_peft
