"""The compiled CPU kernels: products with packed and plain weights are compared with products in float32.

Kernels for processors with fewer instructions, if they run on this one, have the same tests.
"""

import ctypes
import math
import platform
from itertools import product

import pytest
import torch
from torch._inductor import config as inductor_config

from llamoe import LlamoeTextConfig
from llamoe.modeling import kernels
from llamoe.modeling._private_api import compile_cpp
from llamoe.modeling.formats import Int4, Int8, few_bits, int4
from llamoe.modeling.kernels import cpp_kernels
from llamoe.modeling.layers import FeedForward
from llamoe.modeling.moe import Experts, OutputFirstExperts

pytestmark = pytest.mark.skipif(
    cpp_kernels.library() is None, reason="needs a C++ compiler, and a CPU with AVX2, AVX-512 or NEON"
)
# Compiler flags that leave out more and more instructions.
NARROWER = {
    "AVX-VNNI or AVX2": ["-mno-avx512f"],
    "AVX2": ["-mno-avx512f", "-march=haswell", "-mno-avxvnni"],
    "four lanes": ["-mno-avx512f", "-mno-avxvnni", "-mno-avx2", "-mno-fma", "-mno-f16c"],
}
if platform.machine() not in ("x86_64", "AMD64"):
    NARROWER = {}
FORMATS = [Int4(32), Int4(64), Int8()]
for_formats = pytest.mark.parametrize("form", FORMATS, ids=str)
# Error relative to the largest number: sums in float32 are nearly exact, and rounded to bfloat16 once.
ROUNDED_ONCE = 2**-8


@pytest.fixture(
    scope="module", params=["here", *(pytest.param(name, marks=pytest.mark.slow) for name in NARROWER)]
)
def library(request):
    return cpp_kernels.library() if request.param == "here" else cpp_kernels.compiled(NARROWER[request.param])


def matrix_of(form, parts, in_bytes=False):
    bits, size = (4, form.group_size) if isinstance(form, Int4) else (8, 0)
    return cpp_kernels.Matrix(bits, size, *parts, in_bytes=in_bytes)


def multiply(library, x, form, parts, in_bytes):
    return cpp_kernels._multiply(library, x, matrix_of(form, parts, in_bytes))


def as_bytes(x):
    """Return rows after quantization to bytes, as the kernels do it, and back."""
    size = x.shape[1]
    x = torch.nn.functional.pad(x.float(), (0, -size % 32))
    parts = x.unflatten(1, (-1, 32))
    scales = parts.abs().amax(2, keepdim=True) / 127
    return ((parts / scales).nan_to_num().round() * scales).flatten(1)[:, :size]


def error(found, expected):
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("form", "in_bytes"), [*product(FORMATS, [True, False]), (Int4(128), False)], ids=str
)
@pytest.mark.parametrize("num_rows", [*range(10), 12, 13, 17])
@pytest.mark.parametrize("is_wide", [False, True], ids=["near", "wide"])
def test_few_bits(form, in_bytes, num_rows, is_wide, library):
    """Wide rows do not fit into the L1 cache."""
    torch.manual_seed(num_rows)
    sizes = (128, 7424 if is_wide else 384) if isinstance(form, Int4) else (203, 7309 if is_wide else 208)
    parts = form.quantize(torch.randn(sizes) + 0.1 * torch.randn(sizes[0], 1))
    x = (torch.randn(num_rows, sizes[1]) * torch.rand(num_rows, 1).exp()).bfloat16()
    found = multiply(library, x, form, parts, in_bytes)
    assert found.shape == (num_rows, sizes[0])
    if num_rows:
        rows = as_bytes(x) if in_bytes else x.float()
        assert error(found, rows @ form.matrix(parts, sizes, torch.float32).T) < ROUNDED_ONCE


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_codes_and_rows(bits, num_rows, library):
    """Sums of 16 bits do not overflow if all products have the largest magnitude, with both signs."""
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


@for_formats
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("num_rows", [2, 14])
def test_nan_and_infinity_stay_in_their_row(form, number, num_rows, library):
    parts = form.quantize(torch.randn(64, 128))
    x = torch.zeros(num_rows, 128).bfloat16()
    x[1, 5] = number
    found = multiply(library, x, form, parts, True)
    assert not found[1].isfinite().any()
    others = torch.arange(num_rows) != 1
    assert (found[others] == 0).all()


@for_formats
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e30])
def test_rows_of_all_sizes(form, size, library):
    parts = form.quantize(torch.randn(64, 64))
    x = (torch.randn(3, 64) * size).bfloat16()
    expected = x.double() @ form.matrix(parts, (64, 64), torch.float32).double().T
    found = multiply(library, x, form, parts, True).double()
    assert ((found - expected).abs() <= 0.02 * expected.abs().max() + 1e-35).all()


