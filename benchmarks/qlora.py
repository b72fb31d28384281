"""QLoRA with trained experts on a Scout-shaped stack: peak memory and tokens per second, extrapolated to 48 layers.

    python -m benchmarks.qlora                              # one CUDA device: 8 and 24 layers, NF4, rank 8, 4096 tokens
    python -m benchmarks.qlora --tiny                       # the same code on a CPU with small shapes

No checkpoint is read. A text model without weights is packed by the quantizer that `from_pretrained` would call, and
gets random numbers: of each shape one matrix is quantized, whose parts all experts get with scales of their own.
Embeddings, head, norms and routers are bfloat16. LoRA of `llamoe.lora_config` adapts attention, shared and routed
experts; its factors are float32. Every layer is checkpointed. The loss is the model's own, over all tokens.

Forward pass, backward pass and optimizer step each have a peak, which grows with the layers by a line of its own; the
whole model's is the largest of the three, whichever was that of few layers. Memory on CUDA is what tensors hold. The
vision tower is left out: Scout's has 1.7 GB. Every fourth layer has no rotary embedding: choose multiples of four.
"""

import argparse
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

import llamoe
from llamoe.modeling.formats import Format
from llamoe.modeling.layers import RotaryEmbedding
from llamoe.modeling.quantization import LlamoeQuantizer, QuantizedExperts, QuantizedLinear
from llamoe.modeling.quantization.bnb_quantizers import BitsAndBytes4BitQuantizer

from .command_line import RESULTS, command
from .hardware import describe
from .harness import free
from .shapes import Setting

WHOLE = 48
"""Scout's layers."""
CONTEXT, MOST_GB, LEAST_TOKENS = 4096, 66, 3000
"""Targets for the whole model on one H100 with so many tokens of context."""
PHASES = ("forward", "backward", "optimizer")
RANK, WARM_UP, STEPS = 8, 2, 5
TINY = dict(vocab_size=101, hidden_size=96, intermediate_size=128, head_dim=16, num_local_experts=5) | dict(
    num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None
)


def parse() -> argparse.Namespace:
    """Read the command line; refuse what cannot be measured before anything is built."""
    made = argparse.ArgumentParser("python -m benchmarks.qlora", description=__doc__.partition("\n")[0])
    made.add_argument("--tiny", action="store_true", help="small shapes on the CPU, in processor time")
    made.add_argument("--layers", type=int, nargs="+", help="two depths or more (8 24, with --tiny 2 4)")
    made.add_argument("--weights", choices=("nf4", "int4"), default="nf4", help="default: %(default)s")
    made.add_argument("--optimizer", choices=("adamw", "adamw8bit"), default="adamw")
    given = made.parse_args()
    given.layers = sorted(set(given.layers or ((2, 4) if given.tiny else (8, 24))))
    given.context = 48 if given.tiny else CONTEXT
    if len(given.layers) < 2 or given.layers[0] < 1:
        made.error("--layers must be two different depths or more, each at least 1")
    return given


def build(setting: Setting, layers: int, weights: str, tiny: bool) -> PreTrainedModel:
    """A model of random weights: "nf4", "int4", "int8", or "bf16". Packed ones are never whole in 16 bits."""
    text = {**(TINY if tiny else {}), "num_hidden_layers": layers}
    with torch.device("meta"):
        model = llamoe.LlamoeForCausalLM(llamoe.preset("llama-4-scout", text_config=text).text_config)
    quantizer: Any = None
    if weights == "nf4":
        fields = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        config: Any = BitsAndBytesConfig(**fields, bnb_4bit_compute_dtype=setting.dtype)
        quantizer = BitsAndBytes4BitQuantizer(config, pre_quantized=False)
    elif weights != "bf16":
        quantizer = LlamoeQuantizer(llamoe.QuantizationConfig(weights=weights), pre_quantized=False)
    # Experts are packed in the dtype of the model's weights.
    model.to(setting.dtype)
    if quantizer is not None:
        quantizer.preprocess_model(model, device_map=None)
    made: dict[Any, list[torch.Tensor]] = {}
    for module in model.modules():
        _fill(module, setting, made)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if quantizer is not None:
        quantizer.postprocess_model(model)
    return model


def _fill(module: nn.Module, setting: Setting, made: dict[Any, list[torch.Tensor]]) -> None:
    """Give a module's own weights random numbers; `made` keeps what was quantized."""

    def packed(name: str, form: Format, sizes: tuple[int, ...], count: int) -> None:
        if (form.key, sizes) not in made:
            made[form.key, sizes] = form.quantize(0.02 * setting.randn(*sizes))
        for suffix, part in zip(form.suffixes, made[form.key, sizes], strict=True):
            stack = part.expand(count, *part.shape).clone()
            if part.is_floating_point():
                # Scales and what else is in the weights' unit.
                factors = torch.linspace(0.8, 1.2, count, device=part.device).to(part.dtype)
                stack *= factors.view(-1, *[1] * part.dim())
            tensor = stack if isinstance(module, QuantizedExperts) else stack[0]
            setattr(module, name + suffix, tensor if suffix else nn.Parameter(tensor, requires_grad=False))

    if isinstance(module, QuantizedExperts):
        for name, form in module.formats.items():
            packed(name, form, module.sizes[name], module.num_experts)
    elif isinstance(module, QuantizedLinear):
        packed("weight", module.format, (module.out_features, module.in_features), 1)
    elif isinstance(module, RotaryEmbedding):
        module.to_empty(device=setting.device)
    else:
        for name, old in module.named_parameters(recurse=False):
            shape = (module.out_features, module.in_features) if isinstance(module, nn.Linear) else old.shape
            noise = 0.02 * setting.randn(*shape)
            number = noise if len(shape) > 1 else torch.ones_like(noise)
            # bitsandbytes' parameters are quantized when they are moved.
            setattr(module, name, type(old)(number, requires_grad=False, **vars(old)).to(setting.device))


