"""Check that two checkpoints hold the same model: `llamoe verify`.

Reading order: compare_stored (weights as they are stored), run_streamed (logits, one matrix at a time), command.
"""

from .command import Verification, verify