@for_formats
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
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unpacked_codes_are_the_weights(dtype):
    form, sizes = Int4(32), (192, 96)
    parts = form.quantize(torch.randn(sizes))
    room = torch.full((96, 256), torch.nan, dtype=dtype)
    assert kernels.cpp_unpack(matrix_of(form, parts), room[:, 64:])
    expected = form.matrix(parts, sizes, dtype).T
    assert (room[:, 64:] - expected).abs().max() <= (1e-6 if dtype == torch.float32 else 0)
    assert room[:, :64].isnan().all()


def test_gradients_of_rows_unpack_by_the_kernel(monkeypatch):
    """Torch's operations take 16 times as long to unpack a matrix. Results are rounded at most twice in both ways."""
    form, num_out, num_in = Int4(64), 192, 320
    parts = form.quantize(torch.randn(num_out, num_in))
    weight = form.matrix(parts, (num_out, num_in), torch.float32)
    x = torch.randn(7, num_out).bfloat16()
    for is_cast in (False, True):
        dtype = torch.float32 if is_cast else torch.bfloat16
        monkeypatch.setattr(few_bits, "dtype_of_blocks", lambda rows, dtype=dtype: dtype)
        monkeypatch.setattr(int4, "unpack", lambda *_: pytest.fail("unpacked by torch"))
        found = form.multiply_transposed(x, parts, (num_out, num_in))
        # For products in bfloat16 the matrix is rounded, too.
        assert error(found, x.float() @ weight) < 2 * ROUNDED_ONCE


@pytest.fixture
def first_use(monkeypatch):
    """Reset the module's state to that before the first use of the kernels."""
    for name, value in {"_library": False, "_why_none": ("", ""), "_reasons": []}.items():
        monkeypatch.setattr(cpp_kernels, name, value)


def products_without_kernels():
    """Return the errors of products with packed weights, for few rows and many."""
    parts = Int4(32).quantize(torch.randn(128, 64))
    expected = Int4(32).matrix(parts, (128, 64), torch.float32).T
    rows = [torch.randn(num_rows, 64).bfloat16() for num_rows in (1, 3, 100)]
    return [error(Int4(32, in_bytes=True).multiply(x, parts, (128, 64)), x.float() @ expected) for x in rows]


@pytest.mark.parametrize("is_off", [True, False])
def test_without_kernels_torch_computes(is_off, first_use, tmp_path, monkeypatch, caplog):
    """If kernels are turned off, or cannot be compiled, which is logged once, torch gives the same numbers."""
    monkeypatch.setenv("LLAMOE_CPP_KERNELS", str(int(not is_off)))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with inductor_config.patch({"cpp.cxx": (None, "/bin/false")}):
        assert max(products_without_kernels()) < 0.01
        assert cpp_kernels.library() is None
    assert caplog.text.count("were not compiled") == (not is_off)


def test_kernels_with_a_wrong_number_are_not_used(first_use, monkeypatch, caplog):
    """If one number of a product has the wrong sign, the check at the first use finds it, and logs that once."""
    right = cpp_kernels.compiled(cpp_kernels.flags_of_processor())

    class Wrong:
        def product(self, x, y, *others):
            right.product(x, y, *others)
            number = ctypes.c_uint16.from_address(y)
            number.value ^= 0x8000

    monkeypatch.setattr(cpp_kernels, "compiled", lambda flags: Wrong())
    assert max(products_without_kernels()) < 0.01
    assert cpp_kernels.why_no_cpp_kernels()[0] == "their results are wrong on this machine"
    assert caplog.text.count("their results are wrong on this machine") == 1


