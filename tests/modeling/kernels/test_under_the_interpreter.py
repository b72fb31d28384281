"""The Triton kernels and who trusts them, run by Triton's interpreter.

Triton decides when it is imported whether kernels are compiled, hence a process of its own, one for both files.
"""

import os
import re

import pytest
from support import programs
from support.paths import ROOT, SUPPORT, environment


def test_kernels_and_trust_under_the_interpreter(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    files = [str(SUPPORT / name) for name in ("interpreted_kernels.py", "interpreted_trust.py")]
    # Python runs this where it starts: in the process that tries kernels apart, too.
    (tmp_path / "sitecustomize.py").write_text("from support import triton_interpreter\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = programs.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        cwd=ROOT,
        env=environment(TRITON_INTERPRET="1", PYTHONPATH=path),
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in", done.stdout, re.MULTILINE), done.stdout
