"""Proves on a GPU, in ten steps that are meant to take ten minutes of an H100, that what llamoe says of GPUs holds.

    make gpu                                  # or python -m benchmarks.prove_gpu
    python -m benchmarks.prove_gpu --steps parity formats
    python -m benchmarks.prove_gpu --small    # the same steps on a CPU, with small sizes: proves this program

Each step compares with something else: the CPU in float32, the plain formula, weights that were unpacked first, a model
whose experts are not offloaded, a limit. Times and bandwidths are told. The exit status is 0 where nothing failed,
1 where something did, 2 without a CUDA device. Results go to results/prove_gpu.json and .md, with date, card and
versions.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import llamoe
from llamoe.modeling.kernels import kernel_failures
from llamoe.modeling.moe import Experts

from .harness import Clock, DeviceClock, ProcessorClock, free, peak_of
from .machine import about_line, bytes_per_second, describe
from .random_models import build
from .weights import Setting

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
SMALL = dict(
    hidden_size=128, intermediate_size=192, num_attention_heads=8, num_key_value_heads=2, head_dim=32
)
SMALL |= dict(vocab_size=503, num_hidden_layers=4, max_position_embeddings=512, pad_token_id=0)
MIXTURE = dict(num_local_experts=6, intermediate_size_mlp=320, attention_chunk_size=32, floor_scale=8)
VISION = dict(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, image_size=56
)
VISION |= dict(patch_size=14, projector_input_dim=64, projector_output_dim=64, vision_output_dim=64)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of the median token's logits from the CPU's in float32, in standard deviations of logits."""
_LAYER, _EMBEDDINGS = 4.5e9, 4.2e9
"""Bytes of a layer of Scout's shape in 16 bits, and of its embeddings and head."""
COPIED = 1 << 32
TINY = dict(vocab_size=101, hidden_size=96, intermediate_size=128, head_dim=16, num_local_experts=5) | dict(
    num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None
)
"""Sizes of random models with `--small`."""
LEAST_BANDWIDTH = 0.5
"""Share of the measured bandwidth at which few rows shall read their experts."""
MOST_TIME = 2.0
"""Times the time of 16 bits that a step of few bits may take."""
MOST_PINNED = 1.1
LENGTHS = (8192, 32768)
"""Tokens of two prompts, and, of the first, of a loss."""
MOST_GROWTH = 1.05
"""Times the ratio of tokens, how much more memory the longer prompt may take: none that grows with their square."""
MOST_OF_LOSS = 1.4
"""GB beside the weights that a loss over 8192 tokens may take. With logits it would be 16.6."""


@dataclass
class Check:
    """A value that a step measured; `passed` is None without a limit."""

    step: str
    what: str
    value: Any
    limit: str = ""
    passed: bool | None = None


@dataclass
class Proof:
    """The device, the sizes, and the checks so far."""

    device: torch.device
    small: bool
    folder: Path
    checks: list[Check] = field(default_factory=list)
    step: str = ""

    @property
    def is_cuda(self) -> bool:
        """Return True on a CUDA device."""
        return self.device.type == "cuda"

    def say(self, what: str, value: Any) -> None:
        """Note something without a limit."""
        self.checks.append(Check(self.step, what, value))

    def judge(self, what: str, value: float, most: float | None = None, least: float | None = None) -> None:
        """Note a number, which must be within its limit."""
        passed = (most is None or value <= most) and (least is None or value >= least)
        limit = f"at most {most:g}" if most is not None else f"at least {least:g}"
        self.checks.append(Check(self.step, what, value, limit, passed))

    def seconds(self, run: Callable[[], Any], repeats: int = 5) -> float:
        """Return the least seconds of several runs; on a card by replays of a CUDA graph where one can be made."""
        run()
        if self.is_cuda:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        return min(self.clock().sample(run, repeats) for _ in range(3))

    def clock(self) -> Clock:
        """Return the clock of the device."""
        return DeviceClock(self.device) if self.is_cuda else ProcessorClock(1 << 20)

    def model(self, layers: int, weights: str) -> Any:
        """Build a text model of Scout's shape, or a small one, of random weights."""
        text = {**(TINY if self.small else {}), "num_hidden_layers": layers}
        config = llamoe.preset("llama-4-scout", text_config=text).text_config
        return build(self.setting(), config, weights)

    @property
    def has_bfloat16(self) -> bool:
        """Whether the device multiplies bfloat16; packed weights of llamoe's own are multiplied in nothing else."""
        return not self.is_cuda or torch.cuda.get_device_capability(self.device) >= (8, 0)

    def setting(self) -> Setting:
        """Return the device and the 16-bit dtype of models."""
        return Setting(self.device, torch.bfloat16 if self.has_bfloat16 else torch.float16)

    def layers(self, wanted: int) -> int:
        """Return the number of layers of Scout's shape in 16 bits, at most `wanted`, that fit half of the card."""
        if self.small:
            return wanted
        room = torch.cuda.get_device_properties(self.device).total_memory / 2 - _EMBEDDINGS
        return max(1, min(wanted, int(room / _LAYER)))


