"""Sources that somebody changes while they are converted: nothing is published that was read from two versions."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.conversions import META_LLAMA_2, sums
from support.progress import Progress
from support.towers import open_clip_config, open_clip_tower, randomize, visual_state, write_open_clip

from llamoe.conversion import assemble, checkpoint, convert, convert_vision, merge_kv_heads, upcycle
from llamoe.conversion.hf import folder as folder_of_hf
from llamoe.conversion.io import write_checkpoint

pytestmark = pytest.mark.slow

CASE = replace(META_LLAMA_2, params={**META_LLAMA_2.params, "n_layers": 2})
SHARDED = {"shard_size": "60KB"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    CASE.write(folder / "meta", CASE.weights(torch.bfloat16), 2)
    convert(folder / "meta", folder / "hf", shard_size="200KB")
    write_open_clip(folder / "tower", visual_state(randomize(open_clip_tower())), open_clip_config())
    return folder


@pytest.fixture
def given(originals, tmp_path):
    """A copy of all sources that a test may spoil."""
    return shutil.copytree(originals, tmp_path / "given")


WRITERS = {
    "convert": (lambda given, to, **more: convert(given / "hf", to, **SHARDED, **more), "hf"),
    "convert to meta": (
        lambda given, to, **more: convert(given / "hf", to, to="meta", shards=2, **more),
        "hf",
    ),
    "convert from meta": (lambda given, to, **more: convert(given / "meta", to, **SHARDED, **more), "meta"),
    "vision": (lambda given, to, **more: convert_vision(given / "tower", to, **more), "tower"),
    "vision to clip": (
        lambda given, to, **more: convert_vision(given / "tower", to, to="clip", **more),
        "tower",
    ),
    "upcycle": (lambda given, to, **more: upcycle(given / "hf", to, experts=3, **SHARDED, **more), "hf"),
    "gqa": (lambda given, to, **more: merge_kv_heads(given / "hf", to, kv_heads=1, **SHARDED, **more), "hf"),
    "assemble": (
        lambda given, to, **more: assemble(
            given / "hf", given / "tower", to, pixel_shuffle_ratio=1.0, **SHARDED, **more
        ),
        "tower",
    ),
}
FILES = {
    "hf": (
        "model-00001-of-*.safetensors",
        "model-00002-of-*.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer_config.json",
    ),
    "meta": ("consolidated.01.pth", "params.json", "tokenizer.model"),
    "tower": ("open_clip_model.safetensors", "open_clip_config.json"),
}


def write_on(path):
    """In place, of the same size, as a file that is downloaded anew."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(status.st_size // 2)
        file.write(b"Z")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**6))


