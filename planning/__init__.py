"""Plan where a model's weights go on a machine, and how much memory and time it takes, before a weight is read.

Reading order: source (the model to plan), units (its layers and other modules with their bytes), bandwidths (measured
or assumed), filling (assigns units to devices), speed (estimates the seconds of a token), table (formats a plan as
text), training (memory of a training step with adapters), shares (weights of each process in parallel runs), nodes
(plans for several machines), one_machine (plans for one machine, and `plan_placement`, which calls all of these files).
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
