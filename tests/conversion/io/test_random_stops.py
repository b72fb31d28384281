"""Conversions that are killed or interrupted at random, alone and with a second one of the same target.

Whatever happened, a folder is whole, or every loader refuses it by name and `resume` makes it whole.
"""

import json
import os
import random
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.conversions import META_MAVERICK, sums
from support.forked_runs import Ended, ForkedRuns, batches, repeatable

import llamoe
from llamoe.conversion import convert, open_checkpoint

pytestmark = pytest.mark.slow

CASE = replace(META_MAVERICK, params={**META_MAVERICK.params, "n_layers": 2})
# Of each target its source and options.
TARGETS = {
    "sharded": ("meta", {"to": "hf", "shard_size": "280KB"}),
    "single": ("hf", {"to": "hf", "dtype": "float32"}),
    "split": ("meta", {"to": "hf", "experts": "split", "shard_size": "500KB"}),
    "from bin": ("bin", {"to": "hf", "shard_size": "400KB"}),
    "meta": ("hf", {"to": "meta", "shards": 3}),
}
LOCK, UNFINISHED = ".llamoe-lock", ".llamoe-unfinished.json"
HERE = "tests/conversion/io/test_random_stops.py"


class Bench:
    """Sources, what a conversion of each gives that is left alone, and the process that forks runs.

    Attributes:
        expected: of each target the files of a finished folder.
        lines: how many lines a run executes while it writes.
        seconds: how long it writes.
    """

    def __init__(self, folder: Path):
        self.sources = {"meta": CASE.write(folder / "meta", CASE.weights(torch.bfloat16), 3)}
        self.sources["hf"] = folder / "hf"
        convert(self.sources["meta"], self.sources["hf"], shard_size="300KB")
        self.sources["bin"] = as_bin(self.sources["hf"], folder / "bin")
        self.before = {name: sums(path) for name, path in self.sources.items()}
        self.runs = ForkedRuns(self.run("meta", folder / "warm-up"))
        self.expected, self.lines, self.seconds = {}, {}, {}
        for name in TARGETS:
            counted = self.runs.run(self.run(name, folder / f"counted {name}", count=True))
            assert counted.is_finished, counted
            self.lines[name] = int(counted.said.split()[1])
            self.expected[name] = sums(folder / f"counted {name}")
            process = self.runs.start(
                self.run(name, folder / f"timed {name}", pause=0.001), until_writing=True
            )
            begun = time.monotonic()
            assert self.runs.wait(process).is_finished
            self.seconds[name] = time.monotonic() - begun

    def run(self, name: str, target: Path, resume: bool = False, **more) -> dict:
        """What `ForkedRuns` is given."""
        source, options = TARGETS[name]
        paths = [str(self.sources[source]), str(target)]
        return {"command": "convert", "paths": paths, "options": {**options, "resume": resume}, **more}

    def is_finished(self, name: str, target: Path) -> bool:
        """Whether a folder is whole; if not, nobody may take it for that."""
        if not target.exists():
            return False
        found = sums(target)
        if UNFINISHED not in found and found.keys() - {LOCK, f".{UNFINISHED}.partial"}:
            # A lock stays if its process was killed between its last two steps.
            assert {file: sum for file, sum in found.items() if file != LOCK} == self.expected[name]
            return True
        for loader in (llamoe.LlamoeForCausalLM.from_pretrained, open_checkpoint):
            with pytest.raises(ValueError, match=re.escape(str(target))) as caught:
                loader(target)
            assert (": is unfinished" in str(caught.value)) == (UNFINISHED in found)
        return False

    def finish(self, name: str, target: Path) -> None:
        """Go on with a folder, in this process."""
        source, options = TARGETS[name]
        convert(self.sources[source], target, resume=True, **options)
        assert sums(target) == self.expected[name]


