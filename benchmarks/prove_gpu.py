"""Prove on one GPU that llamoe's kernels, formats, offloading, training and memory are right (ten minutes on an H100).

    make gpu                                  # or python -m benchmarks.prove_gpu
    python -m benchmarks.prove_gpu --steps parity formats
    python -m benchmarks.prove_gpu --small    # the same ten steps in small sizes on a CPU, to test this program

Each step compares the GPU's result with a reference (the CPU in float32, the plain formula, dequantized weights, a
model without offloading), or a number with a limit. Most times and bandwidths are only recorded. The exit status is 0
if nothing failed, 1 if something failed, 2 without a CUDA device. Results go to results/prove_gpu.json and .md, with
date, GPU and versions.
"""

import argparse
import copy
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import llamoe
from llamoe.modeling.kernels import kernel_failures
from llamoe.modeling.moe import Experts
from llamoe.modeling.offload import memory, store

from .harness import free, peak_of
from .machine import bytes_per_second, describe
from .proof import Check, Proof, nbytes, page
from .small_models import adapted, configs, inputs_of, saved, small_model
from .two_cards import cards_together

RESULTS = Path(__file__).parent / "results"
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest allowed difference of the median token's logits from the CPU's in float32, in standard deviations."""
COPIED = 1 << 32
"""Bytes that are copied to measure the bandwidth of the GPU's memory."""
LEAST_BANDWIDTH = 0.5
"""Least share of the measured bandwidth at which a product with one row reads its expert's weights."""
MOST_TIME = 2.0
"""Largest time of a decoding step in int8 or int4, as a multiple of the time in bfloat16."""
MOST_PINNED = 1.1
"""Largest pinned memory of experts in RAM, as a multiple of their bytes."""
LENGTHS = (8192, 32768)
"""Lengths of two prompts in tokens; the loss is computed over the shorter one."""
MOST_GROWTH = 1.05
"""Largest growth of memory from the short prompt to the long one, over the growth of their lengths: memory must grow in
proportion to the length, not to its square."""
MOST_OF_LOSS = 1.4
"""Largest memory in GB, beside the weights, of a loss over 8192 tokens. All logits at once would take 16.6 GB."""


def facts(proof: Proof) -> None:
    """Record the machine and the versions of libraries."""
    for name, value in describe(proof.device).items():
        proof.say(name, value)
    if not proof.is_cuda:
        return
    proof.say("compute capability", ".".join(map(str, torch.cuda.get_device_capability(proof.device))))


def formats_here(proof: Proof) -> tuple[str, ...]:
    """Return the weight formats that the device multiplies; "bf16" means float16 on GPUs without bfloat16."""
    if not proof.has_bfloat16:
        return ("bf16", "nf4")
    return ("bf16", "int8", "int4", "nf4") if proof.is_cuda else ("bf16", "int8", "int4")


@torch.no_grad()
def kernels(proof: Proof) -> None:
    """Compare experts of Llama 4 Scout's sizes with a loop over them in float32.

    Judge the bandwidth at which the product with one row reads weights.
    """
    rate = bytes_per_second(proof.clock(), COPIED if proof.is_cuda else 1 << 20)
    proof.say("GB a second of a copy", round(rate / 1e9))
    for weights in formats_here(proof):
        model = proof.model(1, weights)
        experts: Any = model.model.layers[0].feed_forward.experts
        hidden, _ = experts.sizes_of("down_proj")
        plain: Any = (
            experts.dequantized(torch.float32) if weights != "bf16" else copy.deepcopy(experts).float()
        )
        for rows in (1, 7, 64) if proof.small else (1, 8, 64, 512):
            x = proof.setting().randn(rows, hidden)
            ids = (torch.arange(rows, device=proof.device) * 3 % experts.num_experts)[:, None]
            ones = torch.ones(rows, 1, device=proof.device, dtype=x.dtype)
            run = partial(experts, x, ids, ones)
            expected = plain.loop_over_experts(x.float(), ids, ones.float())
            error = ((run() - expected).abs().max() / expected.abs().max()).item()
            # 0.03: inputs, weights and results are rounded to bfloat16's 8 bits.
            proof.judge(f"{weights}, {rows} rows: largest error", error, most=0.03)
            if proof.is_cuda and rows <= 64:
                read = min(1, ids.unique().numel() / experts.num_experts) * nbytes(experts)
                share = read / proof.seconds(run) / rate
                # llamoe's kernel needs bfloat16, and does not read bitsandbytes' format.
                has_kernel = proof.has_bfloat16 and weights != "nf4"
                least = LEAST_BANDWIDTH if rows == 1 and has_kernel else 0.0
                proof.judge(f"{weights}, {rows} rows: share of the bandwidth", share, least=least)
        del model, experts, plain
        free(proof.device)


