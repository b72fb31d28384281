"""Conversions that are killed, fill the disk or find their target in use leave nothing that looks finished."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from support.conversions import META_LLAMA_2, META_MAVERICK, looks_finished, sums
from support.models import draw
from support.progress import Progress, kill_halfway, stops
from support.towers import open_clip_config, open_clip_tower, randomize, visual_state, write_open_clip
from transformers import AutoModelForCausalLM

import llamoe
from llamoe.conversion import (
    assemble,
    convert,
    convert_vision,
    inspect,
    merge_kv_heads,
    open_checkpoint,
    quantize,
    upcycle,
    verify,
)

pytestmark = pytest.mark.slow

CASE = replace(META_MAVERICK, params={**META_MAVERICK.params, "n_layers": 2})
OPTIONS = {"hf": {"to": "hf", "shard_size": "280KB"}, "meta": {"to": "meta", "shards": 3}}
SHARDED = {"shard_size": "60KB"}
# A command, the names of its sources in the fixture `sources`, and its options.
WRITERS = {
    "convert": (convert, ["meta"], SHARDED),
    "convert to meta": (convert, ["dense"], {"to": "meta", "shards": 2}),
    "vision": (convert_vision, ["tower"], {}),
    "upcycle": (upcycle, ["dense"], {"experts": 3, **SHARDED}),
    "gqa": (merge_kv_heads, ["dense"], {"kv_heads": 1, **SHARDED}),
    "assemble": (assemble, ["dense", "tower"], {"image_size": 48, **SHARDED}),
    "quantize": (quantize, ["packable"], {"to": "int8", "shard_size": "30KB"}),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    case = replace(META_LLAMA_2, params={**META_LLAMA_2.params, "n_layers": 2})
    case.write(folder / "meta", case.weights(torch.bfloat16), 2)
    convert(folder / "meta", folder / "dense")
    write_open_clip(folder / "tower", visual_state(randomize(open_clip_tower())), open_clip_config())
    packable = llamoe.LlamoeDenseConfig(
        vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    draw(llamoe.LlamoeDenseForCausalLM, packable).bfloat16().save_pretrained(folder / "packable")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "meta"
    return CASE.write(folder, CASE.weights(torch.bfloat16), 3)


def weight_files(folder):
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".pth"))


def whole(folder):
    """Return inode and time of each finished weight file, which change if it is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in weight_files(folder)}


def check_unfinished(folder):
    """Check that no loader takes the folder for a checkpoint."""
    assert not looks_finished(folder)
    readers = [open_checkpoint, inspect, lambda path: verify(path, path)]
    if (folder / "config.json").exists():
        readers += [AutoModelForCausalLM.from_pretrained, llamoe.LlamoeForCausalLM.from_pretrained]
    for reader in readers:
        with pytest.raises((OSError, ValueError)):
            reader(folder)


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_kill_leaves_looks_unfinished_and_is_gone_on_with(writer, sources, tmp_path):
    write, names, options = WRITERS[writer]
    inputs, target = [sources / name for name in names], tmp_path / "to"
    kill_halfway(write, *inputs, target, **options)
    check_unfinished(target)
    survivors = whole(target)
    with pytest.raises(ValueError, match="is unfinished"):
        write(*inputs, target, **options)
    write(*inputs, target, resume=True, **options)
    write(*inputs, tmp_path / "whole", **options)
    assert sums(target) == sums(tmp_path / "whole")
    assert whole(target).items() >= survivors.items(), "a whole file was written again"
    assert survivors or "shard_size" not in options


