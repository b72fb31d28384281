"""Bandwidths are measured on what is there, and refused where nothing is."""

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
    # No machine's memory is slower than a tenth of this simple sum, or ten times faster.
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


def test_sizes_may_be_texts():
    assert Bandwidths(ram="80GB", link="25GiB") == Bandwidths(ram=80e9, link=25 * 2**30)
    for wrong in (0, -1, float("inf"), "fast", None, True):
        with pytest.raises(ValueError, match=r"Bandwidths.drive="):
            Bandwidths(drive=wrong)
