"""Loading in few bits takes the memory of what is made, one expert more, and little else."""

import sys

import pytest
from support import programs
from support.models import draw

import llamoe

MEASURE = """
import ctypes, gc, sys, threading, time
from pathlib import Path
import llamoe

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))

def load():
    if sys.argv[3] == "nf4":
        from transformers import BitsAndBytesConfig
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    else:
        config = llamoe.QuantizationConfig(sys.argv[3])
    given = {"quantization_config": config} if sys.argv[2] == "quantize" else {}
    return llamoe.LlamoeForCausalLM.from_pretrained(sys.argv[1], **given)

# Large tensors lie in maps of their own: between others in the heap, what is given back counts or not by chance.
allocator, M_MMAP_THRESHOLD = ctypes.CDLL(None), -3
allocator.mallopt(M_MMAP_THRESHOLD, 1 << 16)
load()  # what is imported late
gc.collect()
allocator.malloc_trim(0)
base, peak, done = own(), [0], threading.Event()
def poll():
    while not done.is_set():
        peak[0] = max(peak[0], own())
        time.sleep(0.0005)
threading.Thread(target=poll).start()
try:
    model = load()
finally:
    done.set()
if sys.argv[2] == "quantize":
    model.save_pretrained(sys.argv[4])
print(peak[0] - base, sum(tensor.nbytes for tensor in model.state_dict().values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("weights", ["int4", "nf4"])
def test_peak_memory(weights, tmp_path):
    if weights == "nf4":
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    config = llamoe.LlamoeTextConfig(
        vocab_size=101, hidden_size=512, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=32, interleave_moe_layer_step=1, pad_token_id=0,
    )  # fmt: skip
    draw(llamoe.LlamoeForCausalLM, config).bfloat16().save_pretrained(tmp_path / "plain")
    for what, folder in (("quantize", "plain"), ("load", "packed")):
        arguments = (tmp_path / folder, what, weights, tmp_path / "packed")
        result = programs.run(["-c", MEASURE, *arguments], timeout=120)
        assert result.returncode == 0, result.stderr
        peak, final = map(int, result.stdout.split())
        # One expert in 16 bit, and what loading takes at any size.
        more = 3e6 + (2 * 3 * 512 * 1024 if what == "quantize" else 0)
        assert final > 27e6 and peak < 1.05 * final + more, (what, peak, final)
