"""Some cases of the fuzzer, the same in every run; `make fuzz N=6000` runs more of them."""

import pytest
from fuzz.runner import FAULTS, run_seeds

pytestmark = pytest.mark.slow

# Several processes share the groups. A group begins no case after its time.
GROUPS, CASES, SECONDS = 2, 24, 15


@pytest.mark.parametrize("group", range(GROUPS))
def test_cases_that_are_the_same_every_time(group, capsys):
    lines = []
    counts = run_seeds(range(group * CASES, (group + 1) * CASES), seconds=SECONDS, say=lines.append)
    with capsys.disabled():
        print(f"\n{lines[-1]}")
    assert counts.total() > 0
    assert not any(counts[fault] for fault in FAULTS), "\n".join(lines)