def configs() -> dict[str, tuple[type, Any]]:
    """Class and configuration of a small model of each family."""
    text = {**SMALL, **MIXTURE}
    multimodal = llamoe.LlamoeConfig(
        text_config={**text, "num_experts_per_tok": 1},
        vision_config=VISION,
        image_token_index=501,
        boi_token_index=499,
        eoi_token_index=500,
    )
    mixtral = {**SMALL, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24}
    return {
        "dense": (llamoe.LlamoeDenseForCausalLM, llamoe.LlamoeDenseConfig(**SMALL)),
        "mixtral": (llamoe.LlamoeMixtralForCausalLM, llamoe.LlamoeMixtralConfig(**mixtral)),
        "llama4": (llamoe.LlamoeForCausalLM, llamoe.LlamoeTextConfig(**text)),
        "llama4-pictures": (llamoe.LlamoeForConditionalGeneration, multimodal),
    }


def small_model(family: str) -> Any:
    """Build a small model on the CPU, whose weights are drawn so that logits have a deviation of about one."""
    model_class, config = configs()[family]
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                inputs = (
                    weight.shape[-2] if ".experts." in name and "mixtral" not in family else weight.shape[-1]
                )
                weight.normal_(std=1.0 if "embed_tokens" in name else inputs**-0.5)
            elif not name.endswith("bias"):
                weight.normal_(1.0, 0.1)
    return model


def inputs_of(family: str, length: int = 45) -> dict[str, torch.Tensor]:
    """Draw two rows, the second with left padding; with a picture in the first."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 490, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, :7], mask[1, :7] = 0, 0
    found = {"input_ids": ids, "attention_mask": mask}
    if family == "llama4-pictures":
        ids[0, 2:6] = 501
        found["pixel_values"] = torch.randn(1, 3, 56, 56, generator=generator)
    return found


def facts(proof: Proof) -> None:
    """Note the machine and its versions."""
    for name, value in describe(proof.device).items():
        proof.say(name, value)
    if not proof.is_cuda:
        return
    proof.say("compute capability", ".".join(map(str, torch.cuda.get_device_capability(proof.device))))


def formats_here(proof: Proof) -> tuple[str, ...]:
    """Formats that run on the device: "bf16" is the 16 bits that it multiplies."""
    if not proof.has_bfloat16:
        return ("bf16", "nf4")
    return ("bf16", "int8", "int4", "nf4") if proof.is_cuda else ("bf16", "int8", "int4")


@torch.no_grad()
def kernels(proof: Proof) -> None:
    """Few and many rows of a Scout-shaped mixture layer: beside the plain loop in float32, and the memory's speed."""
    rate = bytes_per_second(proof.clock(), COPIED if proof.is_cuda else 1 << 20)
    proof.say("GB a second of a copy", round(rate / 1e9))
    for weights in formats_here(proof):
        model = proof.model(1, weights)
        experts: Any = model.model.layers[0].feed_forward.experts
        hidden, _ = experts.sizes_of("down_proj")
        plain: Any = experts.dequantized(torch.float32) if weights != "bf16" else _cast(experts)
        for rows in (1, 7, 64) if proof.small else (1, 8, 64, 512):
            x = proof.setting().randn(rows, hidden)
            ids = (torch.arange(rows, device=proof.device) * 3 % experts.num_experts)[:, None]
            ones = torch.ones(rows, 1, device=proof.device, dtype=x.dtype)
            run = partial(experts, x, ids, ones)
            expected = plain.loop_over_experts(x.float(), ids, ones.float())
            error = ((run() - expected).abs().max() / expected.abs().max()).item()
            # Rows, products and results are rounded to 8 bits, as in 16-bit models.
            proof.judge(f"{weights}, {rows} rows: largest error", error, most=0.03)
            if proof.is_cuda and rows <= 64:
                read = min(1, ids.unique().numel() / experts.num_experts) * _nbytes(experts)
                share = read / proof.seconds(run) / rate
                # Cards without bfloat16 have no kernel of ours, and bitsandbytes' experts are unpacked.
                has_kernel = proof.has_bfloat16 and weights != "nf4"
                least = LEAST_BANDWIDTH if rows == 1 and has_kernel else 0.0
                proof.judge(f"{weights}, {rows} rows: share of the bandwidth", share, least=least)
        del model, experts, plain
        free(proof.device)


