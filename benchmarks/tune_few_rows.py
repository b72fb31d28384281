"""Tries tilings of the experts' few-row kernels on this GPU; prints the fastest for each number of rows.

    python -m benchmarks.tune_few_rows                      # a Scout-shaped layer; compiling takes most of the time
    python -m benchmarks.tune_few_rows --experts 64 --rows 1 8 64

Every tile is tried for the first product, then for the second with the first's best. Each try is captured in a CUDA
graph and replayed. Bytes are those of the hit experts, read once. The last lines printed belong into `PLANS` of
`modeling/kernels/few_rows.py`.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator

import torch

from llamoe.modeling.kernels.few_rows import (
    PLANS,
    TRITON_MAX_ROWS,
    Plan,
    Tile,
    few_rows_experts_reference,
    run_kernels,
)

# (columns, depth, warps) of a tile.
TILES = [Tile(*tile) for tile in itertools.product((32, 64, 128), (64, 128), (4, 8))]
SHARED_KIBIBYTES = (110, 200)
CONCURRENT = (1, 264)


def first_plans(plan: Plan) -> Iterator[Plan]:
    """Other tilings of the first product."""
    for tile, kibibytes in itertools.product(TILES, SHARED_KIBIBYTES):
        yield plan._replace(gate_up=tile, shared_bytes=kibibytes * 1024)


def second_plans(plan: Plan) -> Iterator[Plan]:
    """Other tilings of the second product; the number of splits follows from `concurrent`."""
    for tile, concurrent in itertools.product(TILES, CONCURRENT):
        yield plan._replace(down=tile, concurrent=concurrent)


def microseconds(plan: Plan, inputs: tuple[torch.Tensor, ...], rounds: int = 7, replays: int = 20) -> float:
    """Median time of a launch within a CUDA graph; if the plan fails, infinity, and a line is printed."""
    try:
        return _microseconds(plan, inputs, rounds, replays)
    except Exception as error:
        lines = str(error).strip().splitlines()
        print(f"{plan} fails: {type(error).__name__}: {lines[0] if lines else ''}", flush=True)
        return float("inf")


def _microseconds(plan: Plan, inputs: tuple[torch.Tensor, ...], rounds: int, replays: int) -> float:
    given = run_kernels(*inputs, plan)
    expected = few_rows_experts_reference(*inputs)
    error = (given - expected).float().norm() / expected.float().norm()
    if not error < 0.01:
        raise ArithmeticError(f"a relative error of {error:.3g}, at most 0.01 allowed")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_kernels(*inputs, plan)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / replays)
    return statistics.median(times[1:])


@torch.no_grad()
def main() -> None:
    """Draw one layer, try the plans, print the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--intermediate", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    if wrong := [count for count in arguments.rows if not 1 <= count <= TRITON_MAX_ROWS]:
        parser.error(
            f"--rows must be from 1 to {TRITON_MAX_ROWS}, the most that the kernels take, and has {wrong}"
        )
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and torch finds none")
    num_experts, hidden, intermediate = arguments.experts, arguments.hidden, arguments.intermediate
    options = dict(device="cuda", dtype=getattr(torch, arguments.dtype))
    gate_up = torch.randn(num_experts, hidden, 2 * intermediate, **options).mul_(hidden**-0.5)
    down = torch.randn(num_experts, intermediate, hidden, **options).mul_(intermediate**-0.5)
    expert_bytes = (gate_up[0].numel() + down[0].numel()) * gate_up.element_size()

    for num_rows in arguments.rows:
        x = torch.randn(num_rows, hidden, **options)
        ids = torch.randint(num_experts, (num_rows,), device="cuda")
        inputs = (x, gate_up, down, ids)
        hit = len(ids.unique())
        best = PLANS[gate_up.element_size()]
        best_time = default_time = microseconds(best, inputs)
        for plans in (first_plans, second_plans):
            for plan in plans(best):
                time = microseconds(plan, inputs)
                if time < best_time:
                    best, best_time = plan, time
        speed, default_speed = (
            # TB/s.
            hit * expert_bytes / (time * 1e6)
            for time in (best_time, default_time)
        )
        print(
            f"{num_rows} rows, {hit} experts: {default_time:.1f} us ({default_speed:.2f} TB/s) as it is, "
            f"{best_time:.1f} us ({speed:.2f} TB/s) with {best}",
            flush=True,
        )


if __name__ == "__main__":
    main()
