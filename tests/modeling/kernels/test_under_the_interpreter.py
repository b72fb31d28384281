"""The Triton kernels and who trusts them, run by Triton's interpreter.

Triton decides when it is imported whether kernels are compiled, hence a process of its own: one for both files, since
it spends seconds on imports.
"""

import os
import re
import subprocess
import sys

import pytest
from support.paths import ROOT, SUPPORT, environment


def test_kernels_and_trust_under_the_interpreter(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    files = [str(SUPPORT / name) for name in ("interpreted_kernels.py", "interpreted_trust.py")]
    # Python runs this where it starts: in the process that tries kernels apart, too.
    (tmp_path / "sitecustomize.py").write_text("from support import triton_interpreter\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        env=environment(TRITON_INTERPRET="1", PYTHONPATH=path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in", done.stdout, re.MULTILINE), done.stdout