def parity(proof: Proof) -> None:
    """Compare small models' logits and gradients with the CPU's in float32."""
    for family in configs():
        inputs = inputs_of(family)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        reference = small_model(family)
        expected = reference(**inputs, labels=labels)
        expected.loss.backward()
        real = inputs["attention_mask"].bool()
        wanted = expected.logits.detach()[real]
        for dtype, tolerance in TOLERANCES.items():
            if dtype == torch.bfloat16 and not proof.has_bfloat16:
                continue
            model = small_model(family).to(proof.device, dtype)
            moved = {
                name: tensor.to(proof.device, dtype if tensor.is_floating_point() else None)
                for name, tensor in inputs.items()
            }
            given = model(**moved, labels=labels.to(proof.device))
            given.loss.backward()
            logits = given.logits.detach().float().cpu()[real]
            error = ((logits - wanted).abs().amax(-1).median() / wanted.std()).item()
            name = f"{family}, {str(dtype).removeprefix('torch.')}"
            proof.judge(f"{name}: logits of the median token", error, most=tolerance)
            pairs = zip(reference.parameters(), model.parameters(), strict=True)
            error = max(_distance(b.grad.float().cpu(), a.grad) for a, b in pairs if a.grad is not None)
            if dtype == torch.float32:
                proof.judge(f"{name}: gradients", error, most=tolerance)
            else:
                # Recorded only: if rounding sends one token to another expert, whole gradients differ.
                proof.say(f"{name}: gradients", error)
        if family in ("dense", "mixtral", "llama4"):
            _judge_tokens(proof, family)
    proof.judge("kernels that failed their check", len(kernel_failures()), most=0)


@torch.no_grad()
def _judge_tokens(proof: Proof, family: str) -> None:
    """Compare logits of tokens decoded one by one, with adapters and a KV cache, to the CPU's in float32."""
    ids = inputs_of(family)["input_ids"][:1]

    def tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
        cache = model(ids[:, :-9], use_cache=True).past_key_values
        logits = [model(token, past_key_values=cache).logits for token in ids[:, -9:].split(1, 1)]
        return torch.cat(logits, 1).float().cpu()

    expected = tokens(adapted(small_model(family)), ids)
    for dtype, tolerance in TOLERANCES.items():
        if dtype != torch.bfloat16 or proof.has_bfloat16:
            given = tokens(adapted(small_model(family)).to(proof.device, dtype), ids.to(proof.device))
            error = ((given - expected).abs().amax(-1).median() / expected.std()).item()
            name = f"{family}, {str(dtype).removeprefix('torch.')}: logits of the median token with LoRA"
            proof.judge(name, error, most=tolerance)


