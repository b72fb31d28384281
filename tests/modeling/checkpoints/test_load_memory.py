"""Peak memory of loading, measured in a process of its own and compared with the size of the checkpoint."""

import json
import sys

import pytest
import torch
from support import programs

import llamoe
from llamoe.conversion import convert

pytestmark = pytest.mark.slow

MEASURE = """
import json, sys
import transformers, llamoe
from pathlib import Path
from support.peaks import peak_of, settle, status

def measure(load):
    settle()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    base = status("VmRSS")
    model, own = peak_of(load)
    loading = status("VmHWM") - base
    checksum = sum(parameter.sum().item() for parameter in model.parameters() if not parameter.is_meta)
    return {"own": own, "loading": loading, "used": status("VmHWM") - base,
            "model": sum(parameter.nbytes for parameter in model.parameters())}

folder, name, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model_class = getattr(llamoe, name, None) or getattr(transformers, name)
model_class.from_pretrained(folder, device_map="meta")  # what is imported late
print(json.dumps([measure(lambda: model_class.from_pretrained(folder, **options)) for options in cases]))
"""
# In float32 a model takes twice the bytes of its bfloat16 file.
LOADS = [{}, {"device_map": "cpu"}, {"dtype": "float32"}, {"device_map": {"": "disk"}}]


def save_large(folder, num_layers, shard):
    """Save a model with sixteen experts of 6 MB in bfloat16 in each layer, and return the bytes of its files."""
    config = llamoe.LlamoeTextConfig(
        vocab_size=8001, hidden_size=1024, intermediate_size=1024, num_hidden_layers=num_layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, num_local_experts=16, interleave_moe_layer_step=1, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = llamoe.LlamoeForCausalLM(config)
    model = model.bfloat16().to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(folder, layout="stock", max_shard_size=shard)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def measured(folder, name, loads=LOADS):
    result = programs.run(["-c", MEASURE, folder, name, json.dumps(loads)], timeout=600)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_loading(tmp_path):
    """A file that needs no cast is mapped, not copied: the system reads its pages when they are used."""
    size = save_large(tmp_path, 14, "300MB")
    ours, theirs = measured(tmp_path, "LlamoeForCausalLM"), measured(tmp_path, "Llama4ForCausalLM")
    plain, on_cpu, cast, on_disk = ours
    for peak in (plain, on_cpu):
        assert peak["loading"] < 0.1 * size < 0.9 * size < peak["used"] < 1.1 * size, peak
    assert cast["model"] > 1.9 * size
    assert 0.9 * cast["model"] < cast["own"] < 1.1 * cast["model"], cast
    assert cast["loading"] < 1.1 * (cast["model"] + size), cast
    assert on_disk["own"] < 0.1 * size and on_disk["used"] < 0.1 * size, on_disk
    for mine, its in zip(ours, theirs, strict=True):
        assert mine["own"] < its["own"] + 0.05 * size and mine["loading"] < its["loading"] + 0.05 * size


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_experts_that_are_stored_one_by_one(tmp_path):
    """Each layer's experts are copied once, into their stacks; all other weights that need no cast are mapped."""
    save_large(tmp_path / "stacked", 4, "300MB")
    convert(tmp_path / "stacked", tmp_path / "split", experts="split", shard_size="100MB")
    plain, cast = measured(tmp_path / "split", "LlamoeForCausalLM", [{}, {"dtype": "float32"}])
    layer = 16 * 3 * 1024 * 1024 * 2
    assert -0.2 < plain["own"] / layer - 4 < 0.5, plain
    assert -0.2 < (cast["own"] - cast["model"]) / (2 * layer) < 0.8, cast
