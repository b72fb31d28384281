"""The Triton kernels and who trusts them, run by Triton's interpreter.

Triton decides when it is imported whether kernels are compiled, hence processes of their own.
"""

import os
import re

import pytest
from support import programs
from support.paths import ROOT, SUPPORT, environment


@pytest.mark.parametrize(
    "file", ["interpreted_kernels.py", pytest.param("interpreted_trust.py", marks=pytest.mark.slow)]
)
def test_under_the_interpreter(file, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    # Python runs this where it starts: in the process that tries kernels apart, too.
    (tmp_path / "sitecustomize.py").write_text("from support import triton_interpreter\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = programs.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(SUPPORT / file)],
        cwd=ROOT,
        env=environment(TRITON_INTERPRET="1", PYTHONPATH=path),
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in", done.stdout, re.MULTILINE), done.stdout
