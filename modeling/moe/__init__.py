"""The mixture of experts.

Reading order: grouped_mm_limits, grouped_product, dispatch (which product multiplies the rows of each expert), layer
(router, experts, the formula), losses (router losses and the load of experts).
"""

from .dispatch import IMPLEMENTATION, try_kernels
from .layer import Experts, MixtureOfExperts, Router
from .losses import TrainsRouters, expert_load, load_balancing_loss

__all__ = [
    "Experts",
    "IMPLEMENTATION",
    "MixtureOfExperts",
    "Router",
    "TrainsRouters",
    "expert_load",
    "load_balancing_loss",
    "try_kernels",
]
