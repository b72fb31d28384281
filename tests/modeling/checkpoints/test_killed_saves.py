"""A save killed at any moment leaves the older model, the new one, or an error that says the folder is not whole.

LLAMOE_KILLS=N kills N saves at random moments, and one at every step of the exchange between all kinds of folders.
"""

import json
import os
import secrets

import pytest
from support import programs
from support.paths import SUPPORT

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("LLAMOE_KILLS", 0))
SEED = os.environ.get("LLAMOE_KILL_SEED") or secrets.token_hex(4)


def kill_saves(folder, *arguments):
    """Run killed_saves.py; what each of its cases was and what is wrong with it."""
    done = programs.run([SUPPORT / "killed_saves.py", folder, *arguments], timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_save_killed_at_a_random_moment(tmp_path):
    count = KILLS or 5
    cases = kill_saves(tmp_path, "random", SEED, str(count))
    assert len(cases) == (1 if "/" in SEED else count)
    wrong = [
        f"LLAMOE_KILL_SEED={case['case'].partition(':')[0]} pytest {__file__}  # {case}"
        for case in cases
        if case["wrong"]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_save_killed_at_each_step_of_the_exchange(tmp_path):
    cases = kill_saves(tmp_path, "steps", *(["all"] if KILLS else []))
    assert len(cases) > 20
    assert [case for case in cases if case["wrong"]] == []
