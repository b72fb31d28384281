"""Test that config.json is whole at any moment, although several threads save into its folder at once."""

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.models import dense_config

MODULE = "llamoe_hub.py"


@pytest.mark.parametrize("layouts", [("llamoe",), ("llamoe", "stock")])
def test_every_reader_finds_a_whole_file(layouts, tmp_path):
    configs = {layout: dense_config() for layout in layouts}
    contents = []
    for layout, config in configs.items():
        config.save_pretrained(tmp_path / layout, layout=layout)
        contents.append((tmp_path / layout / "config.json").read_text())
    shutil.copytree(tmp_path / "llamoe", tmp_path / "shared")

    def save(number):
        layout = layouts[number % len(layouts)]
        for _ in range(8):
            configs[layout].save_pretrained(tmp_path / "shared", layout=layout)
            assert (tmp_path / "shared" / "config.json").read_text() in contents

    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(save, number) for number in range(8)]:
            future.result()
    assert {path.name for path in (tmp_path / "shared").iterdir()} <= {"config.json", MODULE}


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    config = dense_config()
    config.save_pretrained(tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}

    def fail(path, *args, **kwargs):
        with open(path, "w") as file:
            file.write("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fail)
    config.rms_norm_eps = 0.25
    with pytest.raises(OSError, match="No space"):
        config.save_pretrained(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    assert json.loads(before["config.json"])["rms_norm_eps"] != 0.25
