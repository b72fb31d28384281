"""Conversions that are killed, run out of disk or meet a target in use: nothing looks finished, and they go on."""

import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.conversions import META_MAVERICK, looks_finished, sums
from support.forked_runs import ForkedRuns
from support.progress import Progress, stops
from transformers import AutoModelForCausalLM

import llamoe
from llamoe.conversion import convert, open_checkpoint

pytestmark = pytest.mark.slow

CASE = replace(META_MAVERICK, params={**META_MAVERICK.params, "n_layers": 2})
OPTIONS = {"hf": {"to": "hf", "shard_size": "280KB"}, "meta": {"to": "meta", "shards": 3}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "meta"
    return CASE.write(folder, CASE.weights(torch.bfloat16), 3)


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    """For each format the folder that a conversion gives which is left alone."""
    place = tmp_path_factory.mktemp("finished")
    for to, options in OPTIONS.items():
        convert(source, place / to, **options)
    return {to: place / to for to in OPTIONS}


def weight_files(folder):
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".pth"))


def whole(folder):
    """The weight files under their own names, by what a rewrite would change."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in weight_files(folder)}


def check_unfinished(folder):
    """No loader takes the folder for a checkpoint."""
    assert not looks_finished(folder)
    with pytest.raises(ValueError, match="."):
        open_checkpoint(folder)
    if (folder / "config.json").exists():
        for loader in (AutoModelForCausalLM, llamoe.LlamoeForCausalLM):
            with pytest.raises((OSError, ValueError)):
                loader.from_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("kills")


def make_run(source, target, to, resume=False, **moment):
    options = {**OPTIONS[to], "resume": resume}
    return {"command": "convert", "paths": [str(source), str(target)], "options": options, **moment}


@pytest.fixture(scope="module")
def kills(source, finished, place):
    """What is known of each killed conversion, and the answer of the limited one."""
    runs = ForkedRuns(make_run(source, place / "warm-up", "hf"))
    jobs = []
    for to in OPTIONS:
        total = sum(path.stat().st_size for path in weight_files(finished[to]))
        moments = [{"after": int(total * share)} for share in (0.0, 0.45, 0.9)]
        # UNFINISHED is a file more; the first, every third one and the very last.
        last = len(sums(finished[to])) + 1
        moments += [{"renames": count} for count in sorted({*range(0, last, 3), last})]
        jobs += [
            {"to": to, "run": make_run(source, place / f"{to}-{number}", to, **moment)}
            for number, moment in enumerate(moments)
        ]
    # One more, which goes on under a limit that makes no file possible.
    with pytest.raises(KeyboardInterrupt):
        convert(source, place / "limited", progress=stops(KeyboardInterrupt(), 0.6), **OPTIONS["hf"])
    limited = make_run(source, place / "limited", "hf", resume=True, largest=20_000)
    before = sums(source)
    assert [runs.run(job["run"]).signal for job in jobs] == [signal.SIGKILL] * len(jobs)
    refused = runs.run(limited).said
    assert sums(source) == before
    runs.close()
    return jobs, refused


@pytest.mark.parametrize("to", ["hf", "meta"])
def test_what_a_kill_leaves_looks_unfinished_and_is_gone_on_with(source, finished, kills, to):
    jobs, _ = kills
    expected, options, kept = sums(finished[to]), OPTIONS[to], set()
    for job in (job for job in jobs if job["to"] == to):
        target = Path(job["run"]["paths"][1])
        if job["run"].get("renames") != 0:  # killed before even the first file had its name
            with pytest.raises(ValueError, match="unfinished"):
                convert(source, target, **options)
        survivors = whole(target)
        if looks_finished(target):  # killed after the last file got its name
            assert sums(target).items() >= expected.items()
        elif len(survivors) not in kept:
            check_unfinished(target)
        convert(source, target, resume=True, **options)
        assert sums(target) == expected
        kept.add(len(survivors))
        if to == "hf" or len(survivors) == 3:
            assert whole(target).items() >= survivors.items(), "a whole shard was written again"
    assert len(kept) >= 3, "the kills were to leave different numbers of whole files"


def test_a_disk_that_refuses_a_file_gives_one_sentence_and_can_be_gone_on_with(
    source, finished, kills, place
):
    _, refused = kills
    target = place / "limited"
    assert str(target) in refused and "File too large" in refused and "resume" in refused
    assert "\n" not in refused
    check_unfinished(target)
    survivors = whole(target)
    assert survivors and not [path for path in target.iterdir() if path.name.endswith(".partial")]
    convert(source, target, resume=True, **OPTIONS["hf"])
    assert sums(target) == sums(finished["hf"])
    assert whole(target).items() >= survivors.items()


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("to", "error"),
    [("hf", NO_SPACE), ("meta", KeyboardInterrupt())],
    ids=["hf, no space", "meta, control-c"],
)
def test_errors_in_the_middle_leave_whole_files_only(source, finished, to, error, tmp_path):
    options = OPTIONS[to]
    with pytest.raises(type(error)) as caught:
        convert(source, tmp_path / "to", progress=stops(error, 0.6), **options)
    if error is NO_SPACE:
        assert caught.value.errno == errno.ENOSPC
        message = str(caught.value)
        assert str(tmp_path / "to") in message and "No space left" in message and "resume" in message
    check_unfinished(tmp_path / "to")
    assert not [path for path in (tmp_path / "to").iterdir() if path.name.endswith(".partial")]
    survivors = whole(tmp_path / "to")
    assert survivors or to == "meta"
    convert(source, tmp_path / "to", resume=True, **options)
    assert sums(tmp_path / "to") == sums(finished[to])
    assert whole(tmp_path / "to").items() >= survivors.items()


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**5))
    with pytest.raises(OSError, match=r"GB") as caught:
        convert(source, tmp_path / "to", **OPTIONS["hf"])
    assert caught.value.errno == errno.ENOSPC and str(tmp_path / "to") in str(caught.value)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("to", OPTIONS)
def test_progress_counts_every_byte_also_of_what_was_there_already(source, to, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / to, progress=stops(KeyboardInterrupt(), 0.5), **OPTIONS[to])
    counts = Progress()
    report = convert(source, tmp_path / to, progress=counts, resume=True, **OPTIONS[to])
    assert counts.done == counts.total == report.bytes


@pytest.mark.parametrize("to", ["hf", "meta"])
def test_a_target_in_use_is_refused_and_untouched(source, finished, to, tmp_path):
    options = OPTIONS[to]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    shutil.copytree(finished[to], tmp_path / "done")
    before = sums(tmp_path), sums(source)
    for resume in (False, True):
        for target in (tmp_path / "full", tmp_path / "file", tmp_path / "link", tmp_path / "done"):
            with pytest.raises(ValueError, match=str(target)):
                convert(source, target, resume=resume, **options)
        for target in (source, source / "inside", source.parent):
            with pytest.raises(ValueError, match=str(target)):
                convert(source, target, resume=resume, **options)
        with pytest.raises(ValueError, match="full/notes.txt"):
            convert(source, tmp_path / "full" / "notes.txt" / "to", resume=resume, **options)
    assert (sums(tmp_path), sums(source)) == before
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", **options)
    assert sums(tmp_path / "empty") == sums(tmp_path / "done")


def test_only_the_same_conversion_goes_on(source, tmp_path):
    options = OPTIONS["hf"]
    copy = shutil.copytree(source, tmp_path / "copy")
    other = replace(CASE, params=CASE.params).write(
        tmp_path / "other", CASE.weights(torch.bfloat16, seed=1), 3
    )
    with pytest.raises(KeyboardInterrupt):
        convert(copy, tmp_path / "to", progress=stops(KeyboardInterrupt(), 0.6), **options)
    before = sums(tmp_path / "to")
    for begun in (
        lambda: convert(other, tmp_path / "to", resume=True, **options),
        lambda: convert(copy, tmp_path / "to", resume=True, **{**options, "shard_size": "300KB"}),
        lambda: convert(copy, tmp_path / "to", resume=True, dtype="float32", **options),
        lambda: convert(copy, tmp_path / "to", resume=True, experts="split", **options),
        lambda: convert(copy, tmp_path / "to", resume=True, layout="llamoe", **options),
        lambda: convert(copy, tmp_path / "to", resume=True, **OPTIONS["meta"]),
    ):
        with pytest.raises(ValueError, match="other options"):
            begun()
        assert sums(tmp_path / "to") == before
    torch.save(torch.load(copy / "consolidated.01.pth", weights_only=False), copy / "consolidated.01.pth")
    with pytest.raises(ValueError, match="another source"):
        convert(copy, tmp_path / "to", resume=True, **options)
    assert sums(tmp_path / "to") == before


def test_what_is_refused_for_its_numbers_leaves_nothing_and_a_later_run_of_the_mended_source_works(tmp_path):
    weights = CASE.weights(torch.bfloat16)
    name = "layers.1.feed_forward.experts.w2"
    weights[name][-1, 3, 5] = float("nan")
    broken = CASE.write(tmp_path / "broken", weights, 3)
    for to, options in OPTIONS.items():
        with pytest.raises(ValueError, match="experts.moe_w_out_eF_D") as caught:
            convert(broken, tmp_path / to, **options)
        assert "consolidated.0" in str(caught.value) and "NaN" in str(caught.value)
        assert not (tmp_path / to).exists()


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(source, tmp_path):
    for to, options in OPTIONS.items():
        planned = convert(source, tmp_path / to, dry_run=True, **options)
        assert planned.dry_run and not (tmp_path / to).exists()
        done = convert(source, tmp_path / to, **options)
        assert (planned.files, planned.tensors, planned.bytes) == (done.files, done.tensors, done.bytes)
        assert planned.files == [path.name for path in weight_files(tmp_path / to)]