def exchange(path):
    """For another file of the same size and time."""
    status, other = path.stat(), path.with_name("other")
    shutil.copy(path, other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def lengthen(path):
    with open(path, "ab") as file:
        file.write(b" ")


CHANGES = {"written on": write_on, "exchanged": exchange, "longer": lengthen, "removed": Path.unlink}


def find(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


@pytest.mark.parametrize(
    ("kind", "pattern", "change"),
    [
        (kind, file, change)
        for kind in FILES
        for number, file in enumerate(FILES[kind])
        for place, change in enumerate(CHANGES)
        # Of each kind every change, and of each file two of them.
        if (number + place) % 2 == 0
    ],
)
def test_a_file_of_the_source_that_changes_fails_the_run_by_name(given, kind, pattern, change, tmp_path):
    """Weights, index, configuration and tokenizer; before the first byte was written and before the last."""
    write = {"hf": "convert", "meta": "convert from meta", "tower": "vision"}[kind]
    path = find(given / kind, pattern)
    aside = shutil.copytree(given / kind, tmp_path / "aside")
    for share in (0, 0.97):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: ") as caught:
            WRITERS[write][0](given, tmp_path / "to", progress=Progress(lambda: CHANGES[change](path), share))
        if change != "removed":
            assert "was changed or replaced while it was being converted" in str(caught.value) or share == 0
        assert not (tmp_path / "to").exists()
        shutil.rmtree(given / kind)
        shutil.copytree(aside, given / kind)


@pytest.mark.parametrize("writer", WRITERS)
def test_every_command_looks_at_its_sources_in_the_end(given, writer, tmp_path):
    run, kind = WRITERS[writer]
    path = find(given / kind, FILES[kind][0])
    with pytest.raises(ValueError, match=f"^{path}: was changed or replaced .*inode"):
        run(given, tmp_path / "to", progress=Progress(lambda: exchange(path), 1))
    assert not (tmp_path / "to").exists()
    run(given, tmp_path / "to")


@pytest.mark.parametrize(("kind", "pattern"), [(kind, file) for kind in FILES for file in FILES[kind]])
def test_what_changes_between_opening_and_writing_is_noticed(given, kind, pattern, tmp_path, monkeypatch):
    run = WRITERS[{"hf": "convert", "meta": "convert from meta", "tower": "vision"}[kind]][0]
    path, plain = find(given / kind, pattern), checkpoint.identify

    def identify(opened):
        exchange(path)
        return plain(opened)

    monkeypatch.setattr(checkpoint, "identify", identify)
    with pytest.raises(ValueError, match=f"^{path}: was changed"):
        run(given, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_what_changes_while_the_source_is_opened_is_noticed(given, tmp_path, monkeypatch):
    """The configuration, after it was read and before the weights were."""
    plain = folder_of_hf.find_weights

    def find_weights(folder):
        exchange(folder / "config.json")
        return plain(folder)

    monkeypatch.setattr(folder_of_hf, "find_weights", find_weights)
    with pytest.raises(ValueError, match=f"^{given / 'hf' / 'config.json'}: was changed"):
        WRITERS["convert"][0](given, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_links_are_followed_to_what_they_stand_for(given, tmp_path):
    """As in the Hub's cache: names are links to files that are called by their sums."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted((given / "hf").iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    run = WRITERS["convert"][0]
    run(given, tmp_path / "whole")
    first = find(given / "hf", FILES["hf"][0])

    def turn():
        shutil.copy2(first, blobs / "new")
        first.unlink()
        first.symlink_to(blobs / "new")

    for change in (turn, lambda: lengthen(first.resolve())):
        with pytest.raises(ValueError, match=f"^{first}: was changed"):
            run(given, tmp_path / "to", progress=Progress(change, 0.9))
        assert not (tmp_path / "to").exists()
        if change is turn:
            run(given, tmp_path / "again")
            assert sums(tmp_path / "again") == sums(tmp_path / "whole")


def test_other_files_in_the_folder_may_change(given, tmp_path):
    """A log that is written there, and the access times that reading itself changes."""
    (given / "hf" / "convert.log").write_text("begun")
    path = find(given / "hf", FILES["hf"][0])

    def go_on():
        lengthen(given / "hf" / "convert.log")
        (given / "hf" / "README.md").write_text("new")
        os.utime(path, ns=(path.stat().st_atime_ns + 10**9, path.stat().st_mtime_ns))
        os.link(path, tmp_path / "backup")

    WRITERS["convert"][0](given, tmp_path / "to", progress=Progress(go_on, 0.5))


def test_a_changed_source_does_not_go_on_with_what_was_written_of_the_old_one(given, tmp_path):
    """Neither a later run nor one in which it changes; with the old file back, the old run goes on."""
    run, target = WRITERS["convert"][0], tmp_path / "to"
    path = find(given / "hf", FILES["hf"][1])
    run(given, tmp_path / "whole")

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(given, target, progress=Progress(interrupt, 0.4))
    before = sums(target)
    assert list(target.glob("model-*.safetensors"))
    kept = tmp_path / "kept"
    os.link(path, kept)

    with pytest.raises(ValueError, match=f"^{path}: was changed"):
        run(given, target, resume=True, progress=Progress(lambda: exchange(path), 0.8))
    # What that run made is gone, and the note of the first one still says what its files were made from.
    assert {name for name in sums(target) if name.endswith(".safetensors")} <= before.keys()
    assert (target / write_checkpoint.UNFINISHED).exists()
    with pytest.raises(ValueError, match="begun from another source"):
        run(given, target, resume=True)
    kept.replace(path)
    run(given, target, resume=True)
    assert sums(target) == sums(tmp_path / "whole")