def measure(setting: Setting, layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train so many layers; the phases' peaks in GB, the median of the steps' seconds, the last loss and gradients."""
    device, is_cuda = setting.device, setting.device.type == "cuda"
    base = build(setting, layers, options.weights, options.tiny)
    model = get_peft_model(base, llamoe.lora_config(base, r=RANK)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(factors, lr=1e-4, fused=True)
    if options.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        optimizer = AdamW8bit(factors, lr=1e-4)
    ids = setting.tokens(1, options.context, base.config.vocab_size)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    # What quantizing left in the allocator's cache.
    free(device)
    clock = time.perf_counter if is_cuda else time.process_time
    peaks, seconds, loss, moved = dict.fromkeys(PHASES, 0.0), [], torch.tensor(math.nan), 0
    for _ in range(WARM_UP + STEPS):
        begun = clock()
        # As in a Trainer, logits are not held beside the loss.
        loss = _in_phase("forward", peaks, device, lambda: model(**batch).loss)
        _in_phase("backward", peaks, device, loss.backward)
        _in_phase("optimizer", peaks, device, optimizer.step)
        seconds.append(clock() - begun)
        moved = sum(factor.grad is not None and bool(factor.grad.any()) for factor in factors)
        optimizer.zero_grad(set_to_none=True)
    return {
        "layers": layers,
        **peaks,
        "reserved": torch.cuda.max_memory_reserved(device) / 1e9 if is_cuda else None,
        "seconds": statistics.median(seconds[WARM_UP:]),
        "all_seconds": seconds,
        "loss": loss.item(),
        "factors": len(factors),
        "factors_with_gradients": moved,
        "trained": sum(factor.numel() for factor in factors),
    }


def _in_phase(phase: str, peaks: dict[str, float], device: torch.device, run: Callable[[], Any]) -> Any:
    """Run and raise the phase's peak to what was held; on a CPU by the process, whose peak never falls."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        result = run()
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks[phase] = max(peaks[phase], peak / 1e9)
    return result


def extrapolate(rows: list[dict[str, Any]], context: int) -> dict[str, Any]:
    """The line through the rows for each phase's peak and for the time, and what they say of the whole model."""
    depths = [row["layers"] for row in rows]
    lines = {}
    for what in (*PHASES, "seconds"):
        slope, intercept = statistics.linear_regression(depths, [row[what] for row in rows])
        lines[what] = {"a_layer": slope, "beside_layers": intercept}
    at_whole = {what: line["beside_layers"] + WHOLE * line["a_layer"] for what, line in lines.items()}
    phase = max(PHASES, key=at_whole.__getitem__)
    speed = context / at_whole["seconds"] if at_whole["seconds"] > 0 else math.nan
    how = "on the line and measured" if WHOLE in depths else "extrapolated, not measured"
    return dict(lines=lines, layers=WHOLE, how=how, GB=at_whole[phase], phase=phase, tokens=speed)


def main() -> int:
    """Measure the depths, print what they give, and write it if a CUDA device gave it."""
    options = parse()
    if not options.tiny and not torch.cuda.is_available():
        print("This needs a CUDA device, and torch finds none; --tiny needs none.", file=sys.stderr)
        return 2
    setting = Setting(torch.device("cpu") if options.tiny else torch.device("cuda", 0), torch.bfloat16)
    kind = "of the process" if options.tiny else "of tensors"
    rows: list[dict[str, Any]] = []
    for layers in options.layers:
        torch.manual_seed(setting.seed)
        rows.append(row := measure(setting, layers, options))
        free(setting.device)
        peaks = ", ".join(f"{phase} {row[phase]:.2f}" for phase in PHASES)
        print(
            f"{layers} layers, measured: peaks in GB {kind}: {peaks}; {row['seconds']:.3f} s a step, "
            f"{options.context / row['seconds']:,.0f} tokens/s; loss {row['loss']:.3f}; gradients in "
            f"{row['factors_with_gradients']} of {row['factors']} factors, {row['trained'] / 1e6:.3g} M numbers",
            flush=True,
        )
    found = extrapolate(rows, options.context)
    for what, line in found["lines"].items():
        print(f"line of {what}: {line['beside_layers']:.3f} + {line['a_layer']:.4f} a layer")
    peak = f"{found['GB']:.1f} GB ({found['phase']})"
    print(f"{WHOLE} layers, {found['how']}: {peak}, {found['tokens']:,.0f} tokens/s")
    wanted = f"at most {MOST_GB} GB, at least {LEAST_TOKENS:,} tokens/s on one H100 at {CONTEXT} tokens"
    print(f"wanted: {wanted}" + ("; other shapes say nothing of it" if options.tiny else ""))
    if not options.tiny:
        about = {**describe(setting.device), "command": command("qlora", sys.argv[1:])}
        results = {"about": about, "measured": rows, "whole": found, "targets": wanted}
        (RESULTS / "qlora.json").write_text(json.dumps(results, indent=1) + "\n")
    if all(math.isfinite(row["loss"]) and row["factors_with_gradients"] == row["factors"] for row in rows):
        return 0
    print("FAILED: a loss is not a number, or factors of adapters have no gradients", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
