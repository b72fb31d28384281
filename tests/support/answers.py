"""Questions about pictures with their answers, and the examples that train on them as programs."""

import json
import random
from pathlib import Path

from PIL import Image

from .paths import EXAMPLES

PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import {script} as script, finetune_lora
for name, value in {constants!r}.items():
    setattr(script, name, Path(value) if isinstance(value, str) else value)
finetune_lora.TRAINING |= {training!r}
class Kill(finetune_lora.transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == {kill!r} and {place!r} in args.output_dir:
            os.kill(os.getpid(), signal.SIGKILL)
made = finetune_lora.transformers.Trainer
finetune_lora.transformers.Trainer = lambda *given: made(*given, callbacks=[Kill()])
script.main()
"""
SHORT = dict(num_train_epochs=2, per_device_train_batch_size=6)


def edited(script: str, kill: int | None = None, place: str = "", **constants) -> str:
    """A program: an example with other constants at its top, killed after a step in a folder named like `place`."""
    training = SHORT | constants.pop("TRAINING", {})
    constants = {name: value if isinstance(value, int) else str(value) for name, value in constants.items()}
    given = dict(script=script, kill=kill, place=place, constants=constants, training=training)
    return PROGRAM.format(folder=str(EXAMPLES), **given)


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
    # Without a picture.
    lines[3] = {"question": "Are you a star?", "answer": "no.", "kind": "star"}
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder
