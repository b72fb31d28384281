"""The mixture of experts.

Reading order: products (each expert's rows times its matrix), low_rank (LoRA on experts), single_experts (experts that
a checkpoint stores one by one), experts (the module: rows sorted by expert, their products, and the loop that defines
the result), layer (router and mixture layer), losses (router losses and the load of experts), balancing (reports on
routers in training, and a bias that balances them), trace (a record of which experts compute which tokens).
"""

from .balancing import RouterWatch, watch_routers
from .experts import (
    IMPLEMENTATION,
    STACKS,
    Experts,
    OutputFirstExperts,
    check_kernels,
)
from .layer import MixtureOfExperts, Router
from .losses import RouterLossMixin, expert_load
from .low_rank import NO_LORA, ExpertsLora, LowRank
from .products import Group, Stack, groups_between, multiply_groups, multiply_one
from .single_experts import (
    PARTS_OF_STACKS,
    PLACES,
    ExpertMatrix,
    fuse,
    matrix_named,
    put_matrix,
)
from .trace import ExpertTrace, trace_experts