def _cast(experts: Any) -> Any:
    import copy

    return copy.deepcopy(experts).float()


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def parity(proof: Proof) -> None:
    """Compare logits and gradients of all families with the CPU in float32."""
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
                name: each.to(proof.device, dtype if each.is_floating_point() else None)
                for name, each in inputs.items()
            }
            given = model(**moved, labels=labels.to(proof.device))
            given.loss.backward()
            logits = given.logits.detach().float().cpu()[real]
            error = ((logits - wanted).abs().amax(-1).median() / wanted.std()).item()
            name = f"{family}, {str(dtype).removeprefix('torch.')}"
            proof.judge(f"{name}: logits of the median token", error, most=tolerance)
            pairs = zip(reference.parameters(), model.parameters(), strict=True)
            apart = max(_apart(b.grad.float().cpu(), a.grad) for a, b in pairs if a.grad is not None)
            if dtype == torch.float32:
                proof.judge(f"{name}: gradients", apart, most=tolerance)
            else:
                # A token that rounding sends to another expert changes whole gradients.
                proof.say(f"{name}: gradients", apart)
        if family in ("dense", "mixtral", "llama4"):
            _judge_tokens(proof, family)
    proof.judge("kernels that failed their check", len(kernel_failures()), most=0)


@torch.no_grad()
def _judge_tokens(proof: Proof, family: str) -> None:
    """Logits of single tokens with adapters behind a cache, beside the CPU in float32."""
    ids = inputs_of(family)["input_ids"][:1]

    def tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
        cache = model(ids[:, :-9], use_cache=True).past_key_values
        found = [model(id_, past_key_values=cache).logits for id_ in ids[:, -9:].split(1, 1)]
        return torch.cat(found, 1).float().cpu()

    expected = tokens(adapted(small_model(family)), ids)
    for dtype, tolerance in TOLERANCES.items():
        if dtype != torch.bfloat16 or proof.has_bfloat16:
            given = tokens(adapted(small_model(family)).to(proof.device, dtype), ids.to(proof.device))
            error = ((given - expected).abs().amax(-1).median() / expected.std()).item()
            name = f"{family}, {str(dtype).removeprefix('torch.')}: logits of the median token with LoRA"
            proof.judge(name, error, most=tolerance)


