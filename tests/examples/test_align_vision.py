"""Teaching a decoder to see with a tower that it never met."""

import re
import sys

import pytest
import torch
from safetensors.torch import load_file
from support import programs
from support.answers import killed_at, write_data
from support.paths import EXAMPLES, TINY
from transformers import AutoModelForImageTextToText, AutoProcessor

import llamoe

SCRIPT = EXAMPLES / "align_vision.py"


def words(data, out, *more):
    return ["--data", str(data), "--out", str(out), "--batch-size", "6", "--save-every", "2", *map(str, more)]


@pytest.mark.slow
def test_two_stages_and_a_stop_in_the_second(tmp_path):
    """Killed in its second stage it goes on to the same weights; the first changes nothing of the decoder."""
    data = write_data(tmp_path / "data")
    whole = programs.run([SCRIPT, *words(data, tmp_path / "whole", "--epochs", 1)])
    assert whole.returncode == 0, whole.stderr
    found = re.findall(r"(before|after stage [12]): ([\d.]+)% of the name right", whole.stdout)
    assert [when for when, _ in found] == ["before", "after stage 1", "after stage 2"]
    parts = words(data, tmp_path / "parts", "--epochs", 1)
    killed = killed_at(5, "align_vision", parts, "stage2")
    assert killed.returncode == -9, killed.stderr
    first = load_file(tmp_path / "parts/stage1.safetensors")
    assert all("vision_adapter" in name or "multi_modal_projector" in name for name in first)
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "parts/joined").state_dict()
    assert all(not torch.equal(before[name], weight) for name, weight in first.items())
    again = programs.run([SCRIPT, *parts])
    assert again.returncode == 0 and "stage 1:" not in again.stdout, again.stderr
    one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    left = {path.name for path in (tmp_path / "parts").iterdir()}
    assert left == {"joined", "model", "run.json"} | {f"loss_stage{number}.png" for number in (1, 2)}
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "parts/model")
    processor = AutoProcessor.from_pretrained(tmp_path / "parts/model")
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "path": str(data / "0.png")}, {"type": "text", "text": "?"}],
        }
    ]
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert model.generate(**inputs, max_new_tokens=2).shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--model", "{}"], "align_vision: no such file: {}/config.json"),
        (["--data", "{}"], "align_vision: no such file: {}/data.jsonl"),
        (["--rank", "0"], "argument --rank: must be above 0, not 0"),
    ],
)
def test_bad_input_is_told_in_a_line(more, says, tmp_path, monkeypatch, capsys):
    import align_vision

    monkeypatch.setattr(sys, "argv", ["align_vision.py", *(word.format(tmp_path) for word in more)])
    with pytest.raises(SystemExit, match="2"):
        align_vision.main()
    assert capsys.readouterr().err.endswith(f"{says.format(tmp_path)}\n")


def test_a_text_model_cannot_be_taught_to_see(tmp_path, monkeypatch, capsys):
    import align_vision

    model = AutoModelForImageTextToText.from_pretrained(TINY)
    text = llamoe.LlamoeForCausalLM(model.config.text_config)
    text.save_pretrained(tmp_path / "text")
    AutoProcessor.from_pretrained(TINY).tokenizer.save_pretrained(tmp_path / "text")
    data = write_data(tmp_path / "data")
    command = ["align_vision.py", "--model", str(tmp_path / "text"), *words(data, tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        align_vision.main()
    assert "has no vision tower: join one with it" in capsys.readouterr().err
