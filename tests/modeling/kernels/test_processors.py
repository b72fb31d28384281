"""The kernels compiled for other processors than this one: those that can run here, against the plain formulas."""

import platform
import shutil
import subprocess

import pytest
import torch

from llamoe.modeling import kernels
from llamoe.modeling.formats import Int4, Int8
from llamoe.modeling.kernels import cpp_kernels

pytestmark = [
    pytest.mark.skipif(
        cpp_kernels.library() is None, reason="needs a C++ compiler, and a CPU with AVX2, AVX-512 or NEON"
    ),
    pytest.mark.slow,
]
IS_X86 = platform.machine() in ("x86_64", "AMD64")
# Narrower than this processor's, in the order of what they leave out.
BUILDS = {"here": []}
if IS_X86:
    BUILDS |= {
        "AVX-VNNI or AVX2": ["-mno-avx512f"],
        "AVX2": ["-mno-avx512f", "-march=haswell", "-mno-avxvnni"],
        "four lanes": ["-mno-avx512f", "-mno-avxvnni", "-mno-avx2", "-mno-fma", "-mno-f16c"],
    }
FORMATS = [Int4(32), Int4(64), Int8()]
ROUNDED_ONCE = 2**-8


@pytest.fixture(scope="module", params=BUILDS)
def library(request):
    return cpp_kernels.compiled(BUILDS[request.param])


def as_bytes(x):
    """Rows as the kernels quantize them, written out."""
    size = x.shape[1]
    x = torch.nn.functional.pad(x.float(), (0, -size % 32))
    parts = x.unflatten(1, (-1, 32))
    scales = parts.abs().amax(2, keepdim=True) / 127
    return ((parts / scales).nan_to_num().round() * scales).flatten(1)[:, :size]


def error(found, expected):
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()


def matrix_of(form, parts, in_bytes=False):
    bits, size = (4, form.group_size) if isinstance(form, Int4) else (8, 0)
    return cpp_kernels.Matrix(bits, size, *parts, in_bytes=in_bytes)


def multiply(library, x, form, parts, in_bytes):
    return cpp_kernels._multiply(library, x, matrix_of(form, parts, in_bytes))


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("in_bytes", [True, False], ids=["bytes", "float"])
@pytest.mark.parametrize("num_rows", [*range(1, 10), 12, 13, 17])
@pytest.mark.parametrize("is_wide", [False, True], ids=["near", "wide"])
def test_few_bits(form, in_bytes, num_rows, is_wide, library):
    """Also rows that no first cache keeps."""
    torch.manual_seed(num_rows)
    sizes = (128, 7424 if is_wide else 192) if isinstance(form, Int4) else (139, 7309 if is_wide else 208)
    parts = form.quantize(torch.randn(sizes) + 0.1 * torch.randn(sizes[0], 1))
    x = (torch.randn(num_rows, sizes[1]) * torch.rand(num_rows, 1).exp()).bfloat16()
    rows = as_bytes(x) if in_bytes else x.float()
    expected = rows @ form.matrix(parts, sizes, torch.float32).T
    assert error(multiply(library, x, form, parts, in_bytes), expected) < ROUNDED_ONCE


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_and_rows_at_their_ends(bits, num_rows, library):
    """No sum of 16 bits overflows: all products are as large as they can be, of either sign."""
    size, scale = 256, torch.ones(64).bfloat16()
    x = torch.full((num_rows, size), 127.0)
    x[-1] *= -1
    if bits == 4:
        weight = torch.full((64, size), 7.0)
        codes, scales = torch.full((64, size // 2), 0xFF, dtype=torch.uint8), torch.zeros(8, 64, 2).bfloat16()
        scales[:, :, 0] = 1
        matrix = cpp_kernels.Matrix(4, 32, codes, scales, in_bytes=True)
    else:
        codes = torch.full((64, size), -128, dtype=torch.int8)
        codes[::2] = 127
        weight = codes.float()
        matrix = cpp_kernels.Matrix(8, 0, codes, scale, in_bytes=True)
    found = cpp_kernels._multiply(library, x.bfloat16(), matrix)
    assert torch.equal(found, (x @ weight.T).bfloat16())


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("num_rows", [2, 14])
def test_what_is_not_a_number_stays_in_its_row(form, number, num_rows, library):
    parts = form.quantize(torch.randn(64, 128))
    x = torch.zeros(num_rows, 128).bfloat16()
    x[1, 5] = number
    found = multiply(library, x, form, parts, True)
    assert not found[1].isfinite().any()
    others = torch.arange(num_rows) != 1
    assert (found[others] == 0).all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e30])
def test_rows_of_all_sizes(form, size, library):
    parts = form.quantize(torch.randn(64, 64))
    x = (torch.randn(3, 64) * size).bfloat16()
    expected = x.double() @ form.matrix(parts, (64, 64), torch.float32).double().T
    found = multiply(library, x, form, parts, True).double()
    assert ((found - expected).abs() <= 0.02 * expected.abs().max() + 1e-35).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_input_first", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (5, 3), (67, 130), (20, 333), (300, 37), (13, 5237)])
@pytest.mark.parametrize("offset", [0, 1, 9])
def test_plain_numbers(dtype, is_input_first, sizes, offset, library):
    torch.manual_seed(offset)
    num_out, num_in = sizes
    room = torch.full((num_out * num_in + 64,), torch.nan, dtype=dtype)
    weight = room[offset : offset + num_out * num_in].view(sizes[:: -1 if is_input_first else 1])
    weight.normal_()
    weight_OI = weight.T if is_input_first else weight
    matrix = cpp_kernels.plain_matrix(weight_OI)
    for num_rows in (1, 3, 7):
        x = torch.randn(num_rows, num_in).to(dtype)
        expected = x.double() @ weight_OI.double().T
        found = cpp_kernels._multiply(library, x, matrix)
        # Roundings of sums add up as a random walk does.
        one_sum = 2**-24 * (32 + num_in**0.5)
        assert error(found, expected) < (one_sum if dtype == torch.float32 else ROUNDED_ONCE)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 20])
def test_threads_change_nothing(form, num_rows, library):
    parts = form.quantize(torch.randn(320, 256))
    x, threads = torch.randn(num_rows, 256).bfloat16(), torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 8):
            torch.set_num_threads(number)
            found.append(multiply(library, x, form, parts, True))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unpacked_codes_are_the_weights(dtype):
    form, sizes = Int4(32), (192, 96)
    parts = form.quantize(torch.randn(sizes))
    room = torch.full((96, 256), torch.nan, dtype=dtype)
    assert kernels.cpp_unpack(matrix_of(form, parts), room[:, 64:])
    expected = form.matrix(parts, sizes, dtype).T
    assert (room[:, 64:] - expected).abs().max() <= (1e-6 if dtype == torch.float32 else 0)
    assert room[:, :64].isnan().all()


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


# Prints products of numbers that are the same everywhere.
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
