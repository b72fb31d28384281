"""Experts of 16 and 32 bits by the Triton kernels, in Triton's interpreter; `test_under_the_interpreter` starts this.

Triton decides by TRITON_INTERPRET, when it is imported, whether kernels are compiled; hence a process of its own. The
kernels' products alone are in `interpreted_packed`.
"""

import os

import pytest
import torch
from support import triton_interpreter  # noqa: F401
from support.mixtures import forced
from support.models import make_asymmetric, stock_mixtral_config, stock_text_config
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import batched_mm_experts_forward

import llamoe
from llamoe.modeling.kernels import packed_rows
from llamoe.modeling.moe import products
from llamoe.modeling.moe.experts import Experts, OutputFirstExperts
from llamoe.modeling.moe.products import plain_stack

assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels would need a GPU"

# Sums in float32, in another order; of the largest result.
TOLERANCE = 1e-6


def draw(num_rows, num_experts, hidden_size=52, intermediate_size=36, dtype=torch.float32):
    """Rows and weights with results of a deviation of about one, gate and up of different scale."""
    x = torch.randn(num_rows, hidden_size)
    gate_up = torch.randn(num_experts, hidden_size, 2 * intermediate_size) * (2 / hidden_size**0.5)
    gate_up *= torch.linspace(0.7, 1.3, 2 * intermediate_size)
    down = torch.randn(num_experts, intermediate_size, hidden_size) / intermediate_size**0.5
    ids = torch.randint(num_experts, (num_rows,))
    return x.to(dtype), gate_up.to(dtype), down.to(dtype), ids


def experts_of(gate_up, down, act="silu"):
    """Experts that have these weights."""
    config = llamoe.from_stock(stock_text_config(hidden_act=act))
    experts = Experts(config)
    experts.num_experts = len(down)
    experts.gate_up_proj, experts.down_proj = (
        nn.Parameter(stack, requires_grad=False) for stack in (gate_up, down)
    )
    return experts


def by_kernels(x, gate_up, down, ids):
    """Each row's expert, by kernels that are forced."""
    ones = torch.ones(len(ids), 1, dtype=x.dtype)
    with forced("kernels"):
        return experts_of(gate_up, down)(x, ids[:, None], ones)


