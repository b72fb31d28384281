"""Bandwidths of memories and links, measured here or assumed from data sheets."""

import math
import mmap
import os
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from ..configuration.sizes import bytes_of
from ..modeling.offload.memory import open_direct, pages

_PIECE, _READERS = 8 << 20, 8
# Most bytes of the largest file that are read.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Bandwidths:
    """Bandwidths in bytes per second, as numbers or texts like "80GB"; the defaults are assumed.

    Attributes:
        gpu: an accelerator's own memory. 2.0 TB: the data sheet of an A100 with 80 GB; an H100 SXM has 3.35.
        link: from RAM to an accelerator. 25 GB: what copies reach of 31.5 over 16 lanes of PCIe 4.
        ram: the CPU's memory. 80 GB: two channels of DDR5-5600 have 89.6.
        drive: 6 GB: an NVMe drive on PCIe 4, with many requests at once.
    """

    gpu: float | str = 2.0e12
    link: float | str = 25e9
    ram: float | str = 80e9
    drive: float | str = 6e9

    def __post_init__(self):
        """Turn texts into numbers.

        Raises:
            ValueError: a value is no size, or not above 0.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            whole = round(value) if isinstance(value, float) and math.isfinite(value) else value
            object.__setattr__(self, field.name, float(bytes_of(f"Bandwidths.{field.name}", whole, least=1)))


def measure_bandwidths(folder: str | os.PathLike | None = None) -> Bandwidths:
    """Measure how fast the CPU reads its memory and, where a folder is given, how fast its drive is read.

    It takes about two seconds. The drive is read past the system's page cache where that can be. All else keeps the
    defaults of `Bandwidths`: give what your accelerator has by `dataclasses.replace`.

    Args:
        folder: with large files, such as a checkpoint's.

    Raises:
        ValueError: the folder has no file of 1 MB or more.
    """
    drive = {} if folder is None else {"drive": _drive(Path(folder))}
    # A matrix-vector product reads memory as decoding does; the matrix exceeds every cache.
    matrix, vector = torch.ones(16384, 8192), torch.ones(8192)
    seconds = min(timeit.repeat(lambda: torch.mv(matrix, vector), number=1, repeat=5))
    return Bandwidths(**drive, ram=matrix.nbytes / seconds)


def _drive(folder: Path) -> float:
    """Measure bytes per second of the folder's largest file, read by threads in large pieces."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    largest = max(sizes, key=sizes.__getitem__, default=folder)
    size = min(sizes.get(largest, 0), _MOST_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    if size < 1e6:
        raise ValueError(f"{folder}: has no file of 1 MB or more, by which its drive could be measured.")
    file = open_direct(str(largest))
    if file is None:
        file = os.open(largest, os.O_RDONLY)

    def read(first: int) -> int:
        # Each thread reuses one buffer: new pages would take as long as the drive.
        memory = pages(_PIECE)
        begins = range(first, size, _READERS * _PIECE)
        return sum(os.preadv(file, [memory[: size - begin]], begin) for begin in begins)

    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        with ThreadPoolExecutor(_READERS) as pool:
            begun = time.perf_counter()
            count = sum(pool.map(read, range(0, _READERS * _PIECE, _PIECE)))
            return count / (time.perf_counter() - begun)
    finally:
        os.close(file)
