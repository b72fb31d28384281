"""The mixture of experts.

Reading order: grouped_mm_limits (what torch's grouped product accepts), grouped_product (each expert's rows times its
matrix), stores (where the experts' numbers are, and the loop that defines their result), dispatch (rows sorted by
expert, and which product multiplies them), layer (which experts, with what weight), losses (router losses and the load
of experts).
"""

from .dispatch import try_kernels
from .layer import MixtureOfExperts, Router
from .losses import TrainsRouters, expert_load
from .stores import IMPLEMENTATION, Experts

__all__ = [
    "Experts",
    "IMPLEMENTATION",
    "MixtureOfExperts",
    "Router",
    "TrainsRouters",
    "expert_load",
    "try_kernels",
]