def _distance(given: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the expected tensor."""
    return ((given - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def generates(proof: Proof) -> None:
    """Compare tokens of a growing and of a static cache, for which transformers compiles the model on a GPU."""
    for family in ("mixtral", "llama4"):
        for lora in (False, True):
            model = small_model(family)
            model = (adapted(model) if lora else model).to(proof.device)
            inputs = {name: tensor[:1].to(proof.device) for name, tensor in inputs_of(family).items()}
            options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
            tokens = [
                model.generate(**inputs, **options, cache_implementation=cache) for cache in (None, "static")
            ]
            same = int((tokens[0] == tokens[1]).sum())
            what = f"{family}{', LoRA' if lora else ''}: equal tokens of both caches"
            proof.judge(what, same, least=tokens[0].numel())


@torch.no_grad()
def formats(proof: Proof) -> None:
    """Compare each quantized layer's outputs with the outputs of its dequantized weights."""
    for weights in formats_here(proof)[1:]:
        config: Any = (
            llamoe.QuantizationConfig(weights=weights) if weights != "nf4" else _nf4(proof.setting().dtype)
        )
        model = llamoe.LlamoeForCausalLM.from_pretrained(
            saved(proof.folder, "llama4"),
            dtype=proof.setting().dtype,
            quantization_config=config,
            device_map={"": proof.device},
        )
        worst, count = 0.0, 0
        for module in model.modules():
            packed: Any = module
            if not getattr(module, "is_packed", False) or isinstance(
                getattr(module, "experts", None), nn.Module
            ):
                continue
            plain = packed.dequantized(torch.float32)
            if hasattr(packed, "in_features"):
                x = proof.setting().randn(5, packed.in_features)
                given, expected = packed(x), plain(x.float())
            else:
                x = proof.setting().randn(5, packed.sizes_of("down_proj")[0])
                ids = (torch.arange(5, device=proof.device) % packed.num_experts)[:, None]
                ones = torch.ones(5, 1, device=proof.device, dtype=x.dtype)
                given, expected = packed(x, ids, ones), plain.loop_over_experts(x.float(), ids, ones.float())
            count += 1
            worst = max(worst, ((given - expected).abs().max() / expected.abs().max()).item())
        proof.judge(f"{weights}: packed layers", count, least=1)
        proof.judge(f"{weights}: largest error of a layer", worst, most=0.03)


def _nf4(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _step_seconds(proof: Proof, model: Any) -> float:
    """Return the seconds of a decoding step of one row, without torch.compile."""
    clock = proof.clock()
    ids = proof.setting().tokens(1, 16, model.config.vocab_size)
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    step = partial(model, ids[:, :1], past_key_values=cache)
    step()
    return min(clock.sample(step, 5) for _ in range(3))


@torch.no_grad()
def offload(proof: Proof) -> None:
    """Compare models with experts in RAM or on disk to one that is on the device."""
    resident = llamoe.LlamoeForCausalLM.from_pretrained(
        saved(proof.folder, "llama4"), device_map={"": proof.device}
    ).eval()
    # The CPU would multiply up to 4 rows of an expert in RAM. With 0, all experts are copied to the GPU.
    with mock.patch.object(store, "_MAX_ROWS_IN_RAM", 0):
        for place in ("cpu", "disk") if proof.is_cuda else ("disk",):
            _judge_offloaded(proof, place, resident)


def _judge_offloaded(proof: Proof, place: str, resident: Any) -> None:
    """Judge a model with experts on "cpu" or "disk".

    Its logits must equal the resident model's in all bits, pinned memory must stay below its limit, and copies that run
    while the model is deleted must not write into memory that is allocated afterwards.
    """
    generator = torch.Generator().manual_seed(3)
    pinned = mock.Mock(side_effect=memory.pinned)
    with mock.patch.object(memory, "pinned", pinned), mock.patch.object(store, "pinned", pinned):
        model = llamoe.LlamoeForCausalLM.from_pretrained(
            saved(proof.folder, "llama4"),
            device_map={"": proof.device, "experts": place},
            experts_memory="600KB",
        ).eval()
    if place == "cpu":
        size = sum(call.args[0] for call in pinned.call_args_list)
        stacks = sum(nbytes(module) for module in resident.modules() if isinstance(module, Experts))
        proof.judge("experts in RAM: pinned bytes over the experts' bytes", size / stacks, most=MOST_PINNED)
    forwards, different = 20 if proof.small else 200, 0
    for _ in range(forwards):
        length = int(torch.randint(1, 9, (), generator=generator))
        ids = torch.randint(3, 490, (2, length), generator=generator).to(proof.device)
        different += not torch.equal(model(ids).logits, resident(ids).logits)
    proof.judge(f"experts on {place}: forward passes of {forwards} that differ", different, most=0)
    model(ids)
    # Copies may still run while the model is deleted. The next tensor may get their memory, and must stay zero.
    del model
    gc.collect()
    fresh = torch.zeros(1 << 20, device=proof.device)
    proof.judge(f"experts on {place}: bytes written after its deletion", int(fresh.count_nonzero()), most=0)


def trains(proof: Proof) -> None:
    """Train LoRA on attention and experts, of bf16 and int4 weights: check the loss and the gradients of A and B."""
    for weights in formats_here(proof)[::2]:
        model = adapted(proof.model(2, weights)).train()
        factors = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(factors, lr=3e-3)
        ids = proof.setting().tokens(2, 33, model.get_base_model().config.vocab_size)
        losses = []
        for _ in range(8):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            without = sum(factor.grad is None or not bool(factor.grad.any()) for factor in factors)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        proof.judge(f"{weights}: loss after 8 steps over the first", losses[-1] / losses[0], most=0.9)
        proof.judge(f"{weights}: factors without a gradient", without, most=0)


@torch.no_grad()
def prompts(proof: Proof) -> None:
    """Measure the peak memory of two prompts and of a loss; on a GPU check that attention is fused."""
    lengths = tuple(length // 32 for length in LENGTHS) if proof.small else LENGTHS
    model = proof.model(proof.layers(4), "bf16")
    names, peaks = set[str](), []
    for length in lengths:
        tokens = proof.setting().tokens(1, length, model.config.vocab_size)
        run = partial(model, tokens, use_cache=True, logits_to_keep=1)
        peaks.append(peak_of(run, proof.device)[1])
        names |= _operators(run) if proof.is_cuda else set()
    growth = lengths[1] / lengths[0] * MOST_GROWTH
    proof.judge("peak of a long prompt over a short one's", peaks[1] / peaks[0], most=growth)
    if proof.is_cuda:
        proof.judge("attention multiplied out", sum("attention_math" in name for name in names), most=0)
    labels = proof.setting().tokens(1, lengths[0], model.config.vocab_size)
    loss = partial(model, labels, labels=labels, use_cache=False, skip_logits=True)
    peak = peak_of(lambda: loss().loss, proof.device)[1]
    proof.judge(f"GB of a loss over {lengths[0]} tokens", peak / 1e9, most=MOST_OF_LOSS)


def _operators(run: Callable[[], Any]) -> set[str]:
    """Call `run`; return the names of torch's operators in it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    return {event.key for event in recorded.key_averages()}


@torch.no_grad()
def speed(proof: Proof) -> None:
    """Record a step's time and share of the memory's bandwidth; judge the time in int8 and int4."""
    rate = bytes_per_second(proof.clock(), COPIED if proof.is_cuda else 1 << 20)
    layers = 2 if proof.small else proof.layers(8)
    times = {}
    for weights in formats_here(proof):
        model = proof.model(layers, weights)
        times[weights] = seconds = _step_seconds(proof, model)
        experts = [module for module in model.modules() if isinstance(module, Experts)]
        idle = sum(nbytes(stack) * (1 - 1 / stack.num_experts) for stack in experts)
        read = nbytes(model) - nbytes(model.get_input_embeddings()) - idle
        proof.say(f"{weights}: milliseconds a token and layer", round(1e3 * seconds / layers, 3))
        proof.say(f"{weights}: share of the bandwidth", round(read / seconds / rate, 3))
        name, ratio = f"{weights}: time of a step over bf16's", seconds / times["bf16"]
        # Judge no speed on a CPU, nor that of bitsandbytes' experts, which are dequantized for each product.
        if proof.is_cuda and weights in ("int8", "int4"):
            proof.judge(name, ratio, most=MOST_TIME)
        elif weights != "bf16":
            proof.say(name, ratio)
        del model, experts
        free(proof.device)


STEPS: dict[str, Callable[[Proof], None]] = {
    "facts": facts,
    "kernels": kernels,
    "parity": parity,
    "generate": generates,
    "formats": formats,
    "offload": offload,
    "adapters": trains,
    "prompts": prompts,
    "speed": speed,
    "cards": cards_together,
}


def prove(proof: Proof, steps: list[str]) -> dict[str, Any]:
    """Run steps and return their results; a step that raises has failed, and the next one runs."""
    seconds = {}
    for name in steps:
        proof.step, begun = name, time.perf_counter()
        try:
            STEPS[name](proof)
        except Exception as error:
            traceback.print_exc()
            reason = traceback.format_exception_only(error)[0].partition("\n")[0]
            proof.checks.append(Check(name, "ended", reason[:300], "", False))
        seconds[name] = round(time.perf_counter() - begun, 1)
        for check in proof.checks:
            if check.step == name:
                print(" · ".join(filter(None, check.cells())), flush=True)
        free(proof.device)
    return {
        "machine": describe(proof.device),
        "sizes": "small" if proof.small else "whole",
        "seconds": seconds,
        "checks": [asdict(check) for check in proof.checks],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the steps named on the command line; write the results."""
    parser = argparse.ArgumentParser("python -m benchmarks.prove_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--small", action="store_true", help="use small sizes on the CPU, to test this program without a GPU"
    )
    parser.add_argument(
        "--steps", nargs="+", choices=list(STEPS), default=list(STEPS), help="steps to run; all by default"
    )
    parser.add_argument("--output", type=Path, help="folder of the results")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        print("This needs a CUDA device, and torch finds none. --small runs on the CPU.", file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.small else torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        results = prove(Proof(device, options.small, Path(folder)), options.steps)
    output = options.output or (None if options.small else RESULTS)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "prove_gpu.json").write_text(json.dumps(results, indent=1, default=str) + "\n")
        (output / "prove_gpu.md").write_text(page(results))
    return int(any(check["passed"] is False for check in results["checks"]))


if __name__ == "__main__":
    sys.exit(main())
