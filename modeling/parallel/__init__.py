"""Several devices: plans for tensor, expert, pipeline and FSDP2 parallelism, and gathering shards for a save.

Reading order: gathering, distribution.
"""

from .distribution import Distributed
from .gathering import is_sharded, is_shared, joined, sharded_adapter, size_of
