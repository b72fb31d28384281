"""The Triton kernels, run by Triton's interpreter on the CPU; `test_under_the_interpreter` starts this.

Triton decides by TRITON_INTERPRET, when it is imported, whether kernels are compiled; hence a process of its own.
"""

import os

import pytest
import torch
from support import triton_interpreter  # noqa: F401
from support.models import make_asymmetric, stock_mixtral_config, stock_text_config
from transformers.integrations.moe import batched_mm_experts_forward

import llamoe
from llamoe.modeling.kernels import few_rows
from llamoe.modeling.kernels.few_rows import (
    Plan,
    Tile,
    few_rows_experts,
    few_rows_experts_reference,
    few_rows_fits,
    run_kernels,
)
from llamoe.modeling.moe.experts import Experts, OutputFirstExperts

assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels would need a GPU"

# Small tiles, so that small sizes have several blocks of columns and several steps of every pipeline.
SMALL_TILES = Plan(Tile(32, 32, 4), Tile(32, 16, 4), shared_bytes=2**16, programs=2048, concurrent=1)
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


def exact(x, gate_up, down, ids):
    """Row by row, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, expert in enumerate(ids.tolist()):
        if 0 <= expert < len(down):
            gate, up = (x[row].double() @ gate_up[expert].double()).chunk(2)
            out[row] = (gate / (1 + (-gate).exp()) * up) @ down[expert].double()
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
    plain = few_rows_experts_reference(x, gate_up, down, ids)
    its_error = (plain - truth).abs().max()
    assert error <= 1.5 * its_error
    # An intermediate value that is rounded the other way moves a result by less than the rounding of the result.
    rounding = torch.finfo(x.dtype).eps
    assert (given - plain).abs().max() <= 2 * rounding * truth.abs().max()


@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [
        *((num_rows, torch.bfloat16) for num_rows in (1, 2, 3, 5, 33)),
        *((num_rows, torch.float32) for num_rows in (1, 17)),
        *((num_rows, torch.float16) for num_rows in (5,)),
    ],
    ids=str,
)
def test_kernels_equal_the_plain_version(num_rows, dtype):
    num_experts = {1: 1, 2: 7, 3: 3}.get(num_rows, 7)
    inputs = draw(num_rows, num_experts, dtype=dtype)
    check(few_rows_experts(*inputs), *inputs)


@pytest.mark.parametrize("num_rows", [3, 20])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 40), (48, 1), (64, 32), (67, 35)])
def test_sizes_of_every_kind(num_rows, sizes):
    inputs = draw(num_rows, 2, *sizes)
    check(few_rows_experts(*inputs), *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [16, 17, 65])
def test_all_rows_to_one_expert(num_rows, dtype):
    """Tiles of 16 rows, larger ones, and several of these."""
    x, gate_up, down, _ = draw(num_rows, 3, dtype=dtype)
    ids = torch.full((num_rows,), 2)
    check(run_kernels(x, gate_up, down, ids, SMALL_TILES), x, gate_up, down, ids)


def test_one_heavy_expert_among_light_ones():
    x, gate_up, down, ids = draw(50, 7)
    ids = torch.where(torch.arange(50) % 2 == 0, 4, ids)
    check(few_rows_experts(x, gate_up, down, ids), x, gate_up, down, ids)


@pytest.mark.parametrize("programs", [1, 6])
def test_a_program_may_take_several_experts(programs):
    inputs = draw(23, 5)
    check(run_kernels(*inputs, SMALL_TILES._replace(programs=programs)), *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_second_product_may_be_split(num_rows, dtype):
    """Its inner extent of 75 is cut into as many parts as there may be (five), and into two, the last a short one."""
    x, gate_up, down, ids = draw(num_rows, 2, hidden_size=34, intermediate_size=75, dtype=dtype)
    if num_rows > 1:
        ids[1] = 6
    for concurrent in (10**6, 2 * 2 * min(num_rows, 2)):
        check(
            run_kernels(x, gate_up, down, ids, SMALL_TILES._replace(concurrent=concurrent)),
            x,
            gate_up,
            down,
            ids,
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_rows_of_no_expert_are_zero(dtype):
    """Ids at and above the number of experts and below zero, first, last and in between."""
    x, gate_up, down, ids = draw(11, 5)
    ids[0], ids[3], ids[4], ids[10] = 5, 2**31 - 1, -1, 6
    if dtype == torch.int64:
        ids[6] = 2**32 + 1
    ids = ids.to(dtype)
    x[ids >= 5] = float("nan")
    given = few_rows_experts(x, gate_up, down, ids)
    x[ids >= 5] = 0
    check(given, x, gate_up, down, ids)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_no_expert_at_all(num_rows):
    x, gate_up, down, _ = draw(num_rows, 3)
    nothing = few_rows_experts(x, gate_up * float("nan"), down, torch.full((num_rows,), 3))
    assert torch.equal(nothing, torch.zeros_like(x))


def test_no_row_at_all():
    assert few_rows_experts(*draw(0, 3)).shape == (0, 52)


def test_nothing_but_the_hit_experts_is_read():
    """Experts without a row, what lies between rows and behind them, hold no numbers."""
    x, gate_up, down, ids = draw(6, 7)
    ids[ids == 3] = 2
    gate_up[3], down[3] = float("nan"), float("inf")
    storage = torch.full((9, 60), float("nan"))
    storage[:6, :52] = x
    all_ids = torch.full((9,), 3)
    all_ids[:6] = ids
    given = few_rows_experts(storage[:6, :52], gate_up, down, all_ids[:6])
    check(given, x, gate_up[:], down, ids)


def test_strides_of_every_kind():
    """Slices of larger weights, output-first weights, every other id."""
    x, gate_up, down, ids = draw(9, 4)
    wide_gate_up = torch.full((8, 60, 91), float("nan"))
    wide_gate_up[1::2, 3:55, 5:77] = gate_up
    output_first = down.transpose(1, 2).contiguous().transpose(1, 2)
    spaced_ids = ids.repeat_interleave(2)[::2]
    columns_first = x.T.contiguous().T
    given = few_rows_experts(columns_first, wide_gate_up[1::2, 3:55, 5:77], output_first, spaced_ids)
    check(given, x, gate_up, down, ids)


def test_rounding_is_where_separate_operations_round():
    """Whole numbers, whose sums are exact in any order: nothing but the places of rounding could differ."""
    x = torch.randint(-4, 5, (40, 52)).bfloat16()
    gate_up = (torch.randint(-9, 10, (3, 52, 72)) / 64).bfloat16()
    down = torch.eye(36, 52).expand(3, -1, -1).bfloat16()
    ids = torch.randint(3, (40,))
    plain = few_rows_experts_reference(x, gate_up, down, ids)
    assert plain.float().std() > 0.5
    assert torch.equal(few_rows_experts(x, gate_up, down, ids), plain)


@pytest.mark.parametrize(
    ("experts_class", "stock_config"),
    [(Experts, stock_text_config), (OutputFirstExperts, stock_mixtral_config)],
    ids=["input-first", "output-first"],
)
def test_kernels_equal_batched_mm_of_transformers(experts_class, stock_config):
    config = llamoe.from_stock(stock_config())
    experts = make_asymmetric(experts_class(config))
    x, ids = torch.randn(13, config.hidden_size), torch.randint(config.num_local_experts, (13,))
    with torch.no_grad():
        expected = batched_mm_experts_forward(experts, x, ids[:, None], torch.ones(13, 1))
        stacks = (experts.input_first(name) for name in ("gate_up_proj", "down_proj"))
        given = few_rows_experts(x, *stacks, ids)
    assert expected.std() > 0.3
    torch.testing.assert_close(given, expected, rtol=0, atol=3e-6)


def test_the_kernels_are_what_runs_here(monkeypatch):
    assert few_rows_fits(5, 52, 36, torch.float32, torch.device("cpu"), "silu")
    calls = []
    monkeypatch.setattr(few_rows, "run_kernels", lambda x, *_: calls.append(1) or torch.zeros_like(x))
    few_rows_experts(*draw(5, 3))
    assert calls
