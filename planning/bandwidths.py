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

# Bytes of one read, and number of threads that read at once.
_PIECE, _READERS = 8 << 20, 8
# Largest number of bytes that are read to measure a drive.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Bandwidths:
    """The bandwidths of a machine in bytes per second, as numbers or texts like "80GB"; the defaults are assumptions.

    Attributes:
        gpu: of an accelerator's own memory. Default 2.0 TB/s, that of an A100 of 80 GB; an H100 SXM has 3.35 TB/s.
        link: from RAM to an accelerator. Default 25 GB/s, which copies reach over 16 lanes of PCIe 4 (nominally 31.5).
        ram: of the CPU's memory. Default 80 GB/s; two channels of DDR5-5600 have nominally 89.6.
        drive: of the drive. Default 6 GB/s, which an NVMe drive on PCIe 4 reaches with many parallel reads.
    """

    gpu: float | str = 2.0e12
    link: float | str = 25e9
    ram: float | str = 80e9
    drive: float | str = 6e9

    def __post_init__(self):
        """Convert texts to numbers.

        Raises:
            ValueError: a value is not a positive size.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            whole = round(value) if isinstance(value, float) and math.isfinite(value) else value
            object.__setattr__(self, field.name, float(bytes_of(f"Bandwidths.{field.name}", whole, least=1)))


def measure_bandwidths(folder: str | os.PathLike | None = None) -> Bandwidths:
    """Measure the bandwidth of the CPU's memory and, if a folder is given, of the drive that the folder is on.

    The measurement takes about two seconds. Reads bypass the system's page cache if the file system allows it. The
    other bandwidths keep the defaults of `Bandwidths`: set those of your accelerator with `dataclasses.replace`.

    Args:
        folder: a folder with large files, such as a checkpoint.

    Raises:
        ValueError: the folder has no file of 1 MB or more.
    """
    drive = {} if folder is None else {"drive": _drive(Path(folder))}
    # Decoding is mostly matrix-vector products. This matrix of 512 MB is larger than any processor cache.
    matrix, vector = torch.ones(16384, 8192), torch.ones(8192)
    seconds = min(timeit.repeat(lambda: torch.mv(matrix, vector), number=1, repeat=5))
    return Bandwidths(**drive, ram=matrix.nbytes / seconds)


def _drive(folder: Path) -> float:
    """Return the bytes per second at which several threads read the folder's largest file in large pieces."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    largest = max(sizes, key=sizes.__getitem__, default=folder)
    size = min(sizes.get(largest, 0), _MOST_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    if size < 1e6:
        raise ValueError(f"{folder}: has no file of 1 MB or more, which is needed to measure the drive.")
    file = open_direct(str(largest))
    if file is None:
        file = os.open(largest, os.O_RDONLY)

    def read(first: int) -> int:
        # Each thread reuses one buffer, since allocating new pages would take as long as reading.
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