def exact(x, gate_up, down, ids):
    """Row by row, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, expert in enumerate(ids.tolist()):
        if 0 <= expert < len(down):
            gate, up = (x[row].double() @ gate_up[expert].double()).chunk(2)
            out[row] = (gate / (1 + (-gate).exp()) * up) @ down[expert].double()
    return out


def plain_version(x, gate_up, down, ids):
    """In the rows' dtype, by PyTorch's own operations."""
    out = x.new_zeros(x.shape)
    for expert in ids.unique().tolist():
        if 0 <= expert < len(down):
            rows = ids == expert
            gate, up = (x[rows] @ gate_up[expert]).chunk(2, dim=-1)
            out[rows] = (F.silu(gate) * up) @ down[expert]
    return out


def check(given, x, gate_up, down, ids):
    """Near to float64, and in half precision as near as the plain version is."""
    truth = exact(x, gate_up, down, ids)
    assert given.dtype == x.dtype and given.shape == x.shape and given.isfinite().all()
    assert (given[(ids < 0) | (ids >= len(down))] == 0).all()
    error = (given - truth).abs().max()
    if x.dtype == torch.float32:
        assert error <= TOLERANCE * truth.abs().max(), (error, truth.abs().max())
        return
    plain = plain_version(x, gate_up, down, ids)
    its_error = (plain - truth).abs().max()
    assert error <= 1.5 * its_error
    # An intermediate value that is rounded the other way moves a result by less than the rounding of the result.
    rounding = torch.finfo(x.dtype).eps
    assert (given - plain).abs().max() <= 2 * rounding * truth.abs().max()


@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [
        *((num_rows, torch.bfloat16) for num_rows in (1, 2, 3, 5, 33)),
        *((num_rows, torch.float32) for num_rows in (1, 17, 128)),
        *((num_rows, torch.float16) for num_rows in (5,)),
    ],
    ids=str,
)
def test_kernels_equal_the_plain_version(num_rows, dtype):
    num_experts = {1: 1, 2: 7, 3: 3}.get(num_rows, 7)
    inputs = draw(num_rows, num_experts, dtype=dtype)
    check(by_kernels(*inputs), *inputs)


@pytest.mark.parametrize("num_rows", [3, 20])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 40), (48, 1), (64, 32), (67, 35)])
def test_sizes_of_every_kind(num_rows, sizes):
    inputs = draw(num_rows, 2, *sizes)
    check(by_kernels(*inputs), *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("intermediate_size", "splits"), [(300, 2), (1010, 4)])
def test_the_second_product_may_be_split(num_rows, dtype, intermediate_size, splits):
    """Into two and more parts, the last a short one."""
    x, gate_up, down, ids = draw(num_rows, 2, 34, intermediate_size, dtype)
    if num_rows > 1:
        ids[1] = 6
    stack = plain_stack(down)
    matrix = stack.form.for_gpu_kernel(stack.parts, stack.sizes)
    launch = packed_rows.launch_of(matrix, num_rows, x.itemsize, x.device, 2, packed_rows._IDS)
    found = -(-intermediate_size // launch.split_size)
    assert (
        found >= (splits if dtype == torch.float32 else splits // 2) and intermediate_size % launch.split_size
    )
    check(by_kernels(x, gate_up, down, ids), x, gate_up, down, ids)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_rows_of_no_expert_are_zero(dtype):
    """Ids at and above the number of experts and below zero, first, last and in between."""
    x, gate_up, down, ids = draw(11, 5)
    ids[0], ids[3], ids[4], ids[10] = 5, 2**31 - 1, -1, 6
    if dtype == torch.int64:
        ids[6] = 2**32 + 1
    ids = ids.to(dtype)
    x[ids >= 5] = float("nan")
    given = by_kernels(x, gate_up, down, ids)
    x[ids >= 5] = 0
    check(given, x, gate_up, down, ids)


def test_strides_of_every_kind():
    """Slices of larger weights, output-first weights, every other id."""
    x, gate_up, down, ids = draw(9, 4)
    wide_gate_up = torch.full((8, 60, 91), float("nan"))
    wide_gate_up[1::2, 3:55, 5:77] = gate_up
    output_first = down.transpose(1, 2).contiguous().transpose(1, 2)
    spaced_ids = ids.repeat_interleave(2)[::2]
    columns_first = x.T.contiguous().T
    given = by_kernels(columns_first, wide_gate_up[1::2, 3:55, 5:77], output_first, spaced_ids)
    check(given, x, gate_up, down, ids)


def test_rounding_is_where_separate_operations_round():
    """Whole numbers, whose sums are exact in any order: nothing but the places of rounding could differ."""
    x = torch.randint(-4, 5, (40, 52)).bfloat16()
    gate_up = (torch.randint(-9, 10, (3, 52, 72)) / 64).bfloat16()
    down = torch.eye(36, 52).expand(3, -1, -1).bfloat16()
    ids = torch.randint(3, (40,))
    plain = plain_version(x, gate_up, down, ids)
    assert plain.float().std() > 0.5
    for rows in (slice(0, 20), slice(0, 40)):
        assert torch.equal(by_kernels(x[rows], gate_up, down, ids[rows]), plain[rows])


@pytest.mark.parametrize(
    ("experts_class", "stock_config"),
    [(Experts, stock_text_config), (OutputFirstExperts, stock_mixtral_config)],
    ids=["input-first", "output-first"],
)
@pytest.mark.parametrize(("num_tokens", "top_k"), [(13, 1), (9, 2), (23, 2)])
def test_kernels_equal_batched_mm_of_transformers(experts_class, stock_config, num_tokens, top_k):
    config = llamoe.from_stock(stock_config())
    experts = make_asymmetric(experts_class(config))
    x = torch.randn(num_tokens, config.hidden_size)
    ids = torch.randint(config.num_local_experts, (num_tokens, top_k))
    scores = 0.5 + torch.rand(num_tokens, top_k)
    with torch.no_grad():
        expected = batched_mm_experts_forward(experts, x, ids, scores)
        with forced("kernels"):
            given = experts(x, ids, scores)
    assert expected.std() > 0.3
    torch.testing.assert_close(given, expected, rtol=0, atol=3e-6)


def test_the_kernels_are_what_runs_here(monkeypatch):
    x, gate_up, down, ids = draw(5, 3)
    calls = []
    product = products.packed_product
    monkeypatch.setattr(
        products,
        "packed_product",
        lambda x, *rest, **kwargs: calls.append(len(x)) or product(x, *rest, **kwargs),
    )
    given = by_kernels(x, gate_up, down, ids)
    assert calls == [5, 5]
    # Where nobody follows, without the detour by an operator.
    monkeypatch.setattr(products, "device_operator", None)
    with torch.no_grad():
        assert torch.equal(by_kernels(x, gate_up, down, ids), given)
    assert calls == [5, 5, 5, 5]


def test_it_is_an_operator():
    """Its shapes without its numbers, that nothing is changed or aliased, and all of it within one graph."""
    x, gate_up, _, ids = draw(5, 3)
    stack = plain_stack(gate_up)
    inputs = x, list(stack.parts), stack.form.key, list(stack.sizes), ids, False, True
    checked = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(products.device_operator, inputs, test_utils=checked)

    def double(x, gate_up, ids):
        return products.multiply_on_device(x, plain_stack(gate_up), ids, by_id=True) * 2

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x, gate_up, ids), double(x, gate_up, ids))


def test_a_gradient_is_refused():
    x, gate_up, down, ids = draw(5, 3)
    stack = plain_stack(gate_up.requires_grad_())
    with pytest.raises(AssertionError, match="gradients of weights need sorted rows"):
        products.multiply_on_device(x, stack, ids, by_id=True).sum().backward()
