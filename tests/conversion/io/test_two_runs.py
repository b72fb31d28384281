"""One run a target: a second one is refused before it touches anything, and a dead one stops nobody."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch
from support.conversions import META_LLAMA_2, sums
from support.forked_runs import ForkedRuns
from support.progress import Progress
from support.towers import open_clip_config, open_clip_tower, randomize, visual_state, write_open_clip

import llamoe
from llamoe.conversion import (
    assemble,
    checkpoint,
    convert,
    convert_vision,
    inspect,
    merge_kv_heads,
    open_checkpoint,
    upcycle,
    verify,
)
from llamoe.conversion.io.target_folder import one_run
from llamoe_command import cli

pytestmark = pytest.mark.slow

CASE = replace(META_LLAMA_2, params={**META_LLAMA_2.params, "n_layers": 2})
LOCK = ".llamoe-lock"
ME = f"process {os.getpid()} on {socket.gethostname()}"
SHARDED = {"shard_size": "60KB"}


class Sources:
    def __init__(self, folder):
        self.folder = folder
        self.meta = CASE.write(folder / "meta", CASE.weights(torch.bfloat16), 2)
        self.dense = folder / "dense"
        convert(self.meta, self.dense)
        self.tower = write_open_clip(
            folder / "tower", visual_state(randomize(open_clip_tower())), open_clip_config()
        )
        convert(self.meta, folder / "expected", **SHARDED)
        self.expected = sums(folder / "expected")


WRITERS = {
    "convert": lambda given, to, **more: convert(given.meta, to, **SHARDED, **more),
    "convert to meta": lambda given, to, **more: convert(given.dense, to, to="meta", shards=2, **more),
    "vision": lambda given, to, **more: convert_vision(given.tower, to, **more),
    "vision to open_clip": lambda given, to, **more: convert_vision(given.tower, to, to="open_clip", **more),
    "vision to clip": lambda given, to, **more: convert_vision(given.tower, to, to="clip", **more),
    "upcycle": lambda given, to, **more: upcycle(given.dense, to, experts=3, **more),
    "gqa": lambda given, to, **more: merge_kv_heads(given.dense, to, kv_heads=1, **more),
    "assemble": lambda given, to, **more: assemble(
        given.dense, given.tower, to, pixel_shuffle_ratio=1.0, **more
    ),
}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return Sources(tmp_path_factory.mktemp("sources"))


def files(folder):
    """What stands in a folder, if it is there; an unfinished file by its identity, since it is being written on."""
    if not folder.exists():
        return None
    return {
        name: (folder / name).stat().st_ino if name.endswith(".partial") else content
        for name, content in sums(folder).items()
    }


def run_halfway(given, target, act, writer="convert", **more):
    """Run a command and something else in its middle."""
    done = []
    WRITERS[writer](given, target, progress=Progress(lambda: done.append(act())), **more)
    assert done


@pytest.mark.parametrize("writer", WRITERS)
def test_a_second_run_of_any_command_is_refused_with_the_firsts_process(given, writer, tmp_path):
    """From another thread of one process, by another path, and whether it is to go on or not."""
    target, link, whole = tmp_path / "to", tmp_path / "link", tmp_path / "whole"
    link.symlink_to(target)

    def start_others():
        before = files(target)
        assert LOCK in before
        for place in (target, link):
            for more in ({}, {"dry_run": True}):
                with pytest.raises(ValueError, match=f"^{place}: is unfinished; nothing"):
                    WRITERS[writer](given, place, **more)
            with pytest.raises(ValueError, match=f"^{place}: is being written by {ME}; nothing"):
                WRITERS[writer](given, place, resume=True)
        other = "gqa" if writer == "upcycle" else "upcycle"
        with pytest.raises(ValueError, match=f"is being written by {ME}"):
            WRITERS[other](given, target, resume=True)
        assert files(target) == before

    with ThreadPoolExecutor(1) as thread:
        run_halfway(given, target, lambda: thread.submit(start_others).result(), writer)
    WRITERS[writer](given, whole)
    assert sums(target) == sums(whole)
    assert not list(target.glob(".*"))


def test_the_command_says_it_in_one_line(given, tmp_path, capsys):
    def start_another():
        with pytest.raises(SystemExit) as ended:
            cli.main(["convert", str(given.meta), str(tmp_path / "to"), "--resume", "--json"])
        assert ended.value.code == 2

    run_halfway(given, tmp_path / "to", start_another)
    said, told = capsys.readouterr()
    assert json.loads(said) == {"error": told.strip().removeprefix("llamoe: "), "status": 2}
    assert f"{tmp_path / 'to'}: is being written by {ME}" in told and "--resume" in told


def test_a_run_that_was_planned_meanwhile_touches_nothing(given, tmp_path, monkeypatch):
    """Both find an empty target; the second one comes to write when the first one writes, or has finished."""
    plain = checkpoint.write

    def be_second(plan, target, *more):
        def refuse():
            with pytest.raises(ValueError, match=f"is being written by {ME}"):
                plain(plan, target, *more)

        monkeypatch.setattr(checkpoint, "write", plain)
        run_halfway(given, target, refuse)
        plain(plan, target, *more)

    for resume in (False, True):
        monkeypatch.setattr(checkpoint, "write", be_second)
        with pytest.raises(ValueError, match="nothing to resume" if resume else "exists already"):
            convert(given.meta, tmp_path / str(resume), resume=resume, **SHARDED)
        assert sums(tmp_path / str(resume)) == given.expected


def test_nobody_reads_a_folder_that_is_being_written(given, tmp_path):
    target = tmp_path / "to"
    readers = (
        open_checkpoint,
        llamoe.conversion.clip.open_tower,
        lambda folder: verify(given.meta, folder),
        lambda folder: convert(folder, tmp_path / "other"),
        lambda folder: upcycle(folder, tmp_path / "other", experts=2),
        llamoe.LlamoeDenseForCausalLM.from_pretrained,
    )

    def read():
        for reader in readers:
            with pytest.raises(ValueError, match=f"^{target}: is unfinished"):
                reader(target)
        found = inspect(target)
        assert found.kind == "partial" and "is unfinished" in " ".join(found.problems)

    run_halfway(given, target, read)
    assert not (tmp_path / "other").exists()


def test_nobody_reads_what_was_left_unfinished(given, tmp_path):
    """Also where all files have their names: the marker alone says so."""
    shutil.copytree(given.folder / "expected", tmp_path / "to")
    (tmp_path / "to" / ".llamoe-unfinished.json").write_text("{}")
    loaders = (open_checkpoint, llamoe.LlamoeDenseForCausalLM.from_pretrained)
    for reader in (*loaders, lambda folder: verify(folder, folder)):
        with pytest.raises(ValueError, match=f"^{tmp_path / 'to'}: is unfinished.*--resume"):
            reader(tmp_path / "to")
    with pytest.raises(ValueError, match=f"^{tmp_path / 'to'}: is unfinished"):
        llamoe.LlamoeDenseForCausalLM.from_pretrained(tmp_path, subfolder="to")
    assert "unfinished" in " ".join(inspect(tmp_path / "to").problems)


@pytest.mark.parametrize("then", ["another run", "nothing", "an empty folder", "no lock"])
def test_a_run_that_loses_its_folder_fails_and_leaves_everything_alone(given, then, tmp_path):
    target, aside = tmp_path / "to", tmp_path / "aside"
    before = {}

    def take_away():
        if then == "no lock":
            (target / LOCK).unlink()
            before[target] = files(target)
            return
        target.rename(aside)
        before[aside] = files(aside)
        if then == "another run":
            convert(given.meta, target, **SHARDED)
        elif then == "an empty folder":
            target.mkdir()
        before[target] = files(target)

    with pytest.raises(OSError, match=f"{target}: was moved, removed or taken over"):
        run_halfway(given, target, take_away)
    assert {folder: files(folder) for folder in before} == before
    if then == "another run":
        assert sums(target) == given.expected
    unfinished = target if then == "no lock" else aside
    with pytest.raises(ValueError, match="unfinished"):
        open_checkpoint(unfinished)
    convert(given.meta, unfinished, resume=True, **SHARDED)
    assert sums(unfinished) == given.expected


def test_without_locks_a_run_says_so_and_writes_all_the_same(given, tmp_path, monkeypatch):
    def refuse(file, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=f"{tmp_path / 'alone'}: its file system has no locks"):
        convert(given.meta, tmp_path / "alone", **SHARDED)
    assert sums(tmp_path / "alone") == given.expected


def test_a_lock_stays_neither_after_success_nor_after_an_error(given, tmp_path):
    weights = CASE.weights(torch.bfloat16)
    weights["output.weight"][5, 3] = float("nan")
    broken = CASE.write(tmp_path / "broken", weights, 2)
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "a" / "b" / "c", tmp_path / "empty"):
        with pytest.raises(ValueError, match="NaN"):
            convert(broken, target, **SHARDED)
    # Folders that were there stay, those that were made do not.
    assert not (tmp_path / "a").exists() and not list((tmp_path / "empty").iterdir())

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_halfway(given, tmp_path / "to", interrupt)
    assert not (tmp_path / "to" / LOCK).exists()
    convert(given.meta, tmp_path / "to", resume=True, **SHARDED)
    assert sums(tmp_path / "to") == given.expected


def test_templates_in_a_folder_of_their_own_are_removed_with_it(given, tmp_path):
    source = shutil.copytree(given.dense, tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    tensors = llamoe.conversion.io.read_files.open_safetensors(source / "model.safetensors")
    from safetensors.torch import save_file

    values = {name: tensor.read().clone() for name, tensor in tensors.items()}
    values["model.norm.weight"][3] = float("inf")
    save_file(values, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="infinity"):
        convert(source, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_lock_file_without_its_process_stops_nobody(given, tmp_path):
    for name in ("fresh", "finished"):
        (tmp_path / name).mkdir()
    shutil.copytree(given.folder / "expected", tmp_path / "finished", dirs_exist_ok=True)
    for name in ("fresh", "finished"):
        (tmp_path / name / LOCK).write_text("process 1 on elsewhere")
    convert(given.meta, tmp_path / "fresh", **SHARDED)
    assert sums(tmp_path / "fresh") == given.expected
    assert len(open_checkpoint(tmp_path / "finished").tensors)
    llamoe.LlamoeDenseForCausalLM.from_pretrained(tmp_path / "finished")


def test_a_lock_that_leads_elsewhere_is_not_followed(given, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match=LOCK):
        convert(given.meta, tmp_path / "to", **SHARDED)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.skipif(not Path("/sys/kernel").exists(), reason="needs a folder that nobody can write to")
def test_a_place_that_cannot_be_written_is_named(given):
    with pytest.raises((OSError, ValueError), match="/sys/llamoe-target"):
        convert(given.meta, "/sys/llamoe-target", **SHARDED)


def test_a_dry_run_takes_no_lock(given, tmp_path):
    (tmp_path / "to").mkdir()
    before = (tmp_path / "to").stat().st_mtime_ns
    convert(given.meta, tmp_path / "to", dry_run=True, **SHARDED)
    assert (tmp_path / "to").stat().st_mtime_ns == before


def test_of_many_at_once_one_is_inside(tmp_path):
    """They make the folder, lock it and remove it with the lock, over and over."""
    inside, entered, refused = [], [], []

    def enter(number):
        for _ in range(30):
            try:
                with one_run(tmp_path / "a" / "to") as lock:
                    inside.append(number)
                    assert inside == [number]
                    time.sleep(0.001)
                    lock.check()
                    inside.remove(number)
                    entered.append(number)
            except ValueError as error:
                refused.append(str(error))

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(enter, number) for number in range(8)]:
            done.result()
    assert len(entered) + len(refused) == 240 and len(entered) > 100
    assert all(re.search(f"{ME}|another process", error) for error in refused)
    # The folder stays where the one that made it was refused.
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def runs(given):
    runs = ForkedRuns(job(given, given.folder / "warm-up"))
    yield runs
    runs.close()


def job(given, target, resume=False, **more):
    options = {**SHARDED, "resume": resume}
    return {"command": "convert", "paths": [str(given.meta), str(target)], "options": options, **more}


def test_a_run_that_hangs_is_not_disturbed_and_may_be_ended(given, runs, tmp_path):
    """Real processes: the second one is refused while the first one lives, and goes on when it is dead."""
    first = runs.start(job(given, tmp_path / "to", pause=0.05), until_writing=True)
    said = runs.run(job(given, tmp_path / "to", True)).said
    assert said.startswith(f"ValueError: {tmp_path / 'to'}: is being written by process {first} on "), said
    assert runs.wait(first).is_finished
    assert sums(tmp_path / "to") == given.expected
    hangs = runs.start(job(given, tmp_path / "hangs", pause=5), until_writing=True)
    assert f"process {hangs} on" in runs.run(job(given, tmp_path / "hangs", True)).said
    os.kill(hangs, signal.SIGKILL)
    assert runs.wait(hangs).signal == signal.SIGKILL
    assert (tmp_path / "hangs" / LOCK).exists()
    assert runs.run(job(given, tmp_path / "hangs", True)).is_finished
    assert sums(tmp_path / "hangs") == given.expected


def test_a_forked_process_neither_cleans_up_nor_holds_the_lock(given, runs, tmp_path):
    assert runs.run(job(given, tmp_path / "exit", fork="exit")).is_finished
    assert sums(tmp_path / "exit") == given.expected
    ended = runs.run(job(given, tmp_path / "stay", fork="stay"))
    assert ended.signal == signal.SIGKILL
    child = int(re.search(r"forked (\d+)", ended.said)[1])
    try:
        os.kill(child, 0)
        convert(given.meta, tmp_path / "stay", resume=True, **SHARDED)
    finally:
        os.kill(child, signal.SIGKILL)
    assert sums(tmp_path / "stay") == given.expected


def test_a_full_disk_leaves_no_lock(given, runs, tmp_path):
    """No file may have a byte, not even the lock."""
    ended = runs.run(job(given, tmp_path / "to", largest=0))
    assert ended.said.startswith("OSError") and "File too large" in ended.said, ended
    assert not (tmp_path / "to").exists()


def test_runs_in_two_threads_leave_torch_its_threads(given, tmp_path):
    """Each computes in one thread while it writes. When both are over, threads to come have the number of before."""
    first_writes, second_writes, first_is_over = Event(), Event(), Event()

    class Meeting:
        def __init__(self, begun, awaited):
            self.begun, self.awaited = begun, awaited

        def start(self, total):
            pass

        def advance(self, nbytes, file):
            self.begun.set()
            assert self.awaited.wait(60)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(2) as pool:
            meeting = Meeting(first_writes, second_writes)
            first = pool.submit(convert, given.meta, tmp_path / "first", progress=meeting)
            assert first_writes.wait(60)
            meeting = Meeting(second_writes, first_is_over)
            second = pool.submit(convert, given.meta, tmp_path / "second", progress=meeting)
            first.result()
            first_is_over.set()
            second.result()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
