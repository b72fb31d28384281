"""What a checkpoint is and how much memory it needs: `llamoe inspect`.

Reading order: describe (family and sizes), open_partly (damaged
checkpoints too), gguf (what llama.cpp makes of it), command.
"""

from .command import Inspection, inspect
