"""Machine, versions, and the two measured rates behind the roofline."""

import os
import platform
import statistics
import subprocess
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

import llamoe

from .clocks import Clock
from .held import is_held

PACKAGES = {name: name for name in ("transformers", "triton", "safetensors")} | {
    "llama_cpp_python": "llama_cpp"
}
"""Distribution to module."""


@dataclass(frozen=True)
class Rates:
    """Measured rates of the machine, which bound every case's time from below.

    Attributes:
        bytes_per_second: of a copy of one large tensor, reads and writes counted.
        flops_per_second: of a product of two large square matrices; a multiplication and an addition are two.
    """

    bytes_per_second: float
    flops_per_second: float

    def ideal_seconds(self, nbytes: float, flops: float) -> tuple[float, str]:
        """The least time that a case needs at these rates, and which rate bounds it."""
        times = {"memory": nbytes / self.bytes_per_second, "compute": flops / self.flops_per_second}
        bound = max(times, key=times.__getitem__)
        return times[bound], bound


def measure_rates(clock: Clock, dtype: torch.dtype, rounds: int = 7, side: int = 0, nbytes: int = 0) -> Rates:
    """Measure both rates, as medians.

    Args:
        clock: clock to measure with.
        dtype: dtype of the matrices.
        rounds: number of samples.
        side: rows of the matrices; by default 2048 on a CPU, 8192 on CUDA.
        nbytes: size of the copied tensor; by default 256 MiB on a CPU, 4 GiB on CUDA.
    """
    on_cuda = clock.device.type == "cuda"
    side = side or (8192 if on_cuda else 2048)
    # Ones, since fresh zeros may all map to a single page of the system.
    source = torch.ones(nbytes or (2**32 if on_cuda else 2**28), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    repeats = 10 if on_cuda else 1

    def median(run) -> float:
        run()
        return statistics.median(clock.sample(run, repeats) for _ in range(rounds))

    copied = median(lambda: target.copy_(source))
    multiplied = median(lambda: a @ b)
    return Rates(2 * source.nbytes / copied, 2 * side**3 / multiplied)


def told_instructions() -> str:
    """The vectors that torch and our kernels use here, and whether the processor has more."""
    can = torch.cpu.get_capabilities()
    more = ["bfloat16"] * bool(can.get("avx512_bf16")) + ["AMX"] * bool(can.get("amx_bf16"))
    told = torch.backends.cpu.get_cpu_capability()
    if kind := is_held():
        return f"{told}, held to {kind}"
    return f"{told} with {' and '.join(more)}" if more else told


def describe(device: torch.device) -> dict:
    """Machine, versions and date for the results."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    versions = {name: version(name) for name, module in PACKAGES.items() if find_spec(module)}
    about = {
        "date": date.today().isoformat(),
        "commit": done.stdout.strip() or None,
        "processor": next(names, platform.processor() or platform.machine()),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": told_instructions(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        # torch's own version names the kind of build.
        "versions": {"llamoe": llamoe.__version__, "torch": torch.__version__, **versions},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "device": properties.name,
            "device_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return about
