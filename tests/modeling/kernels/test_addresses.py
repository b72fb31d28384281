"""The compiled kernels read and write no byte outside of tensors: AddressSanitizer checks their tests."""

import re
import shutil
import subprocess
import sys

import pytest
from support.paths import ROOT, SUPPORT, environment

from llamoe.modeling.kernels import cpp_kernels

pytestmark = pytest.mark.slow

FOLDER = "tests/modeling/kernels"


def test_no_byte_beside_a_tensor_is_touched(tmp_path):
    if cpp_kernels.library() is None or shutil.which("gcc") is None:
        pytest.skip("needs GCC, and a CPU with AVX2, AVX-512 or NEON")
    # The C++ library must be loaded early, too: other libraries throw exceptions through it.
    loaded = [library_of_gcc(name) for name in ("libasan.so", "libstdc++.so")]
    if not all("/" in path for path in loaded):
        pytest.skip("needs AddressSanitizer, which GCC calls libasan")
    files = [f"{FOLDER}/test_cpp_kernels.py"]
    # In a process of its own, since these libraries must be loaded first.
    done = subprocess.run(
        [sys.executable, SUPPORT / "sanitized.py", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        cwd=ROOT,
        env=environment(
            LD_PRELOAD=" ".join(loaded),
            ASAN_OPTIONS="detect_leaks=0",
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
        ),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout
    # Check that the kernels were compiled with AddressSanitizer.
    kernels = [path for path in tmp_path.rglob("*.so") if b"__asan_report" in path.read_bytes()]
    assert kernels


def library_of_gcc(name):
    words = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
