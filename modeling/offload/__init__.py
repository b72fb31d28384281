"""Routed experts that are not on the device that computes: in the checkpoint's files, or in RAM beside an accelerator.

To follow a pass, forwards or back, read experts, then `Store.walk` in store, then what that calls: the table of
matrix_cache, and reading or copies.

Reading order: matrix_cache (which matrix is in which slot, and which makes room), budget (how many there is room for),
memory (slots that a drive writes to), pieces (which bytes of which file are a matrix), reading (threads that read
them), copies (to an accelerator), store (all of these for one model), experts (a layer's experts, its stacks, and their
product for autograd, what peft must know of them), loading (from a device map to such experts).
"""

from .experts import OffloadedExperts, freeze_for_training
from .loading import OffloadMixin, attach_stores, replace_with_offloaded, take_request
