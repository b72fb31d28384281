"""Plan a model's memory, placement on devices and nodes, and speed, before a weight is read.

Reading order: source (the model to plan), units (its parts and their bytes), bandwidths (measured or assumed), filling
(assigns parts to devices), speed (estimates seconds of a token), table (formats a plan as text), training (memory of a
training step with adapters), shares (weights of each process in parallel runs), nodes (plans for several machines),
one_machine (plans for one; begins every plan).
"""

from .bandwidths import Bandwidths, measure_bandwidths
from .nodes import NodesPlan
from .one_machine import PlacementPlan, plan_placement
from .source import Source, read_source
from .table import rows_of
from .training import DEFAULT_TOKENS, TrainingPlan
from .units import packed_bytes, weight_bytes

__all__ = [
    "DEFAULT_TOKENS",
    "Bandwidths",
    "NodesPlan",
    "PlacementPlan",
    "Source",
    "TrainingPlan",
    "measure_bandwidths",
    "packed_bytes",
    "plan_placement",
    "read_source",
    "rows_of",
    "weight_bytes",
]
