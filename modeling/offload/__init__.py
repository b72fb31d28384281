"""Routed experts that are not on the device that computes: in the checkpoint's files, or in RAM beside an accelerator.

Reading order: matrix_cache (slots of one preallocated memory, and which matrix makes room), budget (how much memory
that is, and what else can be chosen), memory (slots that a drive writes to), pieces (which bytes of which file are an
expert), reading (threads that read them, and what may go wrong with a file), copies (from RAM to an accelerator),
costs (a matrix in RAM is brought, or its rows are computed where it lies),
statistics, store (all of these for one model), experts (a layer's experts, beside the resident stack), loading (from
a device map to such experts).
"""

from .budget import ExpertsMemory
from .experts import OffloadedExperts
from .loading import OffloadMixin, attach_stores, parse_experts_map, replace_with_offloaded
from .matrix_cache import LeastRecentlyUsed
from .statistics import ExpertsStatistics
