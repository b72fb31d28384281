"""Test the computed bytes of weights in each process against runs of two and four gloo processes."""

import json
from itertools import product

import pytest
from support import programs
from support.models import MODELS
from support.paths import SUPPORT

from llamoe.modeling.registration import empty_model
from llamoe.planning.shares import card_bytes

pytestmark = pytest.mark.slow

PATIENCE = 300
CASES = {case.name: case for case in MODELS}
# These heads can be divided by four; the vocabulary of 101 and the five layers cannot.
HEADS = dict(num_attention_heads=12, num_key_value_heads=4, head_dim=10)
MIXTURE = dict(
    num_local_experts=8, num_hidden_layers=5, moe_layers=[1, 2, 4], no_rope_layers=[1, 1, 0, 1, 1], **HEADS
)
DENSE, TEXT = CASES["LlamoeDenseForCausalLM"], CASES["LlamoeForCausalLM"]
# Sizes that cannot be divided by two.
ODD = dict(intermediate_size=51, intermediate_size_mlp=93)
MAKERS = {
    "dense": lambda: DENSE.make(num_hidden_layers=5, **HEADS),
    "tied": lambda: DENSE.make_small(tie_word_embeddings=True, num_hidden_layers=5, **HEADS),
    "text": lambda: TEXT.make(num_experts_per_tok=3, **MIXTURE),
    "top1": lambda: TEXT.make(num_experts_per_tok=1, **ODD, **MIXTURE),
    "mixtral": lambda: CASES["LlamoeMixtralForCausalLM"].make(num_local_experts=8, num_hidden_layers=5, **HEADS),
}  # fmt: skip
SIZES = {
    2: [dict(tp_size=2), dict(tp_size=2, ep_size=2), dict(pp_size=2)],
    4: [dict(tp_size=4), dict(tp_size=4, ep_size=4), dict(pp_size=4), dict(tp_size=2, pp_size=2)],
}


def check(name, sizes, counted):
    """Compare the bytes of weights of each stage's first process, and the logits of all processes."""
    model = empty_model(MAKERS[name]().config)
    tp, ep, pp = (sizes.get(size, 1) for size in ("tp_size", "ep_size", "pp_size"))
    model.keep_uneven_experts(tp)
    assert [figures["bytes"] for figures in counted[::tp]] == card_bytes(model, tp, ep, pp, element_size=4)
    # Processes sum float32 numbers in another order. Measured: at most 3e-6.
    assert all(figures["logits"] < 1e-5 * figures["deviation"] for figures in counted)
    assert all(figures["other tokens"] == 0 for figures in counted)


@pytest.mark.parametrize("processes", [2, 4])
def test_bytes_are_those_of_real_processes(processes, tmp_path):
    for name, make in MAKERS.items():
        make().save_pretrained(tmp_path / name)
    runs = {
        " ".join(["share", name, *(f"{size}={count}" for size, count in sizes.items())]): (name, sizes)
        for name, sizes in product(MAKERS, SIZES[processes])
        if "ep_size" not in sizes or name not in ("dense", "tied")
    }
    programs.together([SUPPORT / "process_worker.py", tmp_path, *runs], tmp_path, processes, PATIENCE)
    measured = json.loads((tmp_path / "results.json").read_text())
    for key, run in runs.items():
        try:
            check(*run, measured[key])
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"{key}, {processes} processes: {measured[key]}") from error