def test_a_second_run_is_refused_while_the_first_writes(sources, tmp_path):
    """The second run is in another thread, by the same path or a link, with resume or without."""
    target, link, done = tmp_path / "to", tmp_path / "link", []
    link.symlink_to(target)

    def start_others():
        for path in (target, link):
            with pytest.raises(ValueError, match=f"^{path}: is unfinished"):
                convert(sources / "meta", path, **SHARDED)
            with pytest.raises(ValueError, match=f"^{path}: is being written by another run"):
                convert(sources / "meta", path, resume=True, **SHARDED)
        check_unfinished(target)
        done.append(True)

    with ThreadPoolExecutor(1) as thread:
        convert(
            sources / "meta",
            target,
            progress=Progress(lambda: thread.submit(start_others).result()),
            **SHARDED,
        )
    assert done
    convert(sources / "meta", tmp_path / "whole", **SHARDED)
    assert sums(target) == sums(tmp_path / "whole")


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("to", "error"),
    [("hf", NO_SPACE), ("meta", KeyboardInterrupt())],
    ids=["hf, no space", "meta, control-c"],
)
def test_errors_in_the_middle_leave_whole_files_only(source, to, error, tmp_path):
    options = OPTIONS[to]
    with pytest.raises(type(error)) as caught:
        convert(source, tmp_path / "to", progress=stops(error, 0.6), **options)
    if error is NO_SPACE:
        assert caught.value.errno == errno.ENOSPC
    check_unfinished(tmp_path / "to")
    assert not [path for path in (tmp_path / "to").iterdir() if path.name.endswith(".partial")]
    survivors = whole(tmp_path / "to")
    assert survivors
    counts = Progress()
    report = convert(source, tmp_path / "to", resume=True, progress=counts, **options)
    assert counts.done == counts.total == report.bytes
    convert(source, tmp_path / "whole", **options)
    assert sums(tmp_path / "to") == sums(tmp_path / "whole")
    assert whole(tmp_path / "to").items() >= survivors.items()


@pytest.mark.parametrize("to", ["hf", "meta"])
def test_a_target_in_use_is_refused_and_untouched(source, to, tmp_path):
    options = OPTIONS[to]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    convert(source, tmp_path / "done", **options)
    before = sums(tmp_path), sums(source)
    for resume in (False, True):
        for target in (tmp_path / "full", tmp_path / "file", tmp_path / "done"):
            with pytest.raises(ValueError, match=str(target)):
                convert(source, target, resume=resume, **options)
        for target in (source, source / "inside", source.parent):
            with pytest.raises(ValueError, match=str(target)):
                convert(source, target, resume=resume, **options)
    assert (sums(tmp_path), sums(source)) == before
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", **options)
    assert sums(tmp_path / "empty") == sums(tmp_path / "done")


def test_only_the_same_conversion_goes_on(source, tmp_path):
    options = OPTIONS["hf"]
    copy = shutil.copytree(source, tmp_path / "copy")
    with pytest.raises(KeyboardInterrupt):
        convert(copy, tmp_path / "to", progress=stops(KeyboardInterrupt(), 0.6), **options)
    before = sums(tmp_path / "to")
    for folder, changed in (
        (source, options),
        (copy, {**options, "shard_size": "300KB"}),
        (copy, {**options, "dtype": "float32"}),
        (copy, {**options, "experts": "split"}),
        (copy, {**options, "layout": "llamoe"}),
        (copy, OPTIONS["meta"]),
    ):
        with pytest.raises(ValueError, match="another source or with other options"):
            convert(folder, tmp_path / "to", resume=True, **changed)
        assert sums(tmp_path / "to") == before
    torch.save(torch.load(copy / "consolidated.01.pth", weights_only=False), copy / "consolidated.01.pth")
    with pytest.raises(ValueError, match="another source"):
        convert(copy, tmp_path / "to", resume=True, **options)
    assert sums(tmp_path / "to") == before


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(source, tmp_path):
    for to, options in OPTIONS.items():
        planned = convert(source, tmp_path / to, dry_run=True, **options)
        assert planned.dry_run and not (tmp_path / to).exists()
        done = convert(source, tmp_path / to, **options)
        assert (planned.files, planned.tensors, planned.bytes) == (done.files, done.tensors, done.bytes)
        assert planned.files == [path.name for path in weight_files(tmp_path / to)]
