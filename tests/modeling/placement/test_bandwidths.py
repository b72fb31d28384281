"""Bandwidths are measured on what is there, and refused where nothing is."""

import fcntl
import os
import time

import pytest
import torch

from llamoe import Bandwidths, measure_bandwidths


def test_memory_and_drive_are_measured(tmp_path):
    size = (24 << 20) + 12345
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "weights").write_bytes(os.urandom(size))
    found = measure_bandwidths(tmp_path)
    assumed = Bandwidths()
    assert found.gpu == assumed.gpu and found.link == assumed.link
    assert 1e8 < found.ram < 1e13 and found.ram != assumed.ram
    # A sum reads its numbers once, too: a unit or a size that is wrong would be off by more than a factor of ten.
    numbers = torch.ones(1 << 26)
    begin = time.perf_counter()
    numbers.sum()
    simple = numbers.nbytes / (time.perf_counter() - begin)
    assert simple / 10 < found.ram < simple * 10
    assert 1e6 < found.drive < 1e12 and found.drive != assumed.drive
    # The read ends with the last whole page, and a limit is kept.
    assert measure_bandwidths(tmp_path, most_bytes=5 << 20).drive > 1e6


def test_an_empty_folder_has_no_drive_to_measure(tmp_path):
    with pytest.raises(ValueError, match="has no file of 1 MB or more"):
        measure_bandwidths(tmp_path)
    for wrong in (tmp_path / "missing", __file__):
        with pytest.raises(ValueError, match="is no folder; give one with large files"):
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
