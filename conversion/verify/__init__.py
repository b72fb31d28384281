"""Whether two checkpoints hold the same model: `llamoe verify`.

Reading order: compare_stored (weights as they are stored), run_streamed (logits, one layer at a time), common_parts,
report, compare_unreached (weights that no logit depends on), command.
"""

from .command import Verification, verify
from .compare_stored import compare_configs
