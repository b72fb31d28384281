"""The mixture of experts.

Reading order: grouped_mm_limits (what torch's grouped product accepts), grouped_product (each expert's rows times its
matrix), low_rank (what adapters add to it), state_dicts (experts that come one by one), experts (the module, and the
loop that defines its result), dispatch (rows sorted by expert, and which product multiplies them), layer (which
experts, with what weight), losses (router losses and the load of experts), balancing (routers watched in training, and
balanced without a loss), trace (which experts compute which tokens).
"""

from .balancing import RouterWatch, watch_routers
from .dispatch import check_kernels, choose_path, why_not
from .experts import IMPLEMENTATION, STACKS, Experts, OutputFirstExperts, implementation_can
from .grouped_mm_limits import grouped_mm_fits
from .grouped_product import (
    Group,
    Ranges,
    Stack,
    groups_between,
    multiply_groups,
    multiply_one,
    multiply_sorted,
)
from .layer import MixtureOfExperts, Router
from .losses import RouterLossMixin, expert_load
from .low_rank import LowRank, Updates, forget_factors
from .state_dicts import (
    PARTS_OF_STACKS,
    PLACES,
    ExpertMatrix,
    fuse,
    like,
    matrix_named,
    missing_matrices,
    put_matrix,
    take_matrices,
)
from .trace import ExpertTrace, trace_experts
