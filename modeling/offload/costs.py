"""Whether the rows of an expert that is not on the accelerator are computed where it lies, or the expert is brought.

Bringing an expert costs its bytes over the link, whatever the number of rows. Computing it on the CPU costs its bytes
from RAM for few rows, and the products for many. Both rates are measured on the first expert that is missed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass
class Costs:
    """Seconds of both ways for one expert's matrix.

    Attributes:
        bring: seconds to copy it to the accelerator.
        few_rows: seconds of a product of one row on the CPU.
        row: seconds that each further row adds there.
    """

    bring: float
    few_rows: float
    row: float

    def cheaper(self, num_rows: int) -> Literal["compute", "bring"]:
        """The way that costs less time."""
        return "compute" if self.few_rows + self.row * (num_rows - 1) < self.bring else "bring"


def measure(bring: Callable[[], object], compute: Callable[[int], object], rows: int = 64) -> Costs:
    """Time both ways.

    Args:
        bring: copies a matrix to the accelerator.
        compute: multiplies so many rows by the matrix on the CPU.
        rows: number of rows of a long product.
    """

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            work()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    one, many = seconds(lambda: compute(1)), seconds(lambda: compute(rows))
    return Costs(seconds(bring), one, max(0.0, many - one) / (rows - 1))
