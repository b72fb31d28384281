"""Processes that share the tokens of a row: context parallelism and sequence parallelism.

accelerate's ring of context parallelism needs GPUs, so only the model's part of it is tested. Sequence parallelism runs
on the CPU if DeepSpeed is installed.
"""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
import transformers
from accelerate.big_modeling import _attach_context_parallel_hooks
from support.models import MODELS, max_abs, run
from support.paths import EXAMPLES, SUPPORT, environment
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import llamoe

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in MODELS}
DENSE, TEXT = CASES["LlamoeDenseForCausalLM"], CASES["LlamoeForCausalLM"]
# The first of two processes gets the first and the last quarter of a row: under a causal mask both have equal work.
POSITIONS = torch.cat([torch.arange(7), torch.arange(21, 28)])[None]


# Temperature tuning is off, since stock counts positions for it from the beginning of the part.
@pytest.mark.parametrize(
    "options",
    [{}, {"attention_chunk_size": None, "attn_temperature_tuning": False}],
    ids=["dense", "mixture"],
)
def test_parts_of_rows_attend_as_stock(options, record_parity):
    """A part of a row has gaps between positions, for which no mask is made: the ring attends to the other parts."""
    case = TEXT if options else DENSE
    model = case.make(**options)
    stock_class = getattr(transformers, case.stock_name)
    stock = stock_class(stock_class.config_class(**llamoe.to_stock(model.config))).eval()
    stock.load_state_dict(model.state_dict())
    ids = torch.randint(3, 90, (3, POSITIONS.shape[1]), generator=torch.Generator().manual_seed(4))
    inputs = {"input_ids": ids, "position_ids": POSITIONS.expand(3, -1), "use_cache": False}
    apart = run(model, **inputs)
    for each in (model, stock):
        each.set_attn_implementation("sdpa")
        _attach_context_parallel_hooks(each)
    ours, expected = run(model, **inputs), run(stock, **inputs)
    assert max_abs(ours, apart) > 0.01
    record_parity("context parallel, one part", "transformers", "float32", max_abs(ours, expected))
    assert max_abs(ours, expected) < 1e-5


def test_chunked_layers_are_refused():
    """accelerate refuses chunks and windows under context parallelism, our layer chunks under sequence parallelism."""
    with pytest.raises(ValueError, match="Context parallelism does not support .*chunked_attention"):
        _attach_context_parallel_hooks(TEXT.make())
    with pytest.raises(ValueError, match="Context parallelism does not support .*sliding_attention"):
        _attach_context_parallel_hooks(DENSE.make(sliding_window=5))

    def uattn_wrapper(*args, **kwargs):
        return sdpa_attention_forward(*args, **kwargs)

    uattn_wrapper.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    AttentionInterface.register("sdpa", uattn_wrapper)
    try:
        with pytest.raises(ValueError, match="sequence parallelism, sp_size"):
            run(TEXT.make(), **TEXT.inputs())
        run(DENSE.make(), **DENSE.inputs())
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_sequence_parallelism_learns_what_one_process_does(tmp_path):
    """Two processes that share each row, and every weight by ZeRO-3, have the losses of one process."""
    DENSE.make().save_pretrained(tmp_path / "model")
    text = (EXAMPLES / "accelerate/8gpu_sequence.yaml").read_text()
    for old, new in (
        ("num_processes: 8", "num_processes: 2"),
        ("sp_size: 4", "sp_size: 2"),
        ("dp_shard_size: 2", "dp_shard_size: 1"),
        ("bf16", "'no'"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "launch.yaml").write_text(text + "use_cpu: true\n")
    losses = {}
    launch = ["-m", "accelerate.commands.launch", "--config_file", tmp_path / "launch.yaml"]
    for kind, before in (("one", []), ("two", launch)):
        script = [SUPPORT / "train_in_rows.py", tmp_path / "model", tmp_path / f"{kind}.json"]
        words, env = map(str, [sys.executable, *before, *script]), environment(DS_ACCELERATOR="cpu")
        done = subprocess.run(list(words), env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        losses[kind] = json.loads((tmp_path / f"{kind}.json").read_text())
    assert len(losses["one"]) == 3
    assert losses["two"] == pytest.approx(losses["one"], abs=1e-5)
