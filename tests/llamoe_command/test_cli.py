"""Test the command: options reach the library's functions, results are text or JSON, errors set the exit status."""

import inspect as signatures
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from support import programs
from support.models import make_asymmetric
from support.paths import TINY
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import llamoe
from llamoe import conversion
from llamoe_command import cli

MACHINE = ("gpus", "gpu_memory", "ram", "bits", "quantization", "prefill", "headroom")
COMMANDS = ("convert", "vision", "upcycle", "gqa", "assemble", "quantize", "inspect", "verify")
# Commands that do not only call one function of `llamoe.conversion`.
OTHERS = ("chat", "doctor")
DECLARED = {command.callback.__name__: command.callback for command in cli.app.registered_commands}


@pytest.fixture
def source(tmp_path):
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=88, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    make_asymmetric(LlamaForCausalLM(config)).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def run(capsys, *words):
    """Run the command in this process; return its exit status, standard output and standard error."""
    status = 0
    try:
        cli.main([str(word) for word in words])
    except SystemExit as end:
        status = end.code or 0
    return status, *capsys.readouterr()


def test_convert_applies_its_options(source, tmp_path, capsys):
    status, out, _ = run(
        capsys, "convert", source, tmp_path / "out", "--dtype", "bfloat16", "--shard-size", "60KB"
    )
    assert status == 0
    assert "bytes" not in out
    assert "model-00001-of-" in out
    assert all(
        tensor.dtype == torch.bfloat16
        for tensor in load_file(next((tmp_path / "out").glob("*-00002-*"))).values()
    )


def test_json_is_the_report(source, tmp_path, capsys):
    status, out, err = run(capsys, "convert", source, tmp_path / "out", "--json", "--dry-run")
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert report["dry_run"]
    assert report["files"] == ["model.safetensors"]
    assert report["kind"] == "hf"
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_line_and_status_2(source, tmp_path, capsys):
    status, out, err = run(capsys, "convert", tmp_path / "nothing", tmp_path / "out")
    assert (status, out) == (2, "")
    assert err == f"llamoe: {tmp_path / 'nothing'}: no such file or folder.\n"
    status, out, _ = run(capsys, "convert", source, source, "--json")
    assert status == 2
    assert json.loads(out)["error"].startswith(str(source))
    assert run(capsys, "convert", source)[0] == 2
    assert run(capsys, "convert", source, tmp_path / "out", "--to", "gguf")[0] == 2


def test_failing_disk_is_status_3(source, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    status, _, err = run(capsys, "convert", source, tmp_path / "out")
    assert status == 3
    assert "No space left on device" in err
    monkeypatch.undo()
    assert run(capsys, "convert", source, tmp_path / "out", "--resume")[0] == 0


@pytest.mark.parametrize("words", [["convert", "one"], ["convert", "a", "b", "--to", "gguf"], ["fly"], []])
def test_wrong_options_are_reported_in_json_too(capsys, words):
    status, out, err = run(capsys, *words, "--json")
    assert status == 2
    assert json.loads(out)["status"] == 2
    assert err


def test_interruption_is_one_line_and_status_130(source, tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    status, _, err = run(capsys, "convert", source, tmp_path / "out")
    assert status == 130
    assert err.startswith("llamoe: interrupted; --resume")


def test_verify_sets_the_exit_status(source, tmp_path, capsys):
    run(capsys, "convert", source, tmp_path / "same", "--shard-size", "60KB")
    status, out, _ = run(capsys, "verify", source, tmp_path / "same", "--tokens", "8")
    assert status == 0
    assert "every number" in out
    model = LlamaForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "other")
    status, out, _ = run(capsys, "verify", source, tmp_path / "other", "--json")
    assert status == 1
    assert json.loads(out)["same_function"] is False
    status, out, _ = run(capsys, "verify", source, tmp_path / "other", "--no-logits", "--json")
    assert status == 1
    assert json.loads(out)["verdict"] == "different"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (
            {"dtype": "bfloat16", "use_cache": False, "_name_or_path": "x", "transformers_version": "4.31.0"},
            0,
        ),
        ({"pad_token_id": 5, "eos_token_id": [2, 7], "attention_dropout": 0.1, "pretraining_tp": 2}, 0),
        ({"model_type": "llamoe_dense", "rope_interleave": True}, 1),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}, 1),
        ({"rms_norm_eps": 1e-3}, 1),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}, 1),
    ],
)
def test_verify_compares_fields_that_change_the_output(fields, status, source, tmp_path, capsys):
    other = shutil.copytree(source, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **fields}))
    exit_status, out, _ = run(capsys, "verify", source, other, "--no-logits", "--json")
    assert exit_status == status
    assert json.loads(out)["verdict"] == {0: "equal", 1: "different"}[status]