def as_bin(folder: Path, target: Path) -> Path:
    """The same checkpoint as files of `torch.save`."""
    shutil.copytree(folder, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    (target / "model.safetensors.index.json").unlink()
    tensors = open_checkpoint(folder).tensors
    for number, file in enumerate(sorted(target.glob("*.safetensors")), 1):
        held = {key: tensors[key].read() for key, name in index["weight_map"].items() if name == file.name}
        torch.save(held, target / f"pytorch_model-{number}.bin")
        index["weight_map"] |= dict.fromkeys(held, f"pytorch_model-{number}.bin")
        file.unlink()
    (target / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return target


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("bench"))
    yield bench
    bench.runs.close()
    assert {name: sums(path) for name, path in bench.sources.items()} == bench.before


@pytest.mark.parametrize("seeds", batches(8), ids=str)
def test_what_is_killed_at_random_is_refused_and_gone_on_with(bench, seeds, tmp_path):
    """The run and its resumption, each by the line that it executes or by the clock."""
    for seed in seeds:
        with repeatable(seed, f"{HERE} -k killed"):
            kill_at_random(bench, random.Random(seed), tmp_path / str(seed))


def kill_at_random(bench: Bench, dice: random.Random, target: Path) -> None:
    name = dice.choice(list(TARGETS))
    for attempt in range(dice.choice([1, 1, 2, 3])):
        run = bench.run(name, target, resume=attempt > 0)
        by_line = dice.random() < 0.6
        if by_line:
            run["line"] = dice.randint(1, bench.lines[name])
            ended = bench.runs.run(run)
        else:
            process = bench.runs.start({**run, "pause": 0.001}, until_writing=True)
            time.sleep(dice.uniform(0, bench.seconds[name]))
            os.kill(process, signal.SIGKILL)
            ended = bench.runs.wait(process)
        # It may be over before the moment has come: by the clock, or since a resumption has less to do.
        may_finish = attempt > 0 or not by_line
        if by_line and ended.is_finished:
            # Runs take a few lines more or less, by how their threads meet.
            may_finish = may_finish or int(ended.said.split()[1]) < run["line"]
        assert ended.signal == signal.SIGKILL or (may_finish and ended.is_finished), ended
        if bench.is_finished(name, target):
            break
    else:
        bench.finish(name, target)
    shutil.rmtree(target)


@pytest.mark.parametrize("seeds", batches(8), ids=str)
def test_a_second_run_of_the_same_target_harms_nothing(bench, seeds, tmp_path):
    """With and without `resume`; one of the two may be killed or interrupted."""
    for seed in seeds:
        with repeatable(seed, f"{HERE} -k second"):
            run_twice(bench, random.Random(seed), tmp_path / str(seed))


def run_twice(bench: Bench, dice: random.Random, target: Path) -> None:
    name = dice.choice(list(TARGETS))
    seconds = bench.seconds[name]
    if dice.random() < 0.3:  # both go on with what a third one left
        bench.runs.run(bench.run(name, target, line=dice.randint(bench.lines[name] // 3, bench.lines[name])))
        if bench.is_finished(name, target):
            return
    # The first one takes its time, so that the second one comes before its end.
    run = bench.run(name, target, resume=target.exists(), pause=0.005)
    first = bench.runs.start(run, until_writing=True)
    time.sleep(dice.uniform(0, 1.5 * seconds))
    second = bench.runs.start(bench.run(name, target, resume=dice.random() < 0.7, pause=0.001))
    victim = dice.choice([None, None, first, second])
    stop = dice.choice([signal.SIGKILL, signal.SIGINT])
    if victim:
        time.sleep(dice.uniform(0, seconds))
        os.kill(victim, stop)
    ends = {process: bench.runs.wait(process) for process in (first, second)}
    for process, ended in ends.items():
        check_end(ended, stop if process == victim else None, first, target)
    assert ends[first].is_finished or victim == first, ends
    assert sum(ended.is_finished for ended in ends.values()) <= 1
    if not bench.is_finished(name, target):
        assert not any(ended.is_finished for ended in ends.values()), ends
        if stop == signal.SIGINT and target.exists():
            assert not (target / LOCK).exists()
        bench.finish(name, target)
    assert not [path for path in target.iterdir() if path.name.endswith(".partial")]
    shutil.rmtree(target)


def check_end(ended: Ended, stopped_by: int | None, first: int, target: Path) -> None:
    """A run is ended by what stopped it, finishes, or is refused by name."""
    refusals = (
        f"is being written by process {first} on ",
        "exists already",
        "is unfinished",
        "nothing to resume",
    )
    if ended.signal:
        assert ended.signal == stopped_by, ended
    elif not ended.is_finished and not (stopped_by and ended.said.startswith("KeyboardInterrupt")):
        assert ended.said.startswith(f"ValueError: {target}: "), ended
        assert any(refusal in ended.said for refusal in refusals), ended
