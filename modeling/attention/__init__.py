"""Attention: masks and what replaces them, KV caches, and the module.

Reading order: cache (length and keys of a KV cache before a forward), growing_cache (appending to a cache in place),
implementation (choice of the attention implementation), visibility (which tokens see each other), mask_inputs (padding,
positions and segments of a forward), equal_rows and varlen (attention without a mask), forms (masks, and a table of
what replaces them), cache_checks (does a cache fit the model?), layer (the module).
"""

from .cache import cached_length
from .cache_checks import check_cache
from .equal_rows import window_block
from .forms import attention_masks
from .implementation import implementation_on
from .layer import Attention, eager_attention_forward
from .mask_inputs import MaskInputs, mask_of_new_tokens
from .visibility import rules_of
