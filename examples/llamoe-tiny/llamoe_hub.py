"""Lets transformers load this folder with `trust_remote_code=True`.

The model's code is not here: it is the installed package llamoe.
"""

from llamoe import *  # noqa: F403
