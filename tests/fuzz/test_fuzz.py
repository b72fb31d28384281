"""Some cases of the fuzzer, the same in every run; `make fuzz N=6000` runs more of them."""

import pytest
from fuzz.suites import run_suite

pytestmark = pytest.mark.slow

# Without compiling, which takes seconds a case; it has tests of its own, and `make fuzz` includes it.
KINDS = {
    "forward",
    "cached",
    "training",
    "generation",
    "towers",
    "multimodal",
    "saving",
    "adapters",
    "converting",
    "heads",
}
# Several processes share the groups. A group begins no case after its time.
GROUPS, CASES, SECONDS = 2, 24, 15


@pytest.mark.parametrize("group", range(GROUPS))
def test_cases_that_are_the_same_every_time(group, capsys):
    lines = []
    seeds = range(group * CASES, (group + 1) * CASES)
    summary = run_suite(seeds, 0, SECONDS, KINDS, lines.append)
    with capsys.disabled():
        print(f"\n{lines[-1]}")
    assert summary.counts.total() > 0
    assert not summary.failures, "\n".join(lines)
