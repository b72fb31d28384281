"""The README's command lines for conversions, run as they stand on small real files of those names."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.conversions import META_LLAMA_2
from support.towers import open_clip_config, open_clip_tower, randomize, visual_state, write_open_clip
from transformers import AutoModelForImageTextToText, AutoProcessor

import llamoe
from llamoe.conversion import verify

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "README.md").read_text().partition("## Weights in and out")[2].partition("\n## ")[0]
FLOWS = [
    [shlex.split(line, comments=True) for line in block.splitlines()]
    for block in re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
]


def run(words, folder, text=""):
    """One line of the README; the command by its module, files of the repository by their paths."""
    programs = {"llamoe": [sys.executable, "-m", "llamoe.conversion.cli"], "python": [sys.executable]}
    words = [
        *programs[words[0]],
        *(str(ROOT / word) if word.startswith("examples/") else word for word in words[1:]),
    ]
    done = subprocess.run(
        words, cwd=folder, input=text, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    """Meta's LLaMA 2 in two files with a real tokenizer, and a tower of open_clip, under the README's names."""
    for name in ("llama-2-7b-chat", "llama-2-7b"):
        META_LLAMA_2.write(tmp_path / name, META_LLAMA_2.weights(), 2)
    sizes = {"image_size": 224, "patch_size": 14}
    tower = randomize(open_clip_tower(**sizes))
    write_open_clip(tmp_path / "metaclip-l14", visual_state(tower), open_clip_config(**sizes))
    return tmp_path


def test_meta_folder_to_chat_in_two_commands(folder):
    convert, chat = FLOWS[0]
    run(convert, folder)
    answer = run([*chat, "--max-new-tokens", "5"], folder, "Who are you?\nAnd I?\n\n")
    assert answer.count(">") >= 2
    assert verify(folder / "llama-2-7b-chat", folder / "chat").same_function


def test_metaclip_and_llama_2_to_a_multimodal_mixture_in_three_commands(folder):
    assert len(FLOWS[1]) == 3
    for words in FLOWS[1]:
        run(words, folder)
    model = AutoModelForImageTextToText.from_pretrained(folder / "multimodal")
    assert type(model) is llamoe.LlamoeForConditionalGeneration
    assert model.config.vision_config.image_size == 336
    assert model.config.text_config.num_local_experts == 8
    processor = AutoProcessor.from_pretrained(folder / "multimodal")
    chat = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": Image.new("RGB", (400, 300), "red")},
                {"type": "text", "text": "What?"},
            ],
        }
    ]
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    generated = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > inputs["input_ids"].shape[1]
    tower = load_file(folder / "tower/model.safetensors")
    state = model.state_dict()
    name = "model.layers.1.mlp.fc1.weight"
    assert torch.equal(state[f"vision_model.{name}"], tower[name])


def test_every_command_has_a_row():
    from llamoe.conversion import cli

    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert set(re.findall(r"^\| `llamoe (\w+)`", SECTION, re.MULTILINE)) == commands
