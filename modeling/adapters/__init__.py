"""peft's adapters on llamoe's models, with LoRA on stacks of experts.

Reading order: expert_layout (LoRA factors of stacks), unsupported (error messages), adapted_parts (`lora_config`),
stack_targets (which parameters an adapter changes), loading, expert_lora (LoRA layers for llamoe's modules),
_private_api (patches of peft), when_imported (runs a function when a library is imported), peft_registration.
"""

from .adapted_parts import lora_config
from .loading import LoadsAdapters
from .peft_registration import register_with_peft
