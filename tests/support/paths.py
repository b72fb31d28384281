"""Paths of the repository, and the environment of programs that tests start."""

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
EXAMPLES = ROOT / "examples"
TINY = EXAMPLES / "llamoe-tiny"


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment for a program that imports `support`, with one thread and `variables`."""
    path = filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"} | variables
