"""Run a model of a published size on this machine as a user would, and compare the plan with measurements.

    python -m benchmarks.published_sizes                      # Mixtral 8x7B in int4: 25 GB of disk, 12 GB of memory
    python -m benchmarks.published_sizes --preset llama-4-scout --ram 20GB
    python -m benchmarks.published_sizes --preset llama-4-scout --ram 20GB --weights w4a16    # as it is downloaded

Nothing is downloaded: `drawn_folders` writes a folder of random weights, which is removed at the end. In between one
process does what a user does: plan, load, generate after a prompt, compute a long prompt, train LoRA with routed
experts, save, and load again. With random weights all experts are chosen about equally often.

Bytes are those that the kernel read for the process (`/proc/self/io`). The peak is of resident memory, with pages of
mapped files. A miss is an expert not in memory; misses "are read" while at least one thread waits for the drive.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import llamoe
from llamoe.configuration.base import LlamoeBaseConfig
from llamoe.configuration.sizes import bytes_of
from llamoe.modeling.offload import reading
from llamoe.modeling.registration import model_class

from .drawn_folders import W4A16, write
from .machine import about_line, describe
from .processes import bytes_read, counted, forget, in_process, status

RESULTS = Path(__file__).parent / "results"

NEW_TOKENS, SHORT, LONG, STEPS, ROW, RANK = 16, 16, 256, 3, 32, 8
# Seconds to wait after writing: a drive reads slower while it empties its write cache.
SETTLING = 30
# The least and the largest allowed value of each figure; None for no limit.
TARGETS: dict[str, tuple[float | None, float | None]] = {
    "load_seconds": (None, 20.0),
    "bytes_over_missed": (None, 1.02),
    "share_of_drive": (0.85, None),
    "peak_over_budget_gb": (None, 1.0),
    "tokens_over_forecast": (0.8, 1.25),
}


class Waiting:
    """A clock of the time during which at least one thread waits for the drive."""

    def __init__(self):
        self.lock, self.running, self.since, self.seconds = threading.Lock(), 0, 0.0, 0.0
        fill = reading._File.fill

        def timed(file, *args):
            with self.lock:
                if not self.running:
                    self.since = time.perf_counter()
                self.running += 1
            try:
                return fill(file, *args)
            finally:
                with self.lock:
                    self.running -= 1
                    if not self.running:
                        self.seconds += time.perf_counter() - self.since

        reading._File.fill = timed  # type: ignore[method-assign]


class Tokens(BaseStreamer):
    """A streamer that records time, bytes read and missed experts at each new token."""

    def __init__(self, model: Any, waiting: Waiting):
        self.model, self.waiting, self.rows = model, waiting, []

    def put(self, value: Any) -> None:
        """Record the figures so far; `generate` calls this for the prompt, then for each token."""
        self.rows.append(now(self.model, self.waiting))

    def end(self) -> None:
        """Do nothing at the end of generation."""


def now(model: Any, waiting: Waiting) -> dict[str, float]:
    """Return the figures so far: seconds, bytes read, experts missed and asked for, seconds of reading."""
    missed = counted(model, "misses")
    return {
        "seconds": time.perf_counter(),
        "read": bytes_read(),
        "missed": missed,
        "asked": missed + counted(model, "hits"),
        "reading": waiting.seconds,
    }


def between(first: dict[str, float], last: dict[str, float], expert_bytes: int) -> dict[str, float]:
    """Return the changes between two results of `now`, and their ratios."""
    change = {name: last[name] - first[name] for name in first}
    missed = change["missed"] * expert_bytes
    return {
        "seconds": change["seconds"],
        "read_bytes": change["read"],
        "missed_bytes": missed,
        "hit_rate": 1 - change["missed"] / change["asked"] if change["asked"] else None,
        "read_over_missed": change["read"] / missed if missed else None,
        "reading_seconds": change["reading"],
        "reading_rate": change["read"] / change["reading"] if change["reading"] else None,
    }


def read_config(folder: str) -> Any:
    """Read the configuration of a folder."""
    return llamoe.from_stock(json.loads((Path(folder) / "config.json").read_text()))


def rates(folder: str) -> dict[str, Any]:
    """Measure this machine's bandwidths in bytes a second, the drive's as the median of three."""
    measured = [llamoe.measure_bandwidths(folder) for _ in range(3)]
    return {**vars(measured[0]), "drive": statistics.median(float(one.drive) for one in measured)}


def run(
    folder: str,
    ram: str,
    headroom: str,
    tokens: int,
    prompt: int,
    row: int,
    steps: int,
    given: dict[str, float],
) -> dict[str, Any]:
    """Plan, load, generate, compute a prompt, train, save and load again, as a user does; return all figures."""
    found: dict[str, Any] = {"budget": bytes_of("ram", ram), "headroom": bytes_of("headroom", headroom)}
    config, options = read_config(folder), dict(gpus=0, ram=ram, headroom=headroom)
    rates = llamoe.Bandwidths(**given)
    plan: Any = llamoe.plan_placement(folder, context=row, adapters=RANK, bandwidths=rates, **options)
    found |= {"rates": given, "training": vars(plan.training), "held_share": plan.hit_share}
    found |= {"experts_memory": plan.experts_memory, "offloaded": plan.experts.get("disk", 0)}
    found["forecast"] = {
        "tokens_per_second": 1 / sum(plan.seconds.values()),
        "hit_rate": plan.hit_share,
    }
    text = config.get_text_config()
    expert_bytes = found["offloaded"] // max(1, text.num_local_experts * len(text.moe_layers))

    waiting, started = Waiting(), status("VmRSS")

    def load() -> Any:
        return model_class(config).from_pretrained(folder, dtype="auto", **plan.arguments()).eval()

    resident = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) - found["offloaded"]
    found["touched"] = touch(resident)
    begun = time.perf_counter()
    model = load()
    found |= {
        "load_seconds": time.perf_counter() - begun,
        "load_peak": status("VmHWM"),
        "started_with": started,
    }
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, config.get_text_config().vocab_size, (1, max(prompt, SHORT)), generator=generator)

    streamer = Tokens(model, waiting)
    begin = now(model, waiting)
    model.generate(
        ids[:, :SHORT], attention_mask=torch.ones_like(ids[:, :SHORT]), max_new_tokens=tokens + 1, do_sample=False,
        eos_token_id=None, pad_token_id=0, streamer=streamer,
    )  # fmt: skip
    # The streamer gets the prompt first, then the token that the prompt's forward pass gives.
    found["first"] = between(begin, streamer.rows[1], expert_bytes)
    found["decode"] = between(streamer.rows[1], streamer.rows[-1], expert_bytes)
    found["decode"]["tokens_per_second"] = tokens / found["decode"]["seconds"]
    found["decode_peak"] = status("VmHWM")

    begin = now(model, waiting)
    with torch.no_grad():
        model(ids[:, :prompt], logits_to_keep=1, use_cache=False)
    found["prompt"] = between(begin, now(model, waiting), expert_bytes)
    found["prompt"]["tokens"] = prompt
    found["prompt_peak"] = status("VmHWM")

    torch.manual_seed(0)
    adapters, found["experts_are_trained"] = lora(model)
    adapters.train()
    adapters.gradient_checkpointing_enable({"use_reentrant": False})
    adapters.enable_input_require_grads()
    optimizer = torch.optim.AdamW([each for each in adapters.parameters() if each.requires_grad], lr=1e-3)
    found["steps"] = []
    for _ in range(steps):
        begin = now(model, waiting)
        loss = adapters(input_ids=ids[:, :row], labels=ids[:, :row], use_cache=False, skip_logits=True).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found["steps"].append({**between(begin, now(model, waiting), expert_bytes), "loss": loss.item()})
    found["peak"] = status("VmHWM")

    adapters.eval()
    with torch.no_grad():
        expected = adapters(ids[:, :SHORT], use_cache=False).logits
    with tempfile.TemporaryDirectory() as saved:
        adapters.save_pretrained(saved)
        found["adapter_bytes"] = sum(path.stat().st_size for path in Path(saved).iterdir())
        model.close()
        kept = weakref.ref(model)
        # The streamer holds a reference to the model, too.
        del adapters, optimizer, model, loss, streamer
        gc.collect()
        if kept() is not None:
            raise RuntimeError("the model is still referenced, and memory is too small to load a second one")
        begun = time.perf_counter()
        again = PeftModel.from_pretrained(load(), saved).eval()
        found["reload_seconds"] = time.perf_counter() - begun
        with torch.no_grad():
            given = again(ids[:, :SHORT], use_cache=False).logits
    found["reloaded_is_equal"] = bool(torch.equal(given, expected))
    return found


def touch(nbytes: int) -> dict[str, float]:
    """Write to new memory and free it; return bytes and seconds.

    A virtual machine may get memory from its host only when it first writes to it, more slowly than it reads the drive.
    After this call that time does not count as time of loading.
    """
    begun, block = time.perf_counter(), 1 << 28
    memory = [
        torch.zeros(min(block, nbytes - start), dtype=torch.uint8).add_(1)
        for start in range(0, nbytes, block)
    ]
    del memory
    return {"bytes": nbytes, "seconds": time.perf_counter() - begun}


def lora(model: PreTrainedModel) -> tuple[Any, bool]:
    """Add adapters, on routed experts if possible; return the model and whether experts have them."""
    try:
        return get_peft_model(model, llamoe.lora_config(model, r=RANK)), True
    except ValueError:
        return get_peft_model(model, llamoe.lora_config(model, r=RANK, experts=False)), False


def judge(found: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """Return the figure of each target, and whether it is within its limits."""
    drive, decode = found["rates"]["drive"], found["decode"]
    figures = {
        "load_seconds": found["load_seconds"],
        "bytes_over_missed": decode["read_over_missed"],
        "share_of_drive": decode["reading_rate"] and decode["reading_rate"] / drive,
        "peak_over_budget_gb": (found["peak"] - found["budget"]) / 1e9,
        "tokens_over_forecast": decode["tokens_per_second"] / found["forecast"]["tokens_per_second"],
    }
    judged = {}
    for name, figure in figures.items():
        least, most = TARGETS[name]
        # A figure is None if all experts fit into memory, so that nothing is read.
        met = figure is None or ((least is None or figure >= least) and (most is None or figure <= most))
        judged[name] = (figure, met)
    return judged


def page(
    about: dict[str, Any], name: str, weights: str, written: dict[str, Any], found: dict[str, Any]
) -> str:
    """Return the results as a Markdown page."""
    drive, decode, first, prompt = found["rates"]["drive"], found["decode"], found["first"], found["prompt"]
    steps, forecast, training = found["steps"], found["forecast"], found["training"]
    rate, over = decode["reading_rate"] or 0.0, decode["read_over_missed"] or 0.0
    seconds, read = (statistics.median(each[what] for each in steps) for what in ("seconds", "read_bytes"))
    peaks = ", ".join(_gb(found[each]) for each in ("load_peak", "decode_peak", "prompt_peak", "peak"))
    what = "routed experts too" if found["experts_are_trained"] else "without routed experts"
    rows = [
        ("written", f"{_gb(written['bytes'])} in {written['seconds']:.0f} s", ""),
        ("memory, of it kept free", f"{_gb(found['budget'])}, {_gb(found['headroom'])}", ""),
        (
            "experts on disk, memory for them",
            f"{_gb(found['offloaded'])}, {_gb(found['experts_memory'])}",
            "",
        ),
        (
            "writing to as much new memory, before",
            f"{_gb(found['touched']['bytes'])} in {found['touched']['seconds']:.1f} s",
            "",
        ),
        ("loading", f"{found['load_seconds']:.1f} s", ""),
        (f"prompt of {SHORT}, a token", f"{first['seconds']:.1f} s, {_gb(first['read_bytes'])} read", ""),
        ("tokens a second", f"{decode['tokens_per_second']:.3f}", f"{forecast['tokens_per_second']:.3f}"),
        ("hits among experts", _percent(decode["hit_rate"]), _percent(forecast["hit_rate"])),
        ("bytes read over bytes of missed experts", f"{over:.3f}", ""),
        (
            "rate while misses are read",
            f"{rate / 1e9:.3f} GB/s, {_percent(rate / drive)}",
            f"{drive / 1e9:.3f} GB/s",
        ),
        (
            f"prompt of {prompt['tokens']} tokens",
            f"{prompt['seconds']:.1f} s, {_gb(prompt['read_bytes'])} read",
            "",
        ),
        (
            f"a step of LoRA, rank {training['rank']}, {training['tokens']} tokens, {what}",
            f"{seconds:.1f} s, {_gb(read)} read",
            f"{_gb(training['expert_bytes'])}",
        ),
        ("losses of the steps", ", ".join(f"{each['loss']:.3f}" for each in steps), ""),
        ("peak after loading, tokens, prompt, training", peaks, _gb(found["budget"])),
        (
            "adapter, loading it and the model",
            f"{_gb(found['adapter_bytes'])}, {found['reload_seconds']:.1f} s",
            "",
        ),
        ("logits then", "equal" if found["reloaded_is_equal"] else "DIFFERENT", ""),
    ]
    judged = []
    for target, (figure, met) in judge(found).items():
        both = zip(("least", "most"), TARGETS[target], strict=True)
        bounds = ", ".join(f"at {word} {bound:g}" for word, bound in both if bound is not None)
        given = "nothing was read" if figure is None else f"{figure:.3f}"
        judged.append(f"- {target.replace('_', ' ')}: {given}, {bounds}: {'met' if met else 'MISSED'}")
    writer = "llm-compressor" if weights == W4A16 else "`llamoe quantize`"
    lines = [
        f"# {name} in {weights}, on one machine",
        "",
        f"Shape, names and files are the published model's as {writer} writes them; the numbers are drawn, so that "
        "routing is close to even, and nothing is said of answers.",
        "",
        "| | measured | the plan |",
        "|---|---|---|",
        *(f"| {what} | {figure} | {planned} |" for what, figure, planned in rows),
        "",
        "Targets:",
        "",
        *judged,
        "",
        f"`{about['command']}`: {about_line(about)}",
        "",
    ]
    return "\n".join(lines)


def _gb(size: float | None) -> str:
    return "—" if size is None else f"{size / 1e9:.2f} GB"


def _percent(share: float | None) -> str:
    return "—" if share is None else f"{share:.0%}"


def measure(
    config: LlamoeBaseConfig, weights: str, parent: Path, **given: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a model's folder in `parent`, run it in a new process, and remove it.

    Return the figures of writing and of running; `given` are arguments of `run`.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as name:
        written = write(config, Path(name) / "model", weights)
        folder = str(Path(name) / "model")
        forget(Path(folder))
        time.sleep(SETTLING)
        found = in_process("published_sizes", "rates", folder=folder)
        if "failed" not in found:
            found = in_process("published_sizes", "run", folder=folder, given=found, **given)
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return written, found


def main() -> int:
    """Measure a preset from the command line, and write the results."""
    made = argparse.ArgumentParser(
        "python -m benchmarks.published_sizes", description=__doc__.partition("\n")[0]
    )
    made.add_argument("--preset", default="mixtral-8x7b", help="model; default: %(default)s")
    made.add_argument("--weights", default="int4:128", help="format of the weights; default: %(default)s")
    made.add_argument("--ram", default="12GB", help="memory that the model may use; default: %(default)s")
    made.add_argument(
        "--headroom", default="1GB", help="part of --ram that the plan keeps free; default: %(default)s"
    )
    made.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where the model is written, on the drive to measure",
    )
    options = made.parse_args()
    given = dict(
        ram=options.ram, headroom=options.headroom, tokens=NEW_TOKENS, prompt=LONG, row=ROW, steps=STEPS
    )
    written, found = measure(llamoe.preset(options.preset), options.weights, options.folder, **given)
    words = ["python -m benchmarks.published_sizes", *sys.argv[1:]]
    about = {**describe(torch.device("cpu")), "command": " ".join(words)}
    results = {
        "about": about,
        "preset": options.preset,
        "weights": options.weights,
        "written": written,
        "found": found,
    }
    name = f"{options.preset}-{options.weights.replace(':', '-')}"
    (RESULTS / f"published_sizes_{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    text = page(about, options.preset, options.weights, written, found)
    (RESULTS / f"published_sizes_{name}.md").write_text(text)
    print(text)
    return sum(not met for _, met in judge(found).values())


if __name__ == "__main__":
    sys.exit(main())
