"""Routed experts that are not on the device that computes: in the checkpoint's files, or in RAM beside an accelerator.

Reading order: matrix_cache (which matrix is in which slot, and which makes room), budget (how much memory slots take,
and what else can be chosen), memory (slots that a drive writes to), pieces (which bytes of which file are an expert),
reading (threads that read them, and what may go wrong with a file), copies (to an accelerator), store (all of these for
one model), experts (a layer's experts, beside the resident stack), training (what accelerate and peft must know of
them), loading (from a device map to such experts).
"""

from .budget import ExpertsMemory
from .experts import OffloadedExperts
from .loading import OffloadMixin, attach_stores, replace_with_offloaded, take_request
from .training import freeze_for_training, let_accelerate_train, showing_devices_of_rows
