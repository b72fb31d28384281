"""Describe the machine and its libraries, and measure the bandwidth of its memory."""

import os
import platform
import statistics
import subprocess
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

import llamoe

from .harness import Clock

PACKAGES = {
    "transformers": "transformers",
    "peft": "peft",
    "triton": "triton",
    "llama_cpp_python": "llama_cpp",
}
"""Distributions whose versions are recorded, with the names of their modules."""

HELD_TO_AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""Environment variables that `make bench CPU=avx2` sets, to measure on any machine as on one without AVX-512.

torch, oneDNN and MKL read them when they start, and our kernels follow torch. llama.cpp uses the instructions that it
was built for."""


def is_held_to_avx2() -> bool:
    """Return True if the environment limits this process to AVX2."""
    return all(os.environ.get(name) == value for name, value in HELD_TO_AVX2.items())


def kind_of_processor() -> str:
    """Return the processor's kind, which names the file of results: "avx2", "avx512", "amx", or "cpu" for any other."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    if capability == "avx512" and torch.cpu.get_capabilities().get("amx_bf16"):
        return "amx"
    return capability if capability in ("avx2", "avx512") else "cpu"


def describe(device: torch.device) -> dict:
    """Return the processor, the GPU if `device` is one, versions and date."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    about = {
        "date": date.today().isoformat(),
        "commit": commit or None,
        "processor": next(names, platform.processor() or platform.machine()),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": kind_of_processor() + (", held to it" if is_held_to_avx2() else ""),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        # torch's own version names its build, as 2.13.0+cpu.
        "versions": {"llamoe": llamoe.__version__, "torch": torch.__version__}
        | {name: version(name) for name, module in PACKAGES.items() if find_spec(module)},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "device": properties.name,
            "device_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return about


def about_line(about: dict) -> str:
    """Format what `describe` returned as one line."""
    where = about.get("device") or f"{about['processor']} ({about['instructions']})"
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        f"{about['date']} at {about['commit']}, {where}, {about['threads']} of {about['processors']} processors, "
        f"{about['system']}, Python {about['python']}, {versions}"
    )


def bytes_per_second(clock: Clock, nbytes: int) -> float:
    """Measure the bytes a second, read plus written, of copying a tensor of `nbytes`: the median of five samples."""
    # Not zeros: the system may map all their pages to a single one.
    source = torch.ones(nbytes, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * nbytes / statistics.median(clock.sample(lambda: target.copy_(source), 5) for _ in range(5))
