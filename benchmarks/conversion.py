"""Memory and speed of conversions, on a synthetic mixture with large stacks of experts.

    python benchmarks/conversion.py --folder /fast/disk

Each conversion runs in a process of its own, in turn with a plain copy of the source (`cp`, flushed to the disk). Its
memory is the process's peak above its memory after the imports and a first small conversion. The limit is 1 GiB and
three times the largest matrix: one expert, or the embedding. Needs four times the checkpoint's size on the disk.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

import llamoe
from llamoe.conversion import Checkpoint, convert
from llamoe.conversion.checkpoint import expected_shapes
from llamoe.conversion.hf import save_hf
from llamoe.conversion.io.lazy_tensor import LazyTensor
from llamoe.conversion.options import WriteOptions

RESULTS = Path(__file__).parent / "results"
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


def text_config(layers: int, experts: int, hidden: int, inner: int) -> llamoe.LlamoeTextConfig:
    """Configuration of a Llama 4 decoder whose weights are mostly experts."""
    return llamoe.LlamoeTextConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=inner,
        intermediate_size_mlp=2 * inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=experts,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=None,
        eos_token_id=None,
    )


def make(config: llamoe.LlamoeTextConfig, folder: Path, shard_size: str = "1GB") -> Checkpoint:
    """Write a checkpoint of noise."""
    tensors = {name: Noise(shape, torch.bfloat16, name) for name, shape in expected_shapes(config).items()}
    checkpoint = Checkpoint(folder, "hf", config, tensors)
    save_hf(checkpoint, folder, WriteOptions(shard_size=shard_size))
    return checkpoint


def peak_bytes() -> int:
    """Peak memory of this process, pages of files included."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def measure(source: str, target: str, small: str, options: str) -> None:
    """Convert in this process; print seconds and bytes above the base."""
    with tempfile.TemporaryDirectory() as folder:
        # The first conversion pays for imports, threads and the allocator.
        convert(small, Path(folder) / "first", **json.loads(options))
    base = peak_bytes()
    begun = time.perf_counter()
    convert(source, target, **json.loads(options))
    print(json.dumps([time.perf_counter() - begun, peak_bytes() - base]))


def copy(source: str, target: str) -> None:
    """Copy a folder with the system's command and flush it to the disk; print seconds."""
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    for path in Path(target).iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    print(json.dumps([time.perf_counter() - begun, 0]))


def run(*words: str) -> tuple[float, int]:
    """Run a function of this file in a new process."""
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds, nbytes = json.loads(done.stdout.splitlines()[-1])
    return seconds, nbytes


def main() -> None:
    """Create the checkpoint, alternate conversions and copies, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default a temporary folder")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        config = text_config(options.layers, options.experts, 1024, 2048)
        sources = {"hf": work / "hf", "meta": work / "meta"}
        small = {"hf": work / "small", "meta": work / "small-meta"}
        checkpoint = make(config, sources["hf"])
        make(text_config(2, 2, 512, 256), small["hf"])
        for folders in (sources, small):
            convert(folders["hf"], folders["meta"], to="meta", shards=8)
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        stack = max(tensor.nbytes for tensor in checkpoint.tensors.values())
        matrix = max(
            tensor.nbytes // (tensor.shape[0] if tensor.ndim > 2 else 1)
            for tensor in checkpoint.tensors.values()
        )
        limit = 2**30 + 3 * matrix
        rows = []
        for case, (kind, words) in CASES.items():
            seconds, peaks, copies, ratios = [], [], [], []
            for _ in range(options.rounds):
                copied, _ = run("copy", str(sources[kind]), str(work / "out"))
                shutil.rmtree(work / "out")
                taken, peak = run(
                    "measure", str(sources[kind]), str(work / "out"), str(small[kind]), json.dumps(words)
                )
                shutil.rmtree(work / "out")
                seconds.append(taken)
                copies.append(copied)
                peaks.append(peak)
                ratios.append(copied / taken)
            rows.append(
                {
                    "case": case,
                    "seconds": statistics.median(seconds),
                    "copy_seconds": statistics.median(copies),
                    "speed_against_copy": statistics.median(ratios),
                    "speed_range": [min(ratios), max(ratios)],
                    "peak_bytes": max(peaks),
                }
            )
            print(rows[-1], flush=True)
    result = {
        "date": date.today().isoformat(),
        "command": f"python benchmarks/conversion.py --layers {options.layers} --experts {options.experts} "
        f"--rounds {options.rounds}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processors": torch.get_num_threads(),
        "bytes": size,
        "largest_stack_bytes": stack,
        "largest_matrix_bytes": matrix,
        "limit_bytes": limit,
        "cases": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "conversion.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "conversion.md").write_text(describe(result))


def describe(result: dict) -> str:
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
    lines += [
        "",
        f"{result['date']}, Python {result['python']}, torch {result['torch']}, {result['processors']} cores: "
        f"`{result['command']}`",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(*sys.argv[2:])
    elif sys.argv[1:2] == ["copy"]:
        copy(*sys.argv[2:])
    else:
        main()
