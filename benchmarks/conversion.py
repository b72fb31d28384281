"""Memory and speed of conversions, on a synthetic mixture with large stacks of experts.

    python -m benchmarks.conversion

Each conversion runs in a process of its own, in turn with a plain copy of the source (`cp`, flushed to the disk). Its
memory is the process's peak above its memory after the imports and a first small conversion. The limit is 1 GiB and
three times the largest matrix: one expert, or the embedding. Needs four times the checkpoint's size in the folder for
temporary files.
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from llamoe.conversion import Checkpoint, convert
from llamoe.conversion.checkpoint import expected_shapes
from llamoe.conversion.hf import save_hf
from llamoe.conversion.io import WriteOptions
from llamoe.conversion.io.lazy_tensor import LazyTensor

from .command_line import RESULTS
from .hardware import describe
from .large_mixtures import LargeMixture
from .processes import in_process, status

MIXTURE, SMALL = LargeMixture(1024, 2048, 6, 64, 32000), LargeMixture(512, 256, 2, 2, 32000)
ROUNDS = 5
GB = 10**9
CASES = {
    "hf to hf, larger files": ("hf", {"shard_size": "3GB"}),
    "hf to hf, float16": ("hf", {"dtype": "float16"}),
    "hf to hf, one linear layer an expert": ("hf", {"experts": "split"}),
    "hf to Meta, 8 files": ("hf", {"to": "meta", "shards": 8}),
    "Meta of 8 files to hf": ("meta", {}),
}


class Noise(LazyTensor):
    """Random elements, drawn when they are written."""

    def _read(self, start, stop):
        return torch.rand((stop - start, *self.shape[1:])).sub_(0.5).to(self.dtype)


def make(mixture: LargeMixture, folder: Path) -> list[LazyTensor]:
    """Write a checkpoint of noise to `hf` in a folder, and Meta's of it to `meta`."""
    config = mixture.config()
    # As many as files of Meta's, which share them.
    config.num_key_value_heads = 8
    tensors = {name: Noise(shape, torch.bfloat16, name) for name, shape in expected_shapes(config).items()}
    options = WriteOptions(shard_size="1GB")
    save_hf(Checkpoint(folder / "hf", "hf", config, tensors), folder / "hf", options)
    convert(folder / "hf", folder / "meta", to="meta", shards=8)
    return list(tensors.values())


def measure(source: str, target: str, small: str, options: dict) -> dict:
    """Seconds of a conversion in this process, and its peak above the base."""
    with tempfile.TemporaryDirectory(dir=Path(target).parent) as first:
        convert(small, Path(first) / "out", **options)
    base, begun = status("VmHWM"), time.perf_counter()
    convert(source, target, **options)
    return {"seconds": time.perf_counter() - begun, "peak_bytes": status("VmHWM") - base}


def copy(source: Path, target: Path) -> float:
    """Seconds of a plain copy, flushed to the disk."""
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - begun


def main(
    mixture: LargeMixture = MIXTURE, small: LargeMixture = SMALL, rounds: int = ROUNDS, output=RESULTS
) -> None:
    """Create the checkpoints, alternate conversions and copies, write the results."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        tensors = make(mixture, work)
        make(small, work / "small")
        rows = []
        for case, (kind, options) in CASES.items():
            runs, copies = [], []
            for _ in range(rounds):
                copies.append(copy(work / kind, work / "out"))
                shutil.rmtree(work / "out")
                paths = {"source": work / kind, "target": work / "out", "small": work / "small" / kind}
                given = {what: str(path) for what, path in paths.items()}
                runs.append(in_process("conversion", "measure", options=options, **given))
                shutil.rmtree(work / "out")
            ratios = [copied / run["seconds"] for copied, run in zip(copies, runs, strict=True)]
            rows.append(
                {
                    "case": case,
                    "seconds": statistics.median(run["seconds"] for run in runs),
                    "copy_seconds": statistics.median(copies),
                    "speed_against_copy": statistics.median(ratios),
                    "speed_range": [min(ratios), max(ratios)],
                    "peak_bytes": max(run["peak_bytes"] for run in runs),
                }
            )
            print(rows[-1], flush=True)
    about = describe(torch.device("cpu"))
    result = {
        **{name: about[name] for name in ("date", "python", "processors")},
        "command": "python -m benchmarks.conversion",
        "torch": about["versions"]["torch"],
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "largest_stack_bytes": max(tensor.nbytes for tensor in tensors),
        "largest_matrix_bytes": max(
            tensor.nbytes // (tensor.shape[0] if tensor.ndim > 2 else 1) for tensor in tensors
        ),
        "cases": rows,
    }
    result["limit_bytes"] = 2**30 + 3 * result["largest_matrix_bytes"]
    output.mkdir(exist_ok=True)
    (output / "conversion.json").write_text(json.dumps(result, indent=2) + "\n")
    (output / "conversion.md").write_text(page(result))


def page(result: dict) -> str:
    """The results as a Markdown page."""
    lines = [
        "# Conversions: memory and speed",
        "",
        f"A mixture of {result['bytes'] / GB:.2f} GB in bfloat16, largest stack "
        f"{result['largest_stack_bytes'] / GB:.2f} GB, largest matrix {result['largest_matrix_bytes'] / GB:.3f} GB. "
        f"Limit of memory: 1 GiB + 3 matrices = {result['limit_bytes'] / GB:.2f} GB above the process's base. Speed is "
        "the time of a plain copy of the source, flushed to the disk, over the conversion's: median of the rounds, and "
        "their range.",
        "",
        "| conversion | seconds | copy, seconds | speed against copy | peak above base, GB |",
        "|---|---|---|---|---|",
    ]
    for row in result["cases"]:
        low, high = row["speed_range"]
        lines.append(
            f"| {row['case']} | {row['seconds']:.2f} | {row['copy_seconds']:.2f} | "
            f"{row['speed_against_copy']:.2f} ({low:.2f}–{high:.2f}) | {row['peak_bytes'] / GB:.3f} |"
        )
    about = (
        f"{result['date']}, Python {result['python']}, torch {result['torch']}, {result['processors']} cores"
    )
    return "\n".join([*lines, "", f"{about}: `{result['command']}`", ""])


if __name__ == "__main__":
    main()
