"""A mixture that is larger than its process's memory: its answer beside that of the same one mapped with all memory.

    python -m benchmarks.offload_large     # writes 13.4 GB to the folder for temporary files, and removes them

Two processes generate greedily from one prompt: one with experts on disk, one whose weights are mapped, which takes
what memory there is. The tokens must be equal. The first one's peak (mapped pages of files are in it) and what the
page cache has of the checkpoint when it ends must together stay below the limit; what is in both counts twice. The
kernel is not asked to hold it to that: a control group can, around the command. Needs fincore of util-linux.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import llamoe

from .command_line import RESULTS
from .hardware import describe
from .large_mixtures import LargeMixture, counted
from .processes import Watch, bytes_read, forget, in_process, status

# 12.9 GB of experts of 12.6 MB.
MIXTURE = LargeMixture(hidden=1024, expert=2048, layers=16, experts=64)
LIMIT = 6.0
"""GB for all of the process with experts on disk."""
EXPERTS = 4.0
"""GB of them for experts."""
PROMPT, TOKENS = 16, 32


@torch.no_grad()
def generate(folder: str, gigabytes: float | None) -> dict:
    """Load and generate in this process, with so much memory for experts; without a number all weights are mapped."""
    torch.set_num_threads(1)
    where = (
        {}
        if gigabytes is None
        else {"device_map": {"experts": "disk"}, "experts_memory": int(gigabytes * 1e9)}
    )
    begun, watched = time.perf_counter(), Watch()
    model = llamoe.LlamoeForCausalLM.from_pretrained(folder, dtype="auto", **where).eval()
    loaded = time.perf_counter() - begun
    ids = torch.randint(3, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(3))
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0)
    at, begun = bytes_read(), time.perf_counter()
    model.generate(ids, max_new_tokens=1, **options)
    first = time.perf_counter() - begun
    model.experts_statistics(reset=True)
    from_first, begun = bytes_read(), time.perf_counter()
    tokens = model.generate(ids, max_new_tokens=TOKENS, **options)[0, PROMPT:].tolist()
    seconds = time.perf_counter() - begun
    hits, misses = counted(model, "hits"), counted(model, "misses")
    return {
        "tokens": tokens,
        "load_seconds": loaded,
        "first_seconds": first,
        "seconds": seconds,
        "read_bytes_first": from_first - at,
        "read_bytes": bytes_read() - from_first,
        "hits": "—" if gigabytes is None else f"{hits / (hits + misses):.1%}",
        "peak_bytes": status("VmHWM"),
        "anonymous_bytes": watched.stop(),
    }


def run(folder: Path, gigabytes: float | None) -> dict:
    """`generate` in a new process, with nothing of the folder in the page cache before, and what is in it behind."""
    forget(folder)
    found = in_process("offload_large", "generate", folder=str(folder), gigabytes=gigabytes)
    if "skipped" in found:
        raise RuntimeError(found["skipped"])
    words = ["fincore", "--bytes", "--noheadings", "--output", "RES", *folder.glob("*.safetensors")]
    cached = subprocess.run(words, capture_output=True, text=True, check=True)
    return found | {"cached_bytes": sum(map(int, cached.stdout.split()))}


def page(about: dict, mixture: LargeMixture, found: dict[str, dict]) -> str:
    """The results as a Markdown page."""
    rows = {
        "loading, s": lambda row: f"{row['load_seconds']:.2f}",
        f"prompt of {PROMPT} tokens and the first new one, s": lambda row: f"{row['first_seconds']:.2f}",
        f"then the prompt again and {TOKENS} new tokens, s": lambda row: f"{row['seconds']:.2f}",
        "new tokens a second of that": lambda row: f"{TOKENS / row['seconds']:.1f}",
        "hits among experts asked for in that": lambda row: row["hits"],
        "GB read for the first token": lambda row: f"{row['read_bytes_first'] / 1e9:.2f}",
        "GB read in that": lambda row: f"{row['read_bytes'] / 1e9:.2f}",
        "peak of the process, GB": lambda row: f"{row['peak_bytes'] / 1e9:.2f}",
        "of it without mapped files, GB": lambda row: f"{row['anonymous_bytes'] / 1e9:.2f}",
        "GB of the checkpoint in the page cache at the end": lambda row: f"{row['cached_bytes'] / 1e9:.2f}",
    }
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        "# A mixture larger than its memory",
        "",
        f"{mixture.layers} layers with {mixture.experts} experts of {mixture.expert_bytes / 1e6:.1f} MB, one of them "
        f"for a token: {mixture.all_bytes / 1e9:.1f} GB of experts in bfloat16, random weights, routed by the random "
        f"routers. At most {LIMIT:g} GB for all of the process with experts on disk: its peak, and what the page cache "
        "has of the files, are measured and judged; no control group held it to that. The other process maps the files "
        "and had all of the machine's memory. One thread; greedy; both gave the same tokens.",
        "",
        f"| | on disk, {EXPERTS:g} GB for experts | mapped |",
        "|---|---|---|",
        *(f"| {what} | {cell(found['disk'])} | {cell(found['mapped'])} |" for what, cell in rows.items()),
        "",
        f"`python -m benchmarks.offload_large`: {about['date']} at {about['commit']}, {about['processor']}, one of "
        f"{about['processors']} processors, {about['system']}, Python {about['python']}, {versions}",
        "",
    ]
    return "\n".join(lines)


def main(mixture: LargeMixture = MIXTURE, output: Path = RESULTS) -> int:
    """Write the checkpoint, run both, judge and write what they gave."""
    with tempfile.TemporaryDirectory() as name:
        mixture.save(Path(name))
        found = {which: run(Path(name), room) for which, room in {"disk": EXPERTS, "mapped": None}.items()}
    failures = []
    if found["disk"]["tokens"] != found["mapped"]["tokens"]:
        failures.append(f"the tokens differ: {[row['tokens'] for row in found.values()]}")
    total = (found["disk"]["peak_bytes"] + found["disk"]["cached_bytes"]) / 1e9
    if total > LIMIT:
        failures.append(f"{total:.2f} GB were held, at most {LIMIT:g} are allowed")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    text = page(describe(torch.device("cpu")), mixture, found)
    print(text)
    if not failures:
        (output / "offload_large.md").write_text(text)
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
