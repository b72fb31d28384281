"""Routed experts that stay in the checkpoint's files, or in RAM while the tokens are on an accelerator.

The experts of a layer (`experts`) call `Store.walk` in each forward and backward pass. It finds their matrices in slots
of memory (`matrix_cache`), and loads missing ones from files (`reading`) or from RAM (`copies`).

Reading order: matrix_cache (slots and eviction), budget (number of slots), memory (aligned and pinned memory), pieces
(which bytes of which file are a matrix), reading (threads that read files), copies (to an accelerator), store (all of
the above for one model), experts (a layer's experts, and their product for autograd), loading (turns experts of a model
into offloaded ones, by a device map).
"""

from .experts import OffloadedExperts, freeze_for_training
from .loading import OffloadMixin, attach_stores, replace_with_offloaded, take_request
