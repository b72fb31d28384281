"""On which device each part of a model goes, planned before a weight is read, and how fast it would run there.

Reading order: quantities (sizes as texts), units (the parts that are placed whole, and their bytes), bandwidths (of
this machine, or assumed), filling (devices are filled in order), speed (seconds of a token), table (a plan as text),
one_machine (the choice, and its arithmetic).
"""

from .bandwidths import Bandwidths, measure_bandwidths
from .one_machine import PlacementPlan, plan_placement
from .table import lines_of, rows_of_devices, rows_of_experts, rows_of_speed

__all__ = [
    "Bandwidths",
    "PlacementPlan",
    "lines_of",
    "measure_bandwidths",
    "plan_placement",
    "rows_of_devices",
    "rows_of_experts",
    "rows_of_speed",
]
