"""Plan a model's memory, placement on devices and nodes, and speed, before a weight is read.

Reading order: source (what is planned), units (the parts that are placed whole, and their bytes), bandwidths (of
this machine, or assumed), filling (devices are filled in order, and experts offloaded), speed (seconds of a token),
table (a plan as text), training (what a step with adapters takes), shares (what each of several processes holds),
nodes (a model on several machines), one_machine (on one; the entrance).
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
