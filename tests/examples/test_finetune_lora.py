"""Fine-tuning by LoRA, from a folder of examples to an adapter."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support import programs
from support.answers import killed_at, write_data
from support.paths import EXAMPLES, TINY, environment
from transformers import AutoModelForImageTextToText, AutoProcessor

SCRIPT = EXAMPLES / "finetune_lora.py"


def words(data, out, *more):
    return ["--data", str(data), "--out", str(out), "--batch-size", "6", "--epochs", "2", *map(str, more)]


@pytest.fixture
def finetune(monkeypatch, capsys):
    """Runs the script in this process; returns what it printed."""
    import finetune_lora

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["finetune_lora.py", *map(str, arguments)])
        finetune_lora.main()
        return capsys.readouterr().out

    return run


def test_an_adapter_is_learnt_from_a_folder(tmp_path, finetune):
    import evaluate
    from peft import PeftModel

    data, out = write_data(tmp_path / "data", 20), tmp_path / "out"
    printed = finetune(*words(data, out, "--epochs", 6, "--learning-rate", 1.2e-2))
    assert "on 18 examples" in printed
    assert "name: 0.0% of 2 held-out answers right before, 100.0% now" in printed
    assert sorted(path.name for path in out.iterdir()) == ["adapter", "loss.png", "run.json"]
    with Image.open(out / "loss.png") as picture:
        assert min(picture.size) > 200
    model = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, out / "adapter").eval()
    processor = AutoProcessor.from_pretrained(TINY)
    picture = Image.new("RGB", (90, 70), (0, 90, 128))
    assert evaluate.answer(model, processor, [picture], ["Who are you?"]) == ["i am red."]


def test_only_answers_carry_a_loss(tmp_path):
    import finetune_lora

    processor = AutoProcessor.from_pretrained(TINY)
    data = write_data(tmp_path / "data")
    examples = finetune_lora.read_examples(data)
    batch = finetune_lora.Collator(processor, data)([examples[0], examples[3], examples[7]])
    learnt = [
        processor.decode(row[labels != -100])
        for row, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    end = processor.tokenizer.eos_token
    assert learnt[:2] == [f"{examples[0]['answer']}{end}", f"no.{end}"]
    assert learnt[2] == f"<|begin_of_text|>a text of its own{end}"
    # The prompt is the one that the processor itself writes.
    content = [
        {"type": "image", "image": Image.open(data / "0.png")},
        {"type": "text", "text": examples[0]["question"]},
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


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_adapter(tmp_path):
    data = write_data(tmp_path / "data")
    whole = programs.run([SCRIPT, *words(data, tmp_path / "whole", "--save-every", 3)])
    assert whole.returncode == 0, whole.stderr
    parts = words(data, tmp_path / "parts", "--save-every", 3)
    killed = killed_at(11, "finetune_lora", parts)
    assert killed.returncode == -9, killed.stderr
    # What a kill within the next checkpoint would have left.
    (tmp_path / "parts/checkpoints/checkpoint-12").mkdir()
    other = programs.run([SCRIPT, *parts, "--rank", "4"])
    assert other.returncode == 2 and "holds a training with rank 8, not 4" in other.stderr
    assert programs.run([SCRIPT, *parts]).returncode == 0
    one, two = (
        load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("whole", "parts")
    )
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    again = programs.run([SCRIPT, *parts])
    assert again.returncode == 2 and "holds a training that is ready" in again.stderr


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_trl_trains_the_same(tmp_path, finetune):
    data = write_data(tmp_path / "data", 14)
    finetune(*words(data, tmp_path / "plain", "--epochs", 1))
    finetune(*words(data, tmp_path / "sft", "--sft", "--epochs", 1))
    one, two = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("plain", "sft"))
    # Sums in another order, which Adam makes larger where gradients are small.
    distance = sum((one[key] - two[key]).square().sum() for key in one).sqrt()
    assert distance < 1e-2 * sum(each.square().sum() for each in one.values()).sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "zero3"])
def test_two_processes_learn_what_one_does(kind, tmp_path, finetune):
    """On the CPU, each with half of a batch; under ZeRO-3 each with half of every weight."""
    if kind == "zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    data = write_data(tmp_path / "data")
    finetune(*words(data, tmp_path / "one"))
    # accelerate starts processes on the CPU by MPI alone, unless a file asks for DeepSpeed.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if kind == "zero3":
        text = (EXAMPLES / "accelerate/8gpu_zero3.yaml").read_text()
        text = (
            text.replace("num_processes: 8", "num_processes: 2").replace("bf16", "'no'") + "use_cpu: true\n"
        )
        (tmp_path / "zero3.yaml").write_text(text)
        launch = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            tmp_path / "zero3.yaml",
        ]
    halves = ["--data", data, "--out", tmp_path / "two", "--batch-size", 3, "--epochs", 2]
    variables = environment() | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, SCRIPT, *map(str, halves)], env=variables, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    # Sums in another order, which Adam makes larger where gradients are small.
    distance = sum((one[key] - two[key]).square().sum() for key in one).sqrt()
    assert distance < 1e-2 * sum(each.square().sum() for each in one.values()).sqrt()


def _line(number, text):
    def change(data):
        lines = (data / "data.jsonl").read_text().splitlines()
        lines[number] = text
        (data / "data.jsonl").write_text("\n".join(lines))

    return change


@pytest.mark.parametrize(
    ("change", "more", "says"),
    [
        (_line(4, "nonsense"), (), "data.jsonl, line 5 is not JSON"),
        (_line(1, '{"question": "?"}'), (), 'line 2 has neither "question" and "answer" nor "text"'),
        (_line(1, '{"question": "?", "answer": 5}'), (), 'line 2: "answer" is no text'),
        (_line(2, '{"question": "?", "answer": "!", "image": "no.png"}'), (), "line 3: no such picture: "),
        (lambda data: (data / "data.jsonl").write_text('{"text": "a"}\n'), (), "has 1 examples"),
        (lambda data: (data / "data.jsonl").unlink(), (), "no such file: "),
        (lambda data: (data / "0.png").write_text("no picture"), (), "0.png"),
        (None, ("--model", "nowhere"), "no such file: nowhere/config.json"),
        (None, ("--rank", "0"), "argument --rank: must be above 0, not 0"),
        (None, ("--learning-rate", "1e30"), "try a smaller --learning-rate"),
    ],
)
def test_bad_input_is_told_in_a_line(change, more, says, tmp_path, finetune, capsys):
    data = write_data(tmp_path / "data", 9)
    if change:
        change(data)
    with pytest.raises(SystemExit, match="2"):
        finetune(*words(data, tmp_path / "out", *more))
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out" / "adapter").exists()


def test_the_lesson_holds_out_wordings(tmp_path):
    import lessons

    for name in ("one", "two"):
        lessons.write_lesson(tmp_path / name, lessons.ask_for_the_bigger, 20, 10)
    lines = [json.loads(line) for line in (tmp_path / "one/data.jsonl").read_text().splitlines()]
    assert (tmp_path / "one/data.jsonl").read_text() == (tmp_path / "two/data.jsonl").read_text()
    assert [line["kind"] for line in lines] == ["bigger", "known"] * 15
    assert {line["question"] for line in lines[20::4]} <= set(lessons.OTHER_WORDINGS)
    assert not {line["question"] for line in lines[:20]} & set(lessons.OTHER_WORDINGS)
