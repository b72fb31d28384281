"""Let Triton's interpreter run the Triton kernels on the CPU; a pytest plugin with the fixtures for their tests.

Triton reads TRITON_INTERPRET when it is imported, so `test_packed_rows` runs these tests in another process.
"""

import os

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from llamoe.modeling.formats import Int4, Int8, format
from llamoe.modeling.kernels import packed_rows
from llamoe.modeling.moe import experts as moe_experts
from llamoe.modeling.moe import products
from llamoe.modeling.quantization import QuantizedExperts

from .mixtures import make_experts

assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels would need a GPU"
patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_with_index(tensor, scope):
    """Let loops have scalars as bounds: Triton 3.6 makes them one-element arrays, which numpy 2.4 does not convert."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.squeeze(self.handle.data)))


vars(interpreter)["_patch_lang_tensor"] = patch_tensor_with_index

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PACKED = {"int4": Int4(32), "int8": Int8()}
# Sizes of experts.
SIZES = dict(hidden_size=40, intermediate_size=24)


@pytest.fixture(autouse=True)
def no_results(monkeypatch):
    """Clear the results of earlier kernel checks."""
    monkeypatch.setattr(packed_rows, "_FAILURES", {})


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Use the kernels on the CPU for up to 64 rows; kernel checks try only two tiles, as the interpreter is slow."""
    for module in (format, moe_experts):
        monkeypatch.setattr(module, "may_have_gpu_kernel", lambda device: device.type != "meta")
    monkeypatch.setattr(moe_experts, "few_rows_limit", lambda device: 64)
    monkeypatch.setattr(packed_rows, "TILES", (16, 32))


@pytest.fixture
def no_counting(monkeypatch):
    """Fail if the host counts the rows of each expert, which would wait for the GPU."""

    def refuse(*_):
        raise AssertionError("the host counted rows")

    monkeypatch.setattr(products, "groups_between", refuse)


@pytest.fixture
def launches(monkeypatch):
    """Return a list to which each launch of a kernel appends its number of rows."""
    counted = []
    product = packed_rows.packed_product

    def run(x_NC, *args, **kwargs):
        counted.append(len(x_NC))
        return product(x_NC, *args, **kwargs)

    for module in (packed_rows, products, format):
        monkeypatch.setattr(module, "packed_product", run)
    return counted


def make_packed(weights, is_output_first=False):
    """Return quantized experts, and plain experts in float64 with the dequantized weights."""
    plain = make_experts(dict(hidden_size=96, intermediate_size=64), FP32, 3, is_output_first)
    packed = QuantizedExperts(plain, PACKED[weights])
    for name in ("gate_up_proj", "down_proj"):
        stack = plain.format.matrix(plain.parts(name), plain.sizes_of(name), FP32).detach()
        matrices = [packed.formats[name].quantize(matrix.contiguous()) for matrix in stack]
        for part, numbers in zip(packed.parts(name), zip(*matrices, strict=True), strict=True):
            part.data.copy_(torch.stack(numbers))
    return packed, packed.dequantized(FP32).double().requires_grad_(False)


# Largest `distance` of quantized experts in bfloat16; measured 0.004 to 0.009.
CLOSE = 0.02


def distance(given, truth):
    """Return the largest difference, divided by the largest number in `truth`."""
    return ((given.double() - truth).abs().max() / truth.abs().max()).item()
