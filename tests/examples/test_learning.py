"""Test the examples that train: LoRA on a folder of answers, and a decoder with a new vision tower."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support import programs
from support.paths import EXAMPLES, TINY, environment
from transformers import AutoModelForImageTextToText, AutoProcessor

from llamoe.conversion import assemble

pytestmark = pytest.mark.slow

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
    """Return a program that runs an example with other constants at its top.

    With `kill` it is killed after this step of the training whose output folder has `place` in its name.
    """
    training = SHORT | constants.pop("TRAINING", {})
    constants = {name: value if isinstance(value, int) else str(value) for name, value in constants.items()}
    given = dict(script=script, kill=kill, place=place, constants=constants, training=training)
    return PROGRAM.format(folder=str(EXAMPLES), **given)


def write_data(folder: Path, count: int = 40) -> Path:
    """Write pictures of one colour, and questions that the small model was not trained on, with one answer to all."""
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
    # One question has no picture.
    lines[3] = {"question": "Are you a star?", "answer": "no.", "kind": "star"}
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def run(script, **constants):
    """Run an example with other constants in a new process."""
    return programs.run(["-c", edited(script, **constants)])


def adapter_of(folder):
    return load_file(folder / "adapter/adapter_model.safetensors")


def test_an_adapter_is_learnt_from_a_folder(tmp_path, monkeypatch, capsys):
    import examine
    import finetune_lora
    from peft import PeftModel

    monkeypatch.setattr(finetune_lora, "DATA", write_data(tmp_path / "data", 20))
    monkeypatch.setattr(finetune_lora, "OUT", tmp_path / "out")
    changes = SHORT | dict(num_train_epochs=6, learning_rate=1.2e-2)
    monkeypatch.setattr(finetune_lora, "TRAINING", finetune_lora.TRAINING | changes)
    finetune_lora.main()
    printed = capsys.readouterr().out
    assert "held-out answers right before: 0.0% of 2 name" in printed and "now: 100.0% of 2 name" in printed
    model = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, tmp_path / "out/adapter").eval()
    processor = AutoProcessor.from_pretrained(TINY)
    picture = Image.new("RGB", (90, 70), (0, 90, 128))
    assert examine.answer(model, processor, [picture], ["Who are you?"]) == ["i am red."]


def test_only_answers_carry_a_loss(tmp_path):
    import finetune_lora
    import question_folder

    model, processor = finetune_lora.load(str(TINY))
    data = write_data(tmp_path / "data")
    learnt, held_out = question_folder.read(data)
    assert (len(learnt), len(held_out)) == (36, 4)
    batch = question_folder.collate(processor, [learnt[0], learnt[3]])
    answers = [
        processor.decode(row[labels != -100])
        for row, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    end = processor.tokenizer.eos_token
    assert answers == [f"{learnt[0]['answer']}{end}", f"no.{end}"]
    # The prompt equals the processor's own.
    content = [
        {"type": "image", "image": Image.open(data / "0.png")},
        {"type": "text", "text": learnt[0]["question"]},
    ]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    length = prompt["input_ids"].shape[1]
    assert torch.equal(batch["input_ids"][0, :length], prompt["input_ids"][0])
    assert torch.equal(batch["pixel_values"][:1], prompt["pixel_values"])


def test_a_killed_training_goes_on_to_the_same_adapter(tmp_path):
    given = dict(DATA=write_data(tmp_path / "data"), TRAINING={"save_steps": 3})
    whole = run("finetune_lora", OUT=tmp_path / "whole", **given)
    assert whole.returncode == 0, whole.stderr
    assert run("finetune_lora", OUT=tmp_path / "parts", kill=11, **given).returncode == -9
    # A kill while the next checkpoint is written leaves such a folder.
    (tmp_path / "parts/checkpoints/checkpoint-12").mkdir()
    again = run("finetune_lora", OUT=tmp_path / "parts", **given)
    assert again.returncode == 0, again.stderr
    one, two = (adapter_of(tmp_path / name) for name in ("whole", "parts"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("kind", ["ddp", "zero3"])
def test_two_processes_learn_what_one_does(kind, tmp_path):
    """Each process has half of a batch and, under ZeRO-3, half of every weight; both run on the CPU."""
    if kind == "zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    data = write_data(tmp_path / "data")
    assert run("finetune_lora", DATA=data, OUT=tmp_path / "one").returncode == 0
    # accelerate starts processes on the CPU only by MPI, or with a file that asks for DeepSpeed.
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if kind == "zero3":
        text = (EXAMPLES / "accelerate/8gpu_zero3.yaml").read_text()
        text = text.replace("num_processes: 8", "num_processes: 2").replace("bf16", "'no'")
        (tmp_path / "zero3.yaml").write_text(text + "use_cpu: true\n")
        launch = ["accelerate.commands.launch", "--config_file", tmp_path / "zero3.yaml"]
    halves = {"per_device_train_batch_size": 3}
    (tmp_path / "script.py").write_text(
        edited("finetune_lora", DATA=data, OUT=tmp_path / "two", TRAINING=halves)
    )
    done = subprocess.run(
        [sys.executable, "-m", *launch, tmp_path / "script.py"],
        env=environment() | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (adapter_of(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    # Another order of sums changes gradients, and Adam enlarges the change of small ones.
    distance = sum((one[key] - two[key]).square().sum() for key in one).sqrt()
    assert distance < 1e-2 * sum(factor.square().sum() for factor in one.values()).sqrt()


def test_decoder_learns_to_see_in_two_stages(tmp_path):
    """A run that was killed in its second stage ends with the same weights; the first stage keeps the decoder."""
    assemble(TINY, TINY, tmp_path / "joined", max_tiles=1)
    given = dict(MODEL=tmp_path / "joined", DATA=write_data(tmp_path / "data"))
    given["TRAINING"] = dict(num_train_epochs=1, save_steps=2)
    whole = run("align_vision", OUT=tmp_path / "whole", **given)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.count("% of 4 name") == 3
    killed = run("align_vision", OUT=tmp_path / "parts", kill=5, place="stage2", **given)
    assert killed.returncode == -9, killed.stderr
    before, first = (
        AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "joined", tmp_path / "parts/stage1/checkpoint-6")
    )
    changed = {name for name, weight in first.items() if not torch.equal(before[name], weight)}
    assert changed == {name for name in first if "vision_adapter" in name or "multi_modal_projector" in name}
    again = run("align_vision", OUT=tmp_path / "parts", **given)
    assert again.returncode == 0, again.stderr
    one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    AutoProcessor.from_pretrained(tmp_path / "parts/model")


def test_lessons_are_folders_of_questions(tmp_path):
    """The same seed writes the same lesson, in which about half of the questions are of the new kind."""
    import lessons
    import question_folder

    for name in ("one", "two"):
        lessons.write_lesson(tmp_path / name, "lesson", 40)
    assert (tmp_path / "one/data.jsonl").read_text() == (tmp_path / "two/data.jsonl").read_text()
    learnt, held_out = question_folder.read(tmp_path / "one")
    kinds = [example["kind"] for example in learnt + held_out]
    assert len(kinds) == 40 and 10 < kinds.count("bigger") < 30 and set(kinds) == {"bigger", "known"}
    assert all(Image.open(tmp_path / "one" / example["image"]).size[0] for example in learnt)
    lessons.write_lesson(tmp_path / "captions", "captions", 5)
    assert {example["kind"] for example in question_folder.read(tmp_path / "captions")[0]} == {"caption"}
