"""A mixture that is larger than its process's memory: its answer beside that of the same one mapped with all memory.

    python -m benchmarks.elsewhere_large --folder /tmp/large     # writes 13.4 GB there, and removes them

Two processes generate greedily from one prompt: one with experts on disk, one whose weights are mapped, which takes
what memory there is. The tokens must be equal. The first one's peak (mapped pages of files are in it) and what the
page cache has of the checkpoint when it ends must together stay below the limit; what is in both counts twice. The
kernel is not asked to hold it to that: a control group can, around the command.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

import llamoe
from llamoe.modeling.elsewhere import ExpertsStatistics

from .command_line import RESULTS, command
from .elsewhere import bytes_read
from .hardware import describe
from .large_mixtures import LargeMixture, forget
from .loading import Watch, status

PROMPT = 16
"""Tokens of the prompt."""


def parse() -> argparse.Namespace:
    """Read the command line; refuse what cannot be measured before anything is written."""
    made = argparse.ArgumentParser(
        "python -m benchmarks.elsewhere_large", description=__doc__.partition("\n")[0]
    )
    made.add_argument(
        "--folder", type=Path, required=True, help="for the checkpoint; made, and removed at the end"
    )
    made.add_argument(
        "--layers", type=int, default=16, help="of 64 experts of 12.6 MB (default: %(default)s)"
    )
    made.add_argument(
        "--limit", type=float, default=6, help="GB for all of the process (default: %(default)s)"
    )
    made.add_argument(
        "--experts", type=float, default=4.0, help="GB of them for experts (default: %(default)s)"
    )
    made.add_argument("--tokens", type=int, default=32, help="to generate (default: %(default)s)")
    made.add_argument(
        "--output", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)"
    )
    made.add_argument("--child", choices=("disk", "mapped"), help=argparse.SUPPRESS)
    given = made.parse_args()
    if given.child is None:
        if given.folder.exists():
            made.error(f"--folder must not exist yet, and {given.folder} does")
        if shutil.which("fincore") is None:
            made.error("fincore of util-linux is needed, which tells what is in the page cache")
        needed, free = (
            mixture_of(given).all_bytes * 1.1,
            shutil.disk_usage(next(each for each in given.folder.absolute().parents if each.is_dir())).free,
        )
        if free < needed:
            made.error(
                f"{given.folder} needs {needed / 1e9:.1f} GB, and the drive has {free / 1e9:.1f} GB free"
            )
    return given


def mixture_of(given: argparse.Namespace) -> LargeMixture:
    """The mixture: 16 layers have 12.9 GB of experts."""
    return LargeMixture(hidden=1024, expert=2048, layers=given.layers, experts=64)


@torch.no_grad()
def child(given: argparse.Namespace) -> dict:
    """Load and generate in this process."""
    torch.set_num_threads(1)
    elsewhere = {"device_map": {"experts": "disk"}, "experts_memory": int(given.experts * 1e9)}
    begun, watched = time.perf_counter(), Watch()
    model = llamoe.LlamoeForCausalLM.from_pretrained(
        given.folder, dtype="auto", **(elsewhere if given.child == "disk" else {})
    ).eval()
    loaded = time.perf_counter() - begun
    ids = torch.randint(3, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(3))
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0)
    at, begun = bytes_read(), time.perf_counter()
    model.generate(ids, max_new_tokens=1, **options)
    first = time.perf_counter() - begun
    model.experts_statistics(reset=True)
    from_first, begun = bytes_read(), time.perf_counter()
    tokens = model.generate(ids, max_new_tokens=given.tokens, **options)[0, PROMPT:].tolist()
    seconds = time.perf_counter() - begun
    found = sum(model.experts_statistics().values(), ExpertsStatistics())
    return {
        "tokens": tokens,
        "load_seconds": loaded,
        "first_seconds": first,
        "seconds": seconds,
        "read_bytes_first": from_first - at,
        "read_bytes": bytes_read() - from_first,
        "hit_rate": found.hit_rate if given.child == "disk" else None,
        "waited_seconds": found.seconds,
        "peak_bytes": status("VmHWM"),
        "anonymous_bytes": watched.stop(),
    }


def run(given: argparse.Namespace, which: str) -> dict:
    """The child in a new process, with nothing of the checkpoint in the page cache before, and what is in it behind."""
    forget(given.folder)
    words = ["--folder", str(given.folder), "--experts", str(given.experts), "--tokens", str(given.tokens)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.elsewhere_large", *words, "--child", which],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    files = [str(path) for path in given.folder.glob("*.safetensors")]
    cached = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", *files],
        capture_output=True,
        text=True,
        check=True,
    )
    return {**json.loads(done.stdout.splitlines()[-1]), "cached_bytes": sum(map(int, cached.stdout.split()))}


def page(about: dict, mixture: LargeMixture, given: argparse.Namespace, found: dict[str, dict]) -> str:
    """The results as a Markdown page."""
    rows = {
        "loading, s": lambda row: f"{row['load_seconds']:.2f}",
        f"prompt of {PROMPT} tokens and the first new one, s": lambda row: f"{row['first_seconds']:.2f}",
        f"then the prompt again and {given.tokens} new tokens, s": lambda row: f"{row['seconds']:.2f}",
        "new tokens a second of that": lambda row: f"{given.tokens / row['seconds']:.1f}",
        "hits among experts asked for in that": lambda row: (
            "—" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}"
        ),
        "GB read for the first token": lambda row: f"{row['read_bytes_first'] / 1e9:.2f}",
        "GB read in that": lambda row: f"{row['read_bytes'] / 1e9:.2f}",
        "peak of the process, GB": lambda row: f"{row['peak_bytes'] / 1e9:.2f}",
        "of it without mapped files, GB": lambda row: f"{row['anonymous_bytes'] / 1e9:.2f}",
        "GB of the checkpoint in the page cache at the end": lambda row: f"{row['cached_bytes'] / 1e9:.2f}",
    }
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    names = {"disk": f"on disk, {given.experts:g} GB for experts", "mapped": "mapped"}
    return "\n".join(
        [
            "# A mixture larger than its memory",
            "",
            f"{mixture.layers} layers with {mixture.experts} experts of {mixture.expert_bytes / 1e6:.1f} MB, one of "
            f"them for a token: {mixture.all_bytes / 1e9:.1f} GB of experts in bfloat16, random weights, routed by the "
            f"random routers. At most {given.limit:g} GB for all of the process with experts on disk: its peak, and "
            "what the page cache has of the files, are measured and judged; no control group held it to that. The "
            "other process maps the files and had all of the machine's memory. One thread; greedy; both gave the same "
            "tokens.",
            "",
            f"| | {' | '.join(names.values())} |",
            "|---|---|---|",
            *(
                f"| {what} | {' | '.join(cell(found[which]) for which in names)} |"
                for what, cell in rows.items()
            ),
            "",
            f"`{about['command']}`: {about['date']} at {about['commit']}, {about['processor']}, one of "
            f"{about['processors']} processors, {about['system']}, Python {about['python']}, {versions}",
            "",
        ]
    )


def main() -> int:
    """Write the checkpoint, run both, judge and write what they gave."""
    given = parse()
    if given.child:
        print(json.dumps(child(given)))
        return 0
    mixture = mixture_of(given)
    given.folder.mkdir(parents=True)
    try:
        mixture.save(given.folder)
        found = {which: run(given, which) for which in ("disk", "mapped")}
    finally:
        shutil.rmtree(given.folder)
    asked = {
        "--experts": given.experts,
        "--tokens": given.tokens,
        "--layers": given.layers,
        "--limit": given.limit,
    }
    words = [word for name, value in asked.items() for word in (name, f"{value:g}")]
    torch.set_num_threads(1)
    about = {
        **describe(torch.device("cpu")),
        "command": command("elsewhere_large", ["--folder", "FOLDER", *words]),
    }
    for row in found.values():
        print({name: value for name, value in row.items() if name != "tokens"})
    total = found["disk"]["peak_bytes"] + found["disk"]["cached_bytes"]
    failures = []
    if found["disk"]["tokens"] != found["mapped"]["tokens"]:
        failures.append(f"the tokens differ: {[row['tokens'] for row in found.values()]}")
    if total > given.limit * 1e9:
        failures.append(f"{total / 1e9:.2f} GB were held, at most {given.limit:g} are allowed")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if not failures:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "elsewhere_large.md").write_text(page(about, mixture, given, found))
        print(f"both gave {found['disk']['tokens']}; results in {given.output / 'elsewhere_large.md'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
