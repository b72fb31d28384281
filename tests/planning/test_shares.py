"""Bytes of weights that processes hold: the formulas against real runs of gloo's processes."""

import json
import os
import time

import pytest
from support import programs
from support.models import MODELS
from support.paths import SUPPORT

from llamoe.modeling.registration import empty_model
from llamoe.planning.shares import card_bytes

pytestmark = pytest.mark.slow

PATIENCE = 300
ROWS, LENGTH = 3, 7
CASES = {case.name: case for case in MODELS}
# Heads for four processes, which divide neither the vocabulary of 101 nor five layers.
HEADS = dict(num_attention_heads=12, num_key_value_heads=4, head_dim=10)
MIXTURE = dict(
    num_local_experts=8, num_hidden_layers=5, moe_layers=[1, 2, 4], no_rope_layers=[1, 1, 0, 1, 1], **HEADS
)
DENSE, TEXT = CASES["LlamoeDenseForCausalLM"], CASES["LlamoeForCausalLM"]
# Widths that two and four processes do not divide.
ODD = dict(intermediate_size=51, intermediate_size_mlp=93)
MAKERS = {
    "dense": lambda: DENSE.make(num_hidden_layers=5, **HEADS),
    "tied": lambda: DENSE.make_small(tie_word_embeddings=True, num_hidden_layers=5, **HEADS),
    "text": lambda: TEXT.make(num_experts_per_tok=3, **MIXTURE),
    "top1": lambda: TEXT.make(num_experts_per_tok=1, **ODD, **MIXTURE),
    "mixtral": lambda: CASES["LlamoeMixtralForCausalLM"].make(num_local_experts=8, num_hidden_layers=5, **HEADS),
}  # fmt: skip
INFERENCE = {
    2: {"tp": dict(tp_size=2), "ep": dict(tp_size=2, ep_size=2), "pp": dict(pp_size=2)},
    4: {
        "tp": dict(tp_size=4),
        "ep": dict(tp_size=4, ep_size=4),
        "pp": dict(pp_size=4),
        "tp and pp": dict(tp_size=2, pp_size=2),
    },
}


def runs_of(count, models):
    runs = {}
    for model in models:
        for kind, sizes in INFERENCE[count].items():
            if kind != "ep" or model not in ("dense", "tied"):
                runs[f"{model} {kind}"] = dict(model=model, sizes=sizes, rows=[ROWS, LENGTH])
    return runs


def count(folder, processes, models):
    """What each process counted in each run."""
    for model in models:
        MAKERS[model]().save_pretrained(folder / model)
    runs = runs_of(processes, models)
    (folder / "runs.json").write_text(json.dumps(runs))
    started = []
    try:
        for rank in range(processes):
            own = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes)
            output, env = folder / f"output-{rank}.txt", {name: str(value) for name, value in own.items()}
            script = [SUPPORT / "shares_worker.py", folder]
            started.append(programs.start(script, output, output, folder, os.environ | env))
        end = time.monotonic() + PATIENCE
        for process in started:
            process.join(max(1, end - time.monotonic()))
        codes = [process.exitcode for process in started]
    finally:
        for process in started:
            process.kill()
    tails = [(folder / f"output-{rank}.txt").read_text()[-3000:] for rank in range(processes)]
    assert codes == [0] * processes, "\n".join(tails)
    counted = [json.loads((folder / f"counted-{rank}.json").read_text()) for rank in range(processes)]
    return {name: (run, [own[name] for own in counted]) for name, run in runs.items()}


def check(run, counted):
    """The weights of each stage's first process, exactly; and the logits."""
    model = empty_model(MAKERS[run["model"]]().config)
    tp, ep, pp = (run["sizes"].get(name, 1) for name in ("tp_size", "ep_size", "pp_size"))
    model.keep_uneven_experts(tp)
    assert [own["weights"] for own in counted[::tp]] == card_bytes(model, tp, ep, pp, element_size=4)
    # float32 in another order. Measured up to 3e-6.
    assert all(own["difference"] < 1e-5 for own in counted)
    if tp > 1 and pp > 1:
        assert all(own["other tokens"] == 0 for own in counted)


@pytest.mark.parametrize("processes", [2, pytest.param(4)])
def test_formulas_are_what_real_runs_count(processes, tmp_path):
    results = count(tmp_path, processes, tuple(MAKERS))
    assert len(results) > 3
    for name, (run, counted) in results.items():
        try:
            check(run, counted)
        except AssertionError as error:
            raise AssertionError(f"{name}, {processes} processes") from error