def _apart(given: torch.Tensor, expected: torch.Tensor) -> float:
    return ((given - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def adapted(model: Any) -> Any:
    """Add LoRA to a model, with second factors that are not zero."""
    from peft import get_peft_model

    torch.manual_seed(2)
    with_lora = get_peft_model(model, llamoe.lora_config(model, r=8))
    with torch.no_grad():
        for name, weight in with_lora.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02)
    return with_lora.eval()


def generates(proof: Proof) -> None:
    """Compare tokens with a cache that grows and with one of fixed length, which transformers compiles on a card."""
    for family in ("mixtral", "llama4"):
        for lora in (False, True):
            model = small_model(family)
            model = (adapted(model) if lora else model).to(proof.device)
            inputs = {name: each[:1].to(proof.device) for name, each in inputs_of(family).items()}
            options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
            tokens = [
                model.generate(**inputs, **options, cache_implementation=cache) for cache in (None, "static")
            ]
            same = int((tokens[0] == tokens[1]).sum())
            what = f"{family}{', LoRA' if lora else ''}: equal tokens of both caches"
            proof.judge(what, same, least=tokens[0].numel())


def saved(proof: Proof, family: str) -> Path:
    """Return a folder with a small model."""
    folder = proof.folder / family
    if not folder.exists():
        small_model(family).save_pretrained(folder)
    return folder


@torch.no_grad()
def formats(proof: Proof) -> None:
    """Compare quantized layers with their dequantized weights, and the time of a step with 16 bits."""
    for weights in formats_here(proof)[1:]:
        config: Any = (
            llamoe.QuantizationConfig(weights=weights) if weights != "nf4" else _nf4(proof.setting().dtype)
        )
        model = llamoe.LlamoeForCausalLM.from_pretrained(
            saved(proof, "llama4"),
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
    if not proof.is_cuda:
        return
    times = {}
    for weights in formats_here(proof):
        model = proof.model(proof.layers(4), weights)
        times[weights] = _step_seconds(proof, model)
        del model
        free(proof.device)
        name, ratio = f"{weights}: time of a step over 16 bits'", times[weights] / times["bf16"]
        # bitsandbytes' experts are unpacked for each product.
        if weights == "nf4":
            proof.say(name, ratio)
        else:
            proof.judge(name, ratio, most=MOST_TIME)


def _nf4(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _step_seconds(proof: Proof, model: Any) -> float:
    """Seconds of an eager decode step of one row."""
    clock = proof.clock()
    ids = proof.setting().tokens(1, 16, model.config.vocab_size)
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    step = partial(model, ids[:, :1], past_key_values=cache)
    step()
    return min(clock.sample(step, 5) for _ in range(3))


@torch.no_grad()
def offload(proof: Proof) -> None:
    """Experts in RAM and on disk beside resident ones: random passes, bit by bit; pinned bytes; an end meanwhile."""
    from llamoe.modeling.offload import memory, store

    folder, passes = saved(proof, "llama4"), 20 if proof.small else 200
    resident = llamoe.LlamoeForCausalLM.from_pretrained(folder, device_map={"": proof.device}).eval()
    generator = torch.Generator().manual_seed(3)
    asked = [0]
    original = memory.pinned

    def pinned(size: int) -> torch.Tensor:
        asked[0] += size
        return original(size)

    for place in ("cpu", "disk") if proof.is_cuda else ("disk",):
        # With no row computed in RAM, every expert is copied to the card.
        memory.pinned, store._MAX_ROWS_IN_RAM = pinned, 0
        before = _pinned_bytes()
        try:
            model = llamoe.LlamoeForCausalLM.from_pretrained(
                folder, device_map={"": proof.device, "experts": place}, experts_memory="600KB"
            ).eval()
        finally:
            memory.pinned = original
        if place == "cpu":
            stacks = sum(_nbytes(each) for each in resident.modules() if isinstance(each, Experts))
            proof.judge(
                "experts in RAM: bytes asked to be locked over theirs", asked[0] / stacks, most=MOST_PINNED
            )
            # Linux does not count the pinned memory of some drivers, so zero proves nothing.
            if (used := _pinned_bytes() - before) > 0:
                proof.judge("experts in RAM: locked bytes over theirs", used / stacks, most=MOST_PINNED)
        different = 0
        for _ in range(passes):
            length = int(torch.randint(1, 9, (), generator=generator))
            ids = torch.randint(3, 490, (2, length), generator=generator).to(proof.device)
            different += not torch.equal(model(ids).logits, resident(ids).logits)
        proof.judge(f"experts on {place}: passes of {passes} that differ", different, most=0)
        model(ids)
        # While copies may be on their way; what takes their memory must not be written to.
        del model
        gc.collect()
        fresh = torch.zeros(1 << 20, device=proof.device)
        proof.judge(f"experts on {place}: bytes written after the end", int(fresh.count_nonzero()), most=0)


def _pinned_bytes() -> int:
    """Return the bytes of this process that are locked in memory, by Linux's count; 0 if there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmPin"))


def trains(proof: Proof) -> None:
    """LoRA on attention and experts, of plain and of packed weights: the loss falls, and every factor has gradients."""
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
    """Measure peak memory of two prompts and a loss; on a GPU check that attention is fused."""
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
    """Return the names of torch's operators that ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    return {event.key for event in recorded.key_averages()}


def speed(proof: Proof) -> None:
    """Note the time of a token, and the share of the bandwidth at which weights are read; without limits."""
    rate = bytes_per_second(proof.clock(), COPIED if proof.is_cuda else 1 << 20)
    layers = 2 if proof.small else proof.layers(8)
    for weights in formats_here(proof):
        with torch.no_grad():
            model = proof.model(layers, weights)
            seconds = _step_seconds(proof, model)
        experts = [each for each in model.modules() if isinstance(each, Experts)]
        idle = sum(_nbytes(each) * (1 - 1 / each.num_experts) for each in experts)
        read = _nbytes(model) - _nbytes(model.get_input_embeddings()) - idle
        proof.say(f"{weights}: milliseconds a token and layer", round(1e3 * seconds / layers, 3))
        proof.say(f"{weights}: share of the bandwidth", round(read / seconds / rate, 3))
        del model, experts
        free(proof.device)


@torch.no_grad()
def cards_together(proof: Proof) -> None:
    """Compare two cards with one: `device_map="auto"`, tensor and expert parallelism, FSDP2."""
    count = torch.cuda.device_count() if proof.is_cuda else 0
    proof.say("cards", count)
    if proof.is_cuda and count < 2:
        return
    folder = saved(proof, "llama4")
    if proof.is_cuda:
        inputs = {name: each.to(proof.device) for name, each in inputs_of("llama4").items()}
        one = llamoe.LlamoeForCausalLM.from_pretrained(folder, device_map={"": proof.device}).eval()
        some = _nbytes(one) // 2 + (1 << 20)
        two = llamoe.LlamoeForCausalLM.from_pretrained(
            folder, device_map="auto", max_memory={0: some, 1: 8 * some}
        ).eval()
        places = {str(weight.device) for weight in two.parameters()}
        proof.judge("cards that have weights", len(places), least=2)
        error = (one(**inputs).logits - two(**inputs).logits.to(proof.device)).abs().max().item()
        proof.judge("largest difference from one card", error, most=1e-4)
        del one, two
        free(proof.device)
    results = proof.folder / "two_cards.json"
    words = ["-m", "benchmarks.two_cards", str(folder), str(results), *([] if proof.is_cuda else ["--cpu"])]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"two processes: {done.stderr.strip()[-200:]}")
    for kind, found in json.loads(results.read_text()).items():
        proof.judge(f"{kind}: largest difference of logits from one process", found["before"], most=1e-4)
        proof.judge(f"{kind}: the same after a step of training", found["after"], most=1e-3)
        proof.judge(f"{kind}: share of the weights that a process has", found["kept"], most=0.75)


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
    """Run steps; one that raises has failed, and the others go on."""
    seconds = {}
    for name in steps:
        proof.step, begun = name, time.perf_counter()
        try:
            STEPS[name](proof)
        except Exception as error:
            traceback.print_exc()
            first = str(error).splitlines()[0] if str(error) else ""
            proof.checks.append(Check(name, "ended", f"{type(error).__name__}: {first}"[:300], "", False))
        seconds[name] = round(time.perf_counter() - begun, 1)
        for check in proof.checks:
            if check.step == name:
                print(_line(check), flush=True)
        free(proof.device)
    return {
        "machine": describe(proof.device),
        "sizes": "small" if proof.small else "whole",
        "seconds": seconds,
        "checks": [asdict(check) for check in proof.checks],
    }


def _line(check: Check) -> str:
    verdict = {True: "ok", False: "FAILED", None: ""}[check.passed]
    value = f"{check.value:.4g}" if isinstance(check.value, float) else check.value
    return " · ".join(filter(None, (check.step, check.what, str(value), check.limit, verdict)))


def page(results: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    lines = ["# What was proved", "", about_line(results["machine"]), ""]
    lines += [
        f"`python -m benchmarks.prove_gpu`, {results['sizes']} sizes, {sum(results['seconds'].values()):.0f} s",
        "",
    ]
    lines += ["| step | what | value | limit | |", "|---|---|---|---|---|"]
    for check in (Check(**each) for each in results["checks"]):
        value = f"{check.value:.4g}" if isinstance(check.value, float) else check.value
        verdict = {True: "ok", False: "**failed**", None: ""}[check.passed]
        cells = (check.step, check.what, value, check.limit, verdict)
        lines.append(
            "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Prove, and write what was found."""
    parser = argparse.ArgumentParser("python -m benchmarks.prove_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--small", action="store_true", help="small sizes on the CPU: proves this program, and no card"
    )
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--output", type=Path, help="folder of the results; with --small none by default")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        print("This needs a CUDA device, and torch finds none; --small needs none.", file=sys.stderr)
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