def test_a_folder_that_cannot_be_written_is_named(first_use, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file/below"))
    assert max(products_without_kernels()) < 0.01
    why, remedy = cpp_kernels.why_no_cpp_kernels()
    assert str(tmp_path / "file") in why and "TORCHINDUCTOR_CACHE_DIR" in remedy
    assert caplog.text.count("were not compiled") == 1


def test_processors_do_not_load_each_others_kernels(tmp_path, monkeypatch):
    """Even if they share a folder, as machines of a cluster do."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def file_here():
        return compile_cpp('extern "C" int f() { return 7; }', cpp_kernels.flags_of_processor())._name

    here, can = file_here(), torch.cpu.get_capabilities()
    assert file_here() == here
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**can, "a_later_instruction": True})
    assert file_here() != here


# Error relative to the largest number, by dtype: sums are in float32, in another order; bfloat16 is rounded once.
PLAIN = {torch.float32: 2e-6, torch.bfloat16: ROUNDED_ONCE}
for_plain = pytest.mark.parametrize("dtype", PLAIN, ids=["float32", "bfloat16"])


def placed(shape, dtype, offset):
    """Return random numbers that begin `offset` bytes after a multiple of 64; numbers around them are NaN."""
    size = math.prod(shape)
    room = torch.full((size + 192,), torch.nan, dtype=dtype)
    start = (-room.data_ptr() % 64 + offset) // dtype.itemsize + 64 // dtype.itemsize
    found = room[start : start + size].view(shape)
    return found.copy_(torch.randn(shape)) if size else found


@for_plain
@pytest.mark.parametrize(
    ("num_in", "offset"),
    [(1, 0), (15, 4), (64, 56), (130, 0), (333, 4), (333, 56), (1024, 0), (1024, 4), (5237, 36)],
)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 7])
def test_plain_products(dtype, offset, num_in, num_rows, library):
    torch.manual_seed(num_in)
    x = placed((num_rows, num_in), dtype, 8)
    # Errors of sums grow with the square root of the number of terms.
    tolerance = 2**-24 * (32 + num_in**0.5) if dtype == torch.float32 else ROUNDED_ONCE
    for num_out in (1, 67, 20):
        for weight in (placed((num_out, num_in), dtype, offset), placed((num_in, num_out), dtype, offset).T):
            expected = x.double() @ weight.double().T
            found = cpp_kernels._multiply(library, x, cpp_kernels.plain_matrix(weight))
            assert found.dtype == dtype and found.shape == expected.shape
            assert not num_rows or error(found, expected) < tolerance


@torch.no_grad()
@for_plain
@pytest.mark.parametrize("num_rows", [1, 4, 16, 17])
def test_layers_and_experts_use_the_kernels(dtype, num_rows, monkeypatch):
    """For few rows; the numbers are those of torch's products."""
    layer = FeedForward(192, 320, "silu").to(dtype)
    config = LlamoeTextConfig(hidden_size=192, intermediate_size=104, num_local_experts=3)
    experts = [Experts(config).to(dtype), OutputFirstExperts(config).to(dtype)]
    for module in experts:
        module.config = config
        for stack in module.parameters():
            stack.normal_(std=0.1)
    x = torch.randn(num_rows, 192).to(dtype)
    chosen = torch.arange(num_rows)[:, None] % 3
    weights = torch.rand(num_rows, 1).to(dtype)
    taken = []
    multiply = cpp_kernels._multiply
    monkeypatch.setattr(cpp_kernels, "_multiply", lambda *args: taken.append(1) or multiply(*args))

    def outputs():
        taken.clear()
        return [layer(x), *(module(x, chosen, weights) for module in experts)]

    found = outputs()
    # If there are 17 rows, each expert has fewer.
    assert len(taken) >= 3 or num_rows > kernels.plain_max_rows(dtype)
    monkeypatch.setattr(cpp_kernels, "_library", None)
    for ours, expected in zip(found, outputs(), strict=True):
        assert error(ours, expected.float()) < 4 * PLAIN[dtype]
    assert not taken


@for_plain
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (6, 6), (5, 1), (8, 1)])
@pytest.mark.parametrize(("keys", "size"), [(1, 16), (37, 20), (300, 128)])
def test_attention_of_one_query(heads, groups, keys, size, dtype):
    query = placed((1, heads, 1, size), dtype, 4)
    # Slices, as in a cache with spare places.
    key, value = (placed((1, groups, keys + 9, size), dtype, 8)[:, :, :keys] for _ in range(2))
    shared = [states.float().repeat_interleave(heads // groups, 1) for states in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query.float(), *shared, scale=0.3)
    found = cpp_kernels.cpp_attention(query, key, value, 0.3)
    assert found.shape == (1, 1, heads, size)
    assert error(found.transpose(1, 2), expected) < 2 * PLAIN[dtype]
    assert cpp_kernels.cpp_attention(query, key[..., : size - 1], value[..., : size - 1], 0.3) is None
    assert cpp_kernels.cpp_attention(query, key.to(torch.float64), value, 0.3) is None


@for_plain
def test_weights_at_odd_addresses_are_multiplied_by_torch(dtype):
    """Tensors of a mapped safetensors file may begin at any byte."""
    numbers = torch.randn(7 * 96).to(dtype)
    content = bytearray(b"?") + numbers.view(torch.uint8).numpy().tobytes()
    weight = torch.frombuffer(content, dtype=dtype, offset=1).view(7, 96)
    assert torch.equal(weight.flatten(), numbers)
    if weight.data_ptr() % dtype.itemsize:
        assert cpp_kernels.plain_matrix(weight) is None
    x = torch.randn(2, 96).to(dtype)
    assert error(kernels.linear(x, weight), x.float() @ weight.float().T) < PLAIN[dtype]


def test_sizes_that_do_not_fit_have_no_kernel():
    """Kernels do not check sizes. Torch's product raises an error."""
    x = torch.randn(2, 96)
    assert kernels.cpp_product(x, cpp_kernels.plain_matrix(torch.randn(64, 80))) is None
    with torch.no_grad(), pytest.raises(RuntimeError):
        kernels.linear(x, torch.randn(512, 80))


def test_a_default_device_changes_nothing(first_use):
    """The check before the first use has its numbers on the CPU, whatever the default device is."""
    torch.set_default_device("meta")
    try:
        assert cpp_kernels.library() is not None, cpp_kernels.why_no_cpp_kernels()
    finally:
        torch.set_default_device(None)
