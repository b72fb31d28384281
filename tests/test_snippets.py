"""Test that every block of code in the pages runs, on small models under the names that the pages use.

The blocks of a page run in order, and Python blocks share a namespace. Commands that are Python programs run in this
process, since importing torch takes longer than most of them; for the same reason the example that trains in several
processes is forked, not launched. A block that begins with the reason why it is not run is only parsed.
"""

import importlib.util
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from logging import WARNING
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support import programs
from support.conversions import META_LLAMA_2
from support.documents import NOT_RUN, PAGES, ROOT, blocks
from support.gguf_files import write_gguf
from support.mistral_folders import MistralCase
from support.models import draw
from support.published import publish
from support.served import Server, free_port
from support.tokenizer_files import sentencepiece_model, some_lines
from support.towers import open_clip_config, open_clip_tower, randomize, visual_state, write_open_clip
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.utils import logging
from typer.main import get_command

import llamoe
from llamoe.conversion import verify
from llamoe_command import cli

pytestmark = pytest.mark.slow

# What a user of `examples/chat.py` types.
TYPED = "Who are you?\nAnd I?\n\n"


def write_metaclip(folder):
    sizes = {"image_size": 224, "patch_size": 14}
    tower = randomize(open_clip_tower(**sizes))
    write_open_clip(folder, visual_state(tower), open_clip_config(**sizes))


def write_llama(folder):
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=88, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    draw(LlamaForCausalLM, config).save_pretrained(folder)


# int4 needs outputs in multiples of 16 and inputs in multiples of 32; the vocabulary is the small model's.
MISTRAL = dict(vocab_size=784, dim=64, hidden_dim=96, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=8)
QUANTIZABLE = dict(
    vocab_size=784, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=8, sliding_window=None,
)  # fmt: skip


def write_mistral(folder):
    case = MistralCase("Mistral", MISTRAL)
    case.write(folder, case.weights(torch.bfloat16))
    controls = [
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ]
    model = sentencepiece_model(some_lines(400, 300), QUANTIZABLE["vocab_size"], control_symbols=controls)
    (folder / "tokenizer.model.v3").write_bytes(model)


def write_mixtral(folder):
    config = MixtralConfig(**QUANTIZABLE, num_local_experts=3)
    draw(MixtralForCausalLM, config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "examples/llamoe-tiny" / name, folder)


# Functions that write small models in place of the published ones that pages name.
STAND_INS = {
    "llama-2-7b-chat": lambda folder: META_LLAMA_2.write(folder, META_LLAMA_2.weights(), 2),
    "llama-2-7b": lambda folder: META_LLAMA_2.write(folder, META_LLAMA_2.weights(), 2),
    "llama-2-7b-hf": write_llama,
    "mistral-7b-v0.3": write_mistral,
    "mixtral-8x7b": write_mixtral,
    "mixtral-8x7b-awq": lambda folder: publish(folder, "mixtral", "awq"),
    "mixtral.Q4_0.gguf": lambda file: write_gguf(file, "mixtral", "Q4_0"),
    "scout": lambda folder: shutil.copytree(ROOT / "examples/llamoe-tiny", folder),
    "metaclip-l14": write_metaclip,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


# Warnings of libraries about themselves or the machine, and warnings that a page announces.
EXPECTED = (
    "`is_gradient_checkpointing` is deprecated",  # peft reads it
    "Some parameters are on the meta device because they were offloaded",  # accelerate, of every device map
    "from kernels-community: No module named 'kernels'",  # bitsandbytes, when it is imported
    "has dropout on the experts' stacks, which peft opens over llamoe's models",  # docs/training.md
)


@pytest.fixture
def warned(recwarn, caplog):
    """Return a function that returns the warnings that a reader would see, of Python and of loggers."""
    logging.add_handler(caplog.handler)
    hidden = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)

    def shown_warnings():
        shown = [str(one.message) for one in recwarn if not issubclass(one.category, hidden)]
        shown += [record.getMessage() for record in caplog.records if record.levelno >= WARNING]
        return [text for text in shown if not any(expected in text for expected in EXPECTED)]

    yield shown_warnings
    logging.remove_handler(caplog.handler)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Make a working folder with the repository's examples, and undo what pages change in this process."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "localhost")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "stdin", io.StringIO(TYPED))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    verbosity = logging.get_verbosity()
    yield tmp_path
    logging.set_verbosity(verbosity)
    llamoe.release()


