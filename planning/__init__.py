"""On which device each part of a model goes, planned before a weight is read, and how fast it would run there.

Reading order: units (the parts that are placed whole, and their bytes), bandwidths (of
this machine, or assumed), filling (devices are filled in order), speed (seconds of a token), table (a plan as text),
traffic (what processes send each other), nodes (a model on several machines), one_machine (on one; the entrance).
"""

from .bandwidths import Bandwidths, measure_bandwidths
from .nodes import NodesPlan
from .one_machine import PlacementPlan, plan_placement
from .table import lines_of, rows_of_devices, rows_of_experts, rows_of_speed

__all__ = [
    "Bandwidths",
    "NodesPlan",
    "PlacementPlan",
    "lines_of",
    "measure_bandwidths",
    "plan_placement",
    "rows_of_devices",
    "rows_of_experts",
    "rows_of_speed",
]
