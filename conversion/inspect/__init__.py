"""What a checkpoint is and how much memory it needs: `llamoe inspect`.

Reading order: describe (family and sizes), command.
"""

from .command import Inspection, inspect
