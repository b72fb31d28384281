"""Routed experts that are not on the device that computes: in the checkpoint's files, or in RAM beside an accelerator.

A forward or backward pass begins in experts and calls `Store.walk`, which looks matrices up in a matrix_cache, and
loads missing ones by reading or copies.

Reading order: matrix_cache (slots and eviction), budget (number of slots), memory (aligned and pinned memory), pieces
(which bytes of which file are a matrix), reading (threads that read them), copies (to an accelerator), store (all of
these for one model), experts (a layer's experts and their product for autograd), loading (from a device map to
offloaded experts).
"""

from .experts import OffloadedExperts, freeze_for_training
from .loading import OffloadMixin, attach_stores, replace_with_offloaded, take_request