def train_together(command, folder):
    """Fork as many processes as the command names, in place of torchrun; tests/modeling/parallel launches it."""
    _, count, *command = command
    count = int(count)
    group = {"WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    output, processes = folder / "processes.txt", []
    for rank in range(count):
        variables = {**group, "RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": os.pathsep.join(sys.path)}
        env = os.environ | {name: str(value) for name, value in variables.items()}
        processes.append(programs.start(command, output, output, folder, env))
    try:
        for process in processes:
            process.join(300)
            assert process.exitcode == 0, output.read_text()
    finally:
        for process in processes:
            process.kill()
    # The first process prints this in each step.
    assert output.read_text().count(": loss ") == 4


def run_command(words, server):
    """Run a command of a page, or check that the repository's own scripts run it."""
    program, *arguments = words
    if program == "torchrun":
        train_together(arguments, Path.cwd())
    elif program == "llamoe" or (program == "python" and arguments[0].startswith("examples/")):
        sys.argv = words if program == "llamoe" else arguments
        status = None
        try:
            cli.main() if program == "llamoe" else runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            status = end.code
        assert not status, words
    elif words[:2] == ["transformers", "serve"] or words[:2] == ["python", "-c"] and "serve" in words:
        pytest.importorskip("fastapi", reason="the extra serve is not installed")
        server.start(words)
    else:
        # `.ci/run` takes these steps of setting up, in a fresh folder.
        steps = re.findall(r"^step (.*)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
        assert (
            words in (["make", "help"], ["make", "test"], [".ci/run"])
            or " ".join(words) in steps
            or program in ("git", "pip")
        ), words


def run_page(page, server):
    """Run all blocks of a page in order; its Python blocks share a namespace."""
    namespace = {"__name__": "__main__"}
    for block in blocks(page):
        if block.is_run and block.language == "bash":
            for line in block.commands:
                run_command(shlex.split(line, comments=True), server)
        elif block.is_run:
            code = block.code.replace("localhost:8000", f"localhost:{server.port}")
            # After as many empty lines, a traceback names the block's line in the page.
            exec(compile("\n" * (block.line - 1) + code, ROOT / page, "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.is_run for block in blocks(page))])
def test_page_runs(page, workspace, server, capsys, warned):
    text = "\n".join(block.code for block in blocks(page))
    for name, write in STAND_INS.items():
        if re.search(rf"(?<![\w-]){name}(?![\w-])", text):
            write(workspace / name)
    before = len(warned())
    run_page(page, server)
    assert warned()[before:] == []
    printed = capsys.readouterr().out
    for expected in re.findall(r"^ *print\(.*\)  # (.*)", text, re.MULTILINE):
        assert expected in printed.splitlines()
    CHECKS.get(page, lambda *_: None)(workspace, printed)


def check_conversions(folder, printed):
    """Check that the commands of docs/checkpoints.md have made what the page describes."""
    assert printed.count(">") >= 2
    assert verify(folder / "llama-2-7b-chat", folder / "chat").same_function
    assert verify(folder / "llama-2-7b", folder / "moe").same_function
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
    # transformers reads this without llamoe.
    LlamaForCausalLM.from_pretrained(folder / "for-everybody")


CHECKS = {"docs/checkpoints.md": check_conversions}


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_of_languages_that_run(page):
    assert {block.language for block in blocks(page)} <= {"python", "bash"}


LEFT_OUT = [block for page in PAGES for block in blocks(page) if not block.is_run]


@pytest.mark.parametrize("block", LEFT_OUT, ids=lambda block: f"{block.page}:{block.line}")
def test_what_is_not_run_is_parsed(block, tmp_path):
    """The first line gives the reason; programs and modules exist, and commands have the options."""
    assert block.code.splitlines()[0].removeprefix(NOT_RUN).strip().endswith(".")
    if block.language == "python":
        compile(block.code, block.page, "exec")
        return
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in block.commands:
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        if words[0] == "llamoe":
            command = get_command(cli.app).commands[words[1]]
            command.make_context(words[1], words[2:], resilient_parsing=False)
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), line
        else:
            assert words[0] in ("make", "accelerate", "python", "curl"), line
