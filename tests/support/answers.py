"""Questions about pictures with their answers, for scripts that train on them, and a training that is killed."""

import json
import random
import subprocess
from pathlib import Path

from PIL import Image

from . import programs
from .paths import EXAMPLES

KILLED = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import {script}, finetune_lora
class Kill(finetune_lora.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if {place!r} in args.output_dir and state.global_step == {step}:
            os.kill(os.getpid(), signal.SIGKILL)
made = finetune_lora.make_trainer
def make(*arguments):
    trainer = made(*arguments)
    trainer.add_callback(Kill())
    return trainer
{script}.make_trainer = make
sys.argv = ["{script}.py", *{words!r}]
{script}.main()
"""


def killed_at(step: int, script: str, words: list[str], place: str = "") -> subprocess.CompletedProcess:
    """A training by one of the examples that is killed after a step, in a folder whose name has `place` in it."""
    program = KILLED.format(folder=str(EXAMPLES), script=script, place=place, step=step, words=words)
    return programs.run(["-c", program])


def write_data(folder: Path, count: int = 40) -> Path:
    """Pictures of one colour, and a question that the small model was never asked, with one answer to all."""
    folder.mkdir()
    rng, lines = random.Random(0), []
    for number in range(count):
        size, colour = (
            (rng.randint(60, 200), rng.randint(60, 200)),
            tuple(rng.randrange(256) for _ in range(3)),
        )
        Image.new("RGB", size, colour).save(folder / f"{number}.png")
        question = rng.choice(["Who are you?", "And you are?", "Your name?"])
        lines.append({"image": f"{number}.png", "question": question, "answer": "i am red.", "kind": "name"})
    # Without a picture, and without a chat.
    lines[3] = {"question": "Are you a star?", "answer": "no.", "kind": "star"}
    lines[7] = {"text": "a text of its own"}
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder
