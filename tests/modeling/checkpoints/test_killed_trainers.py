"""A Trainer that is killed at random moments of its saves: each checkpoint's weights are whole, or refused by name.

`Trainer` writes a checkpoint's files one after another into the folder with its final name: the weights by our
`save_pretrained`, then optimizer.pt, scheduler.pt, rng_state.pth and trainer_state.json. It cannot resume from a folder
where one of the last four is missing or cut short; such folders are counted apart. From a folder in which every file
is whole, training must resume and end with exactly the weights of a run that was not killed.
"""

import json
import os
from collections import Counter

import pytest
from support import programs

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("LLAMOE_KILLS", 0)) or 3

# Import everything and train once, then fork for each run that is killed.
CHILD = """
import json, os, random, signal, sys
from pathlib import Path
import torch
import tqdm
import transformers
from support.models import make_asymmetric, stock_text_config
from transformers import Trainer, TrainerCallback, TrainingArguments
import llamoe

# tqdm's monitor thread has a lock, which a fork might copy in its locked state.
tqdm.tqdm.monitor_interval = 0
transformers.utils.logging.disable_progress_bar()
STEPS = 3
CONFIG = dict(num_hidden_layers=2, num_experts_per_tok=2)
OURS = ("config.json", "generation_config.json", "llamoe_hub.py", "model.safetensors")
generator = torch.Generator().manual_seed(2)
EXAMPLES = [{"input_ids": row, "labels": row} for row in torch.randint(3, 90, (2 * STEPS, 13), generator=generator)]

def trainer(folder):
    model = make_asymmetric(llamoe.LlamoeForCausalLM(llamoe.from_stock(stock_text_config(**CONFIG))))
    options = dict(per_device_train_batch_size=2, num_train_epochs=1, learning_rate=3e-3, save_steps=1, report_to=[])
    options |= dict(save_strategy="steps", use_cpu=True, disable_tqdm=True, seed=11, logging_strategy="no")
    return Trainer(model, TrainingArguments(output_dir=str(folder), **options), train_dataset=EXAMPLES)

class Counts(TrainerCallback):
    # Counts the calls and returns of each save, and kills at a number of them: moments that no machine's speed moves.
    def __init__(self, step=None, last=None):
        self.step, self.last, self.saves = step, last, []
    def profile(self, frame, event, argument):
        self.count += 1
        if self.count == self.last and self.is_deadly:
            os.kill(os.getpid(), signal.SIGKILL)
    def on_step_end(self, args, state, control, **kwargs):
        self.count, self.is_deadly = 0, state.global_step == self.step
        sys.setprofile(self.profile)
    def on_save(self, args, state, control, **kwargs):
        sys.setprofile(None)
        self.saves.append(self.count)

def train(folder, step=None, last=None):
    one, counts = trainer(folder), Counts(step, last)
    one.add_callback(counts)
    one.train()
    return counts.saves

def killed(folder, step, last):
    # In a fork.
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        train(folder, step, last)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

def weights(folder):
    return llamoe.LlamoeForCausalLM.from_pretrained(folder).state_dict()

def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

def look(folder, whole):
    # Newest first, as somebody would who looks for one to go on from.
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1]))
    found, resume = {"kinds": [], "wrong": []}, None
    for path in checkpoints:
        expected = whole / path.name
        try:
            state = weights(path)
        except (ValueError, OSError) as error:
            kind = "weights refused" if str(path) in str(error) else f"refused without a name: {error}"
            found["kinds"].append(kind)
            continue
        if not same(state, weights(expected)):
            found["wrong"].append(f"{path.name} loads other weights")
        sizes = {file.name: file.stat().st_size for file in path.iterdir()}
        whole_sizes = {file.name: file.stat().st_size for file in expected.iterdir()}
        missing = [name for name in whole_sizes if name not in OURS and sizes.get(name) != whole_sizes[name]]
        found["kinds"].append("Trainer's own files are not whole" if missing else "whole")
        if not missing and resume is None:
            resume = path
    one = trainer(folder)
    one.train(resume_from_checkpoint=str(resume) if resume else None)
    if not same(one.model.state_dict(), weights(whole / f"checkpoint-{STEPS}")):
        found["wrong"].append(f"resumed {resume or 'from the beginning'}: other weights in the end")
    return found

def main():
    torch.set_num_threads(1)
    place, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    whole = place / "whole"
    train(whole)  # imports everything, which would be counted, too
    saves = train(place / "counted")
    draw = random.Random(seed)
    for number in range(kills):
        folder, step = place / f"run-{number}", draw.randint(1, STEPS)
        # Each in its part of a save, so that few kills are spread over all of it.
        share = (number + draw.random()) / kills
        died = killed(folder, step, 1 + int(0.99 * share * saves[step - 1]))
        print(json.dumps({"number": number, "died": died, **look(folder, whole)}), flush=True)

main()
"""


def test_what_a_killed_trainer_leaves(tmp_path, capsys):
    arguments = [tmp_path, KILLS, os.environ.get("LLAMOE_SEED", "0")]
    done = programs.run(["-c", CHILD, *arguments], timeout=300 + 60 * KILLS)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"number"')]
    assert len(runs) == KILLS
    kinds = Counter(kind for run in runs for kind in run["kinds"])
    with capsys.disabled():
        print(f"\n{KILLS} killed trainers, their checkpoints: {dict(kinds)}")
    assert all(run["died"] and not run["wrong"] for run in runs), runs
    # Checkpoints before the killed save are whole; of those that were being written, some are not.
    assert kinds["whole"] > 0 and len(kinds) > 1, kinds
    assert set(kinds) <= {"whole", "weights refused", "Trainer's own files are not whole"}, kinds
