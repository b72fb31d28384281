"""Test that bandwidths are measured, and that a folder without a large file is refused."""

import fcntl
import itertools
import mmap
import os

import pytest

from llamoe import Bandwidths, measure_bandwidths
from llamoe.planning import bandwidths


@pytest.mark.slow
def test_memory_and_drive_are_measured(tmp_path, monkeypatch):
    """The clock advances by an eighth of a second at each call, so that bandwidths follow from the bytes read."""
    ticks = itertools.count()
    monkeypatch.setattr(bandwidths.time, "perf_counter", lambda: next(ticks) / 8)
    size = (24 << 20) + 12345
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "weights").write_bytes(os.urandom(size))
    measured, assumed = measure_bandwidths(tmp_path), Bandwidths()
    assert measured.gpu == assumed.gpu and measured.link == assumed.link
    # `timeit` measures RAM by the machine's clock.
    assert 1e8 < measured.ram < 1e13
    # Only whole pages of memory are read, and at most _MOST_BYTES.
    assert measured.drive == 8 * (size // mmap.PAGESIZE * mmap.PAGESIZE)
    monkeypatch.setattr(bandwidths, "_MOST_BYTES", 5 << 20)
    assert measure_bandwidths(tmp_path).drive == 8 * (5 << 20)


def test_without_a_large_file_no_drive_is_measured(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 10**6)
    for wrong in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="has no file of 1 MB or more"):
            measure_bandwidths(wrong)


def test_a_file_system_without_direct_reads_is_measured(tmp_path, monkeypatch):
    (tmp_path / "weights").write_bytes(os.urandom(3 << 20))
    read, refused = os.preadv, []

    def preadv(file, *arguments):
        if fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            refused.append(file)
            raise OSError(22, "Invalid argument")
        return read(file, *arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    assert measure_bandwidths(tmp_path).drive > 1e6
    assert refused or not hasattr(os, "O_DIRECT")


def test_sizes_may_be_texts():
    assert Bandwidths(ram="80GB", link="25GiB") == Bandwidths(ram=80e9, link=25 * 2**30)
    assert Bandwidths(ram=1e12 / 3).ram == round(1e12 / 3)
    for wrong in (0, -1, float("inf"), "infGB", "80gb", "fast", None, True):
        with pytest.raises(ValueError, match=r"Bandwidths.drive="):
            Bandwidths(drive=wrong)
