"""Saves that are killed, and what is left of them; test_killed_saves.py starts it, since it forks.

    python killed_saves.py FOLDER random SEED COUNT    COUNT saves killed at random moments; SEED/INDEX for one of them
    python killed_saves.py FOLDER steps [all]          a save killed at each step of the exchange; of all pairs

Prints a line of JSON for each case: what it was, and what is wrong, if anything. A parent that has imported torch once
forks a process that saves, and one that looks at what is left; it does nothing itself that a fork could not bear.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import transformers
from support.models import make_asymmetric
from transformers import LlamaForCausalLM

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.modeling.checkpoints.saving import put_back

SHAPES = {"single": "5GB", "sharded": "30KB"}
PAIRS = list(itertools.product(SHAPES, SHAPES, ("llamoe", "stock")))
# Files that belong to somebody else, and stay.
FOREIGN = ("tokenizer.json", "model.other.safetensors", "pytorch_model.bin")


def make(seed):
    """A model that differs from the others in weights and in configuration."""
    config = llamoe.LlamoeDenseConfig(
        vocab_size=61,
        hidden_size=36,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
        rms_norm_eps=1e-5 * (seed + 1),
    )
    return make_asymmetric(llamoe.LlamoeDenseForCausalLM(config), seed)


def save(model, folder, shape, layout):
    model.save_pretrained(folder, max_shard_size=SHAPES[shape], layout=layout)


def expected_files(folder, shape, layout):
    names = {"config.json", "generation_config.json", *FOREIGN}
    names |= {"llamoe_hub.py"} if layout == "llamoe" else set()
    if shape == "single":
        return names | {"model.safetensors"}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 2
    return names | {"model.safetensors.index.json"} | shards


def which(model_class, folder, models):
    """Say which of the models is in a folder, or the error that loading it gives."""
    try:
        found = model_class.from_pretrained(folder)
    except Exception as error:
        return error
    for name, model in models.items():
        expected = model.state_dict()
        if found.config.rms_norm_eps == model.config.rms_norm_eps and all(
            torch.equal(tensor, expected[key]) for key, tensor in found.state_dict().items()
        ):
            return name
    return "a mixture"


def look(folder, models, layout, shape):
    """Say what is wrong with a folder after a kill.

    What was cut off can be put back, and the next save leaves it whole and clean.
    """
    found = which(llamoe.LlamoeDenseForCausalLM, folder, models)
    if isinstance(found, Exception):
        if not isinstance(found, CheckpointError) or "not whole" not in str(found):
            return f"llamoe: {found!r}"
    elif found not in models:
        return f"llamoe loads {found}"
    if layout == "stock":  # whose class may find a folder whole a step earlier
        by_stock = which(LlamaForCausalLM, folder, models)
        possible = models if isinstance(found, Exception) else [found]
        if by_stock not in possible and not (isinstance(by_stock, OSError) and isinstance(found, Exception)):
            return f"llamoe: {found!r}, stock: {by_stock!r}"
    if isinstance(found, Exception):
        put_back(folder)
        if which(llamoe.LlamoeDenseForCausalLM, folder, models) not in models:
            return "what was cut off cannot be put back"
    save(models["new"], folder, shape, layout)
    if which(llamoe.LlamoeDenseForCausalLM, folder, models) != "new":
        return "the save after it does not load"
    left = {path.name for path in folder.iterdir()} ^ expected_files(folder, shape, layout)
    return f"the save after it leaves or lacks {sorted(left)}" if left else None


def forked(function):
    """Run a function in a process of its own and give what it returns, as JSON."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = function()
        except BaseException:
            answer = traceback.format_exc()
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(child, 0)
    return json.loads(answer) if status == 0 else f"the process that looked at it ended with status {status}"


def begin(saving):
    """Fork a process that saves; its number."""
    child = os.fork()
    if child == 0:
        try:
            saving()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def prepare(folder, models, shape, layout):
    """Put the older model into the folder, as it was saved once."""
    saved = folder.with_name(f"{shape}-{layout}")
    if not saved.exists():
        forked(lambda: save(models["old"], saved, shape, layout))
        for name in FOREIGN:
            (saved / name).write_text("{}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)


def at_random(folder, models, seed, index):
    draw = random.Random(f"{seed}/{index}")
    before, after, layout = draw.choice(PAIRS)
    prepare(folder, models, before, layout)

    def saving():
        for name, shape in itertools.cycle((("new", after), ("old", before))):
            save(models[name], folder, shape, layout)

    child = begin(saving)
    time.sleep(draw.uniform(0, 0.25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wrong = forked(lambda: look(folder, models, layout, after))
    return {"case": f"{seed}/{index}: {before} to {after}, {layout}", "wrong": wrong}


def at_each_step(folder, models, pair, events):
    """Yield a case for each of the events at which a save is killed, until one is not reached."""
    before, after, layout = pair
    for step in itertools.count():
        prepare(folder, models, before, layout)

        def saving(step=step):
            count = itertools.count()

            def hook(event, _):
                if event in events and next(count) == step:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            save(models["new"], folder, after, layout)

        _, status = os.waitpid(begin(saving), 0)
        wrong = forked(lambda: look(folder, models, layout, after))
        yield {"case": f"{before} to {after}, {layout}, step {step}", "wrong": wrong}
        if os.WIFEXITED(status):
            return


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder, way, *rest = sys.argv[1:]
    folder = Path(folder) / "model"
    models = {"old": make(0), "new": make(1)}
    if way == "steps":
        pairs = PAIRS if rest else [("sharded", "sharded", "stock")]
        events = {"os.rename", "os.mkdir", "os.rmdir", "os.remove"} if rest else {"os.rename"}
        cases = (case for pair in pairs for case in at_each_step(folder, models, pair, events))
    else:
        seed, _, only = rest[0].partition("/")
        indices = [int(only)] if only else range(int(rest[1]))
        cases = (at_random(folder, models, seed, index) for index in indices)
    for case in cases:
        print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
