"""AddressSanitizer over the tests of the compiled kernels: no byte beside a tensor is read or written."""

import re
import shutil
import subprocess

import pytest
from support import programs
from support.paths import ROOT, SUPPORT, environment

from llamoe.modeling.kernels import cpp_kernels

FOLDER = "tests/modeling/kernels"


@pytest.mark.slow
def test_no_byte_beside_a_tensor_is_touched(tmp_path):
    if cpp_kernels.library() is None or shutil.which("gcc") is None:
        pytest.skip("needs GCC, and a CPU with AVX2, AVX-512 or NEON")
    words = ["gcc", "-print-file-name=libasan.so"]
    sanitizer = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    if "/" not in sanitizer:
        pytest.skip("needs AddressSanitizer, which GCC calls libasan")
    files = [f"{FOLDER}/test_{name}.py" for name in ("cpp_kernels", "mixture", "decode")]
    done = programs.run(
        [str(SUPPORT / "sanitized.py"), "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        cwd=ROOT,
        env=environment(
            LD_PRELOAD=sanitizer, ASAN_OPTIONS="detect_leaks=0", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)
        ),
        timeout=1800,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout
