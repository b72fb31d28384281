"""The kernels compile for other processors, and give the same numbers with NEON."""

import platform
import shutil
import subprocess

import pytest
import torch

from llamoe.modeling.kernels import cpp_kernels

pytestmark = pytest.mark.slow
IS_X86 = platform.machine() in ("x86_64", "AMD64")
# Relative error of a number that is rounded to bfloat16 once.
ROUNDED_ONCE = 2**-8
COMPILERS = {
    "znver4": "g++",
    "sapphirerapids": "g++",
    "alderlake": "g++",
    "haswell": "g++",
    "skylake-avx512": "g++",
    "armv8.2-a+dotprod": "aarch64-linux-gnu-g++",
    "armv8-a": "aarch64-linux-gnu-g++",
}


@pytest.mark.parametrize(("processor", "compiler"), COMPILERS.items())
def test_compiles_for(processor, compiler, tmp_path):
    if shutil.which(compiler) is None or (compiler == "g++" and not IS_X86):
        pytest.skip(f"needs {compiler} for {processor}")
    probe = [compiler, f"-march={processor}", "-E", "-x", "c++", "/dev/null", "-o", "/dev/null"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip(f"this {compiler} does not know {processor}")
    source = tmp_path / "kernels.cpp"
    source.write_text(cpp_kernels._source("kernels.cpp"))
    flags = ["-O2", "-std=c++20", "-fopenmp", f"-march={processor}", "-c"]
    done = subprocess.run([compiler, *flags, source, "-o", tmp_path / "o"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Prints products of pseudo-random numbers, which are the same on all processors.
PROGRAM = """
#include <cstdio>
uint16_t rounded(float x) { return (uint16_t)(Brain::rounded_bits(spread(x))[0] >> 16); }
int main() {
  uint32_t state = 1;
  const auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 16; };
  const int64_t inputs = 208 - 16, outputs = 128;
  for (int64_t bits : {4, 8, 16, 32})
    for (int64_t rows : {1, 2, 7, 14})
      for (int64_t in_bytes = 0; in_bytes <= (bits <= 8); in_bytes++) {
        std::vector<char> codes(inputs * outputs * 4), scales(inputs * outputs * 4);
        for (auto& code : codes) code = (char)next();
        for (int64_t i = 0; bits > 8 && i < inputs * outputs; i++)
          if (bits == 32) ((float*)codes.data())[i] = (float)((int)(next() % 255) - 127);
          else ((uint16_t*)codes.data())[i] = rounded((float)((int)(next() % 255) - 127));
        for (int64_t i = 0; i < inputs * outputs; i++)
          ((uint16_t*)scales.data())[i] = rounded((float)(next() % 100) / 64);
        std::vector<float> x(rows * inputs), y(rows * outputs);
        for (int64_t i = 0; i < rows * inputs; i++) {
          const float number = ((float)(next() % 2001) - 1000) / 256;
          if (bits == 32) x[i] = number;
          else ((uint16_t*)x.data())[i] = rounded(number);
        }
        const int64_t stride = bits <= 8 ? outputs : 0;
        product(x.data(), y.data(), rows, bits, codes.data(), scales.data(), inputs, outputs, 32, stride, in_bytes, 1);
        for (int64_t i = 0; i < rows * outputs; i++)
          std::printf("%.6g\\n", bits == 32 ? y[i] : Brain::number(((uint16_t*)y.data())[i]));
      }
}
"""


@pytest.mark.parametrize("processor", ["armv8.2-a+dotprod", "armv8-a"])
def test_neon_gives_the_same_numbers(processor, tmp_path):
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not IS_X86 or emulator is None or shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("needs a cross compiler and qemu-aarch64")
    source = tmp_path / "program.cpp"
    source.write_text(cpp_kernels._source("kernels.cpp") + PROGRAM)
    printed = []
    for compiler, march, run in (
        ("g++", "native", []),
        ("aarch64-linux-gnu-g++", processor, [emulator]),
    ):
        flags = ["-O2", "-std=c++20", "-static", "-ffp-contract=fast", f"-march={march}"]
        program = tmp_path / compiler
        subprocess.run([compiler, *flags, source, "-o", program], check=True, capture_output=True)
        out = subprocess.run([*run, program], check=True, capture_output=True, text=True).stdout
        printed.append(torch.tensor([float(line) for line in out.split()]))
    here, there = printed
    assert len(here) == 24 * 6 * 128 and here.isfinite().all()
    assert ((here - there).abs() <= ROUNDED_ONCE * here.abs() + 1e-3 * here.abs().max()).all()
