"""The Triton kernels and their check before the first use, run by Triton's interpreter in a process of its own."""

import re
import subprocess
import sys

import pytest
from support.paths import ROOT, SUPPORT, environment


@pytest.mark.slow
def test_under_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + [str(SUPPORT / "interpreted_kernels.py")],
        cwd=ROOT,
        env=environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in", done.stdout, re.MULTILINE), done.stdout
