"""Run 60 cases of the fuzzer, the same each time; `make fuzz N=6000` runs more of them."""

import pytest
from fuzz.runner import FAULTS, run_seeds


@pytest.mark.slow
def test_cases_that_are_the_same_every_time():
    lines = []
    counts = run_seeds(range(60), say=lines.append)
    assert not any(counts[fault] for fault in FAULTS), "\n".join(lines)
