"""The peak memory of a process with experts on disk is at most the other weights, the budget, an expert, and 200 MB.

The process generates tokens, and trains an adapter of the routed experts.
"""

import json

import pytest
import torch
from support import programs
from support.models import filled
from support.offload import expert_bytes, text_model

import llamoe

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys, torch, llamoe, peft
from support.peaks import status
# Memory of any program with these libraries; one thread, since each would allocate its own memory for products.
torch.set_num_threads(1)
before = status("VmRSS")
model = llamoe.LlamoeForCausalLM.from_pretrained(sys.argv[1], dtype="auto", experts_memory=int(sys.argv[2]))
answer = model.generate(torch.arange(3, 40)[None], max_new_tokens=20, do_sample=False, eos_token_id=-1)
rest = sum(p.nbytes for n, p in model.named_parameters() if ".experts." not in n)
counts = model.experts_statistics().values()
misses, read = (sum(layer[name] for layer in counts) for name in ("misses", "bytes_read"))
adapted = peft.get_peft_model(model, llamoe.lora_config(model, r=2)).train()
trained = [p for p in adapted.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained)
for _ in range(2):
    adapted(input_ids=torch.arange(3, 190)[None], labels=torch.arange(3, 190)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
# Weights, gradients and AdamW's two averages.
rest += 4 * sum(p.nbytes for p in trained)
print(json.dumps([before, status("VmHWM"), rest, misses, read, answer[0].tolist()]))
"""


def test_peak_is_everything_else_and_the_budget(tmp_path):
    # The model has 420 MB, of which 3 MB are not experts.
    with torch.device("meta"):
        model = text_model(
            hidden_size=512,
            intermediate_size=1024,
            intermediate_size_mlp=512,
            num_local_experts=66,
            head_dim=32,
        )
    # Random weights would take seconds: the same numbers are repeated, from another start in each matrix.
    model = filled(model.to(torch.bfloat16).to_empty(device="cpu"))
    model.save_pretrained(tmp_path, max_shard_size="200MB")
    expert, total = expert_bytes(model), sum(p.nbytes for p in model.parameters())
    model = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path, dtype="auto")
    resident = model.eval().generate(
        torch.arange(3, 40)[None], max_new_tokens=20, do_sample=False, eos_token_id=-1
    )
    budget = 7 * expert
    run = programs.run(["-c", SCRIPT, tmp_path, budget])
    assert run.returncode == 0, run.stderr
    before, peak, rest, misses, bytes_read, answer = json.loads(run.stdout.splitlines()[-1])
    assert answer == resident[0].tolist()
    assert misses > 7
    # Direct reads begin and end at blocks.
    assert misses * expert <= bytes_read <= 1.02 * misses * expert
    limit = before + rest + budget + expert + 200_000_000
    assert total > budget + 250_000_000
    assert peak < limit, f"{peak - before:,} bytes above {before:,}, of {limit - before:,}"