def test_quantize_prints_the_bytes_of_each_part(tmp_path, capsys):
    config = llamoe.LlamoeMixtralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3,
    )  # fmt: skip
    make_asymmetric(llamoe.LlamoeMixtralForCausalLM(config).bfloat16()).save_pretrained(tmp_path / "model")
    words = ("quantize", tmp_path / "model", tmp_path / "packed", "--to", "int4")
    status, out, _ = run(capsys, *words, "--keep", "q_proj", "--keep", "k_proj", "--no-search")
    assert status == 0
    assert re.search(
        r"int4 in groups of 32, experts and linear layers, without q_proj, k_proj: 4 weights", out
    )
    # 3 experts of 3 * 64 * 96 weights take 2 bytes each; int4 takes half a byte, and 4 bytes for each group of 32.
    assert re.search(r"^  experts +0\.11 MB, 34\.56 kB$", out, re.MULTILINE)
    assert re.search(r"^  in all +0\.\d\d MB, \d\d\.\d\d kB$", out, re.MULTILINE)
    status, out, _ = run(capsys, "inspect", tmp_path / "packed")
    assert status == 0
    assert re.search(r"^  format +int4 in groups of 32, .* without q_proj, k_proj$", out, re.MULTILINE)
    status, _, err = run(capsys, "upcycle", tmp_path / "packed", tmp_path / "more", "--experts", "4")
    assert status == 2
    assert "is quantized already" in err and err.count("\n") == 1
    assert run(capsys, *words)[0] == run(capsys, "quantize", tmp_path / "model", tmp_path / "other")[0] == 2


def test_inspect_prints_sections(source, capsys):
    status, out, _ = run(capsys, "inspect", source, "--context", "512")
    assert status == 0
    assert "parameters" in out
    assert "bfloat16" in out
    options = ["--plan", "--gpus", "1", "--gpu-memory", "24GB", "--ram", "64GB", "--quantization", "int4"]
    status, out, _ = run(capsys, "inspect", "llama-4-scout", *options)
    assert status == 0 and "routed experts are in RAM" in out
    wrongs = (["--plan", "--gpus", "-1"], ["--ram", "3GB"], ["--plan", "--bits", "5"], ["--headroom", "1GB"])
    for wrong in (
        *wrongs,
        ["--save", "x.json"],
        ["--plan", "--prefill", "0"],
    ):
        status, out, err = run(capsys, "inspect", "llama-4-scout", *wrong)
        assert status == 2 and not out and err.count("\n") == 1


def test_a_saved_plan_equals_plan_placement_and_loads(tmp_path, capsys):
    model = llamoe.LlamoeForConditionalGeneration.from_pretrained(TINY, dtype="auto")
    machine = {"gpus": 0, "ram": "3MB", "headroom": "100KB"}
    words = [word for name, value in machine.items() for word in (f"--{name}", str(value))]
    words += [
        "--context",
        "40",
        "--prefill",
        "9",
        "--batch",
        "2",
        "--plan",
        "--save",
        str(tmp_path / "plan.json"),
    ]
    assert run(capsys, "inspect", TINY, *words)[0] == 0
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved == llamoe.plan_placement(TINY, **machine, context=40, prefill=9, batch=2).arguments()
    assert saved["device_map"]["experts"] == "disk"
    placed = type(model).from_pretrained(TINY, **saved)
    ids = torch.arange(20, 31)[None]
    assert torch.equal(placed(ids).logits, model(ids).logits)
    placed.close()


