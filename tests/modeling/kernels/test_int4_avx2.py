"""The compiled kernel of 4 bits for AVX2, on every processor that has it: against the numbers that the codes mean."""

import pytest
import torch

from llamoe.modeling.formats import Int4
from llamoe.modeling.kernels import cpp_kernels

HAS_AVX2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
# Of the largest number: a product is rounded to bfloat16 once, its sum in float32 is nearly exact.
ROUNDED_ONCE = 2**-8


@pytest.fixture(scope="module")
def library():
    """On a processor with AVX-512 it is not the one that serves, and runs nevertheless."""
    if not HAS_AVX2:
        pytest.skip("needs AVX2")
    arguments = {"products": cpp_kernels._ARGUMENTS["products"]}
    found = cpp_kernels._compiled("int4_avx2.cpp", arguments, cpp_kernels._agrees_on_int4)
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


@pytest.fixture(scope="module", params=[32, 64, 128], ids="group of {}".format)
def side_by_side(request):
    """Three matrices, the numbers that they mean one below the other, and the number of inputs."""
    torch.manual_seed(request.param)
    form, num_in = Int4(request.param, search=False), 384
    sizes = [(192, num_in), (64, num_in), (128, num_in)]
    parts = [form.quantize(torch.randn(size) + 0.1 * torch.randn(size[0], 1)) for size in sizes]
    meant = [form.matrix(each, size, torch.float32) for each, size in zip(parts, sizes, strict=True)]
    return [form.for_kernel(each) for each in parts], torch.cat(meant), num_in


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 11])
def test_products_side_by_side(num_rows, side_by_side, library):
    matrices, weight_OI, num_in = side_by_side
    x = torch.randn(num_rows, num_in).bfloat16()
    found, expected = (
        cpp_kernels.multiply(x, cpp_kernels.prepare(matrices, library)).float(),
        x.float() @ weight_OI.T,
    )
    assert found.shape == expected.shape
    assert not num_rows or (found - expected).abs().max() < ROUNDED_ONCE * expected.abs().max()


def test_threads_change_nothing(side_by_side, library):
    matrices, _, num_in = side_by_side
    x, threads = torch.randn(5, num_in).bfloat16(), torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(cpp_kernels.multiply(x, cpp_kernels.prepare(matrices, library)))
        assert torch.equal(*found)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(number, side_by_side, library):
    matrices, _, num_in = side_by_side
    x = torch.zeros(2, num_in).bfloat16()
    x[1, 5] = number
    found = cpp_kernels.multiply(x, cpp_kernels.prepare(matrices, library))
    assert (found[0] == 0).all()
    assert not found[1].isfinite().any()
