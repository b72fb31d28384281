"""The Triton kernels and their check before the first use, run by Triton's interpreter.

Triton decides when it is imported whether kernels are compiled, hence processes of their own.
"""

import re

import pytest
from support import programs
from support.paths import ROOT, SUPPORT, environment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("files", "options"),
    [
        # A process of their own would start as long as some of them last, so they share one.
        (["interpreted_kernels.py", "interpreted_packed.py"], []),
        (["interpreted_packed.py"], ["--run-slow", "-m", "slow"]),
        (["interpreted_check.py"], []),
    ],
)
def test_under_the_interpreter(files, options):
    pytest.importorskip("triton", reason="Triton is not installed")
    done = programs.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + [*(str(SUPPORT / file) for file in files), *options],
        cwd=ROOT,
        env=environment(TRITON_INTERPRET="1"),
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # What this process leaves to another run is left out there, too.
    others = r"(, \d+ (skipped|deselected|warnings?))*"
    assert re.search(rf"^\d+ passed{others} in", done.stdout, re.MULTILINE), done.stdout