@pytest.mark.parametrize("content", ["{broken", "[1]", '{"unknown": 1}'])
def test_a_file_that_is_not_a_plan_is_refused(content, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    plan.write_text(content)
    status, out, err = run(capsys, "chat", TINY, "--plan", str(plan))
    assert status == 2 and not out
    assert (
        err == f"llamoe: --plan {plan}: not a plan; `llamoe inspect FOLDER --plan --save FILE` writes one.\n"
    )


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("name", [*COMMANDS, *OTHERS])
def test_help_breaks_neither_types_nor_examples(name, width):
    done = CliRunner().invoke(
        cli.app, [name, "-h"], env={"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)}
    )
    lines = [line.strip(" │") for line in done.output.splitlines()]
    examples = [line.strip() for line in signatures.getdoc(DECLARED[name]).splitlines()]
    examples = [line for line in examples if line.startswith("llamoe ")]
    assert examples
    assert set(examples) <= set(lines)
    # typer prints a range behind a type, as in <int range> [0<=x<=65535].
    plain = [line.replace("<=", "") for line in lines]
    assert [line for line in plain if line.count("<") != line.count(">")] == []


def test_version_is_printed():
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"llamoe {llamoe.__version__}\n"


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("convert", {}),
        ("convert_vision", {}),
        ("upcycle", {"experts": 2}),
        ("merge_kv_heads", {"kv_heads": 1}),
        ("assemble", {"vision": "nothing"}),
        ("quantize", {"to": "int4"}),
    ],
)
def test_an_unknown_option_is_refused_before_any_work(name, needed, tmp_path):
    function = getattr(conversion, name)
    assert {"resume", "dry_run", "progress"} <= set(signatures.signature(function).parameters)
    with pytest.raises(TypeError, match=f"{name}.*shardsize"):
        function(tmp_path / "nothing", target=tmp_path / "to", shardsize="1GB", **needed)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_the_function_is_an_option_of_the_command(name):
    """Names and defaults are equal, except for arguments that cannot be given in a shell."""
    function = getattr(conversion, {"vision": "convert_vision", "gqa": "merge_kv_heads"}.get(name, name))
    wanted = dict(signatures.signature(function).parameters)
    if wanted.pop("machine", None) is not None:
        of_plan = signatures.signature(llamoe.plan_placement).parameters
        wanted |= {option: of_plan[option] for option in MACHINE}
    for other in ("progress", "by_layer", "vision"):
        wanted.pop(other, None)
    declared = signatures.signature(DECLARED[name]).parameters
    assert wanted.keys() <= declared.keys()
    # The command's default is the function's, or None; then the function's default applies.
    differ = {option for option in wanted if declared[option].default not in (wanted[option].default, None)}
    assert differ == set()


def test_help_and_errors_in_options_import_no_torch():
    """Importing torch takes seconds, which must not delay help or the message that a folder is missing."""
    cases = [
        (["--help"], 0),
        (["convert", "-h"], 0),
        (["doctor", "-h"], 0),
        (["--version"], 0),
        (["convert", "nowhere", "out"], 2),
        (["verify", "nowhere", "out"], 2),
        (["inspect", "nowhere/model"], 2),
        (["upcycle", "--expert", "8"], 2),
    ]
    code = f"""
import contextlib
import io
import sys
from llamoe_command.cli import main
for words, status in {cases}:
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main(words)
        except SystemExit as end:
            assert (end.code or 0) == status, (words, end.code)
    assert not status or errors.getvalue().strip(), words
    assert not {{"torch", "transformers", "llamoe"}} & set(sys.modules), words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_command_is_installed(source):
    """The command also runs as `python -m llamoe`."""
    done = programs.run(["-m", "llamoe", "inspect", source, "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["family"]
