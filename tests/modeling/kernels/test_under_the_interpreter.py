"""The Triton kernels and their check before the first use, run by Triton's interpreter.

Triton decides when it is imported whether kernels are compiled, hence processes of their own.
"""

import re

import pytest
from support import programs
from support.paths import ROOT, SUPPORT, environment


@pytest.mark.parametrize(
    "file", ["interpreted_kernels.py", pytest.param("interpreted_check.py", marks=pytest.mark.slow)]
)
def test_under_the_interpreter(file):
    pytest.importorskip("triton", reason="Triton is not installed")
    done = programs.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(SUPPORT / file)],
        cwd=ROOT,
        env=environment(TRITON_INTERPRET="1"),
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in", done.stdout, re.MULTILINE), done.stdout
