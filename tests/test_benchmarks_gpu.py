"""The program that proves a GPU, run on a CPU."""

import json

import pytest
import torch

from benchmarks import prove_gpu

pytestmark = pytest.mark.slow


def test_the_proof_runs_on_a_cpu_with_small_sizes(tmp_path, capsys, monkeypatch):
    """Each of its ten steps; results are written, and a check that fails decides of the exit status."""
    assert prove_gpu.main(["--small", "--output", str(tmp_path)]) == 0, capsys.readouterr().out[-3000:]
    found = json.loads((tmp_path / "prove_gpu.json").read_text())
    steps = {check["step"] for check in found["checks"]}
    assert steps == set(prove_gpu.STEPS) and len(steps) == 10
    judged = {check["step"] for check in found["checks"] if check["passed"] is not None}
    assert judged == set(prove_gpu.STEPS) - {"facts", "speed"}
    assert all(check["limit"] for check in found["checks"] if check["passed"] is not None)
    page = (tmp_path / "prove_gpu.md").read_text()
    assert page.count("\n| ") == len(found["checks"]) + 1 and "**failed**" not in page

    def fail(proof):
        proof.judge("a number", 3.0, most=2.0)
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(prove_gpu.STEPS, "speed", fail)
    assert prove_gpu.main(["--small", "--steps", "speed", "facts", "--output", str(tmp_path)]) == 1
    page = (tmp_path / "prove_gpu.md").read_text()
    assert (
        page.count("**failed**") == 2
        and "RuntimeError: no such kernel" in page
        and "| facts | date |" in page
    )
    if not torch.cuda.is_available():
        assert prove_gpu.main([]) == 2 and "needs a CUDA device" in capsys.readouterr().err
