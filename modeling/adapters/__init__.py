"""peft's adapters on llamoe's models, with LoRA on stacks of experts.

Reading order: expert_layout (the factors of stacks), unsupported (what adapters cannot do), adapted_parts (a config for
parts of a model), stack_targets (which parameters an adapter changes), loading, expert_lora (LoRA layers for llamoe's
modules), _private_api (patches of peft), when_imported, peft_registration.
"""

from .adapted_parts import lora_config
from .loading import LoadsAdapters
from .peft_registration import register_with_peft
