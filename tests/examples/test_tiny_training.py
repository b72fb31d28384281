"""A training of the small model that is stopped goes on as if it had not been."""

import re

import pytest
from support import programs
from support.paths import EXAMPLES

pytestmark = pytest.mark.slow

# Small batches, and no evaluation: the questions are those of the training itself.
PROGRAM = """
import dataclasses, os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import dialogues, examine, train
for name in ("SEEING", "ANSWERING"):
    setattr(train, name, dataclasses.replace(getattr(train, name), batch_size=3))
corpus = train.write_corpus(0, scenes=20)
train.write_corpus = lambda seed: corpus
saved = train.Training.save
def save(self, path):
    saved(self, path)
    if self.step == {stop}:
        os.kill(os.getpid(), signal.SIGKILL)
train.Training.save = save
train.OUT, train.STEPS, train.SAVE_EVERY, train.EXAMINED = Path({out!r}), {steps}, 1, 1
train.main()
"""


def run(out, stop=None, steps=6):
    program = PROGRAM.format(folder=str(EXAMPLES / "tiny"), out=str(out), stop=stop, steps=steps)
    return programs.run(["-c", program])


def test_a_killed_training_goes_on_to_the_same_weights(tmp_path):
    """Killed in the last stage, whose optimizers know its first step."""
    whole = run(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert run(tmp_path / "parts", stop=4).returncode == -9
    other = run(tmp_path / "parts", steps=7)
    assert other.returncode == 1
    assert "is of a training with 6 steps and seed 0, not 7 and 0" in other.stderr
    last = run(tmp_path / "parts")
    assert "going on after step 4 of 6" in last.stdout, last.stderr
    expected, given = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert given == expected
    logs = [(tmp_path / name / "training.log").read_text() for name in ("whole", "parts")]
    # But for the minutes.
    assert len({re.sub(r"\d+ minutes", "", log) for log in logs}) == 1
    assert not (tmp_path / "parts" / "training-state.pt").exists()
