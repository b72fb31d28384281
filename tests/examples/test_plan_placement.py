"""The example prints what the library plans, and its maps load; tests/planning has the plans' own tests."""

import json
import re
import sys

import pytest
import torch
from support import programs
from support.models import MODELS, draw, for_models, run, stock_multimodal_config
from support.paths import EXAMPLES, environment
from torch import nn
from transformers import Llama4ForConditionalGeneration
from transformers.quantizers.base import get_keys_to_not_convert

import llamoe
from llamoe.configuration import preset
from llamoe.planning.source import read_source

GB = 10**9
HEAD = next(case for case in MODELS if case.name == "LlamoeForConditionalGeneration")


@pytest.fixture(scope="module")
def planner():
    sys.path.insert(0, str(EXAMPLES))
    import plan_placement

    yield plan_placement
    sys.path.remove(str(EXAMPLES))


@pytest.fixture
def command(planner, monkeypatch, capsys):
    """Run the script's `main` with arguments, and give what it prints."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["plan_placement.py", *map(str, arguments)])
        planner.main()
        return capsys.readouterr().out

    return call


def table(output):
    """Device to weights, cache, sum and room in GB, and what it holds."""
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+|-)   (.*)$", output, re.MULTILINE)
    return {row[0]: (*map(float, row[1:4]), row[5]) for row in rows}


@pytest.mark.parametrize("name", ["LlamoeForCausalLM", "LlamoeForConditionalGeneration", "LlamoeVisionModel"])
def test_a_saved_map_loads_and_changes_no_bit(name, command, tmp_path):
    """The folder is stock's; what is saved goes into `from_pretrained` as it is."""
    case = next(case for case in MODELS if case.name == name)
    model, inputs = case.make(), case.inputs()
    model.save_pretrained(tmp_path, layout="stock")
    room = sum(parameter.nbytes for parameter in model.parameters()) * 0.7 / GB
    arguments = ["--gpus", 0, "--cpu-memory", room, "--headroom", 0, "--dtype", "float32", "--context", 20]
    output = command(tmp_path, *arguments, "--save", tmp_path / "map.json")
    device_map = json.loads((tmp_path / "map.json").read_text())
    assert set(device_map.values()) == {"cpu", "disk"} and str(tmp_path / "map.json") in output
    memory = re.search(r"experts_memory=(\d+)\)", output)
    assert bool(memory) == case.has_experts
    more = {"experts_memory": int(memory[1])} if memory else {}
    placed = case.model_class.from_pretrained(tmp_path, device_map=device_map, **more)
    if case.has_experts:
        assert table(output)["disk"][3].endswith("experts")
        assert placed.experts_statistics()
    else:
        on_disk = sum(parameter.nbytes for parameter in placed.parameters() if parameter.is_meta)
        assert 0 < on_disk < sum(parameter.nbytes for parameter in placed.parameters())
    assert torch.equal(run(placed, **inputs), run(model, **inputs))
    placed.close()
    assert command(tmp_path / "config.json", *arguments).splitlines()[1:-1] == output.splitlines()[1:-1]


def test_published_sizes(command):
    scout = table(command("llama-4-scout", "--gpus", 4))
    assert sum(row[0] for row in scout.values()) == pytest.approx(2 * 108.641793536, abs=0.05)
    assert sum(row[1] for row in scout.values()) == pytest.approx(48 * 8192 * 4096 / GB, abs=0.05)
    assert scout["0"][3].endswith("language_model.model.embed_tokens, language_model.model.layers.0-14")
    assert scout["cpu"][0] == scout["disk"][0] == 0 and scout["3"][3] == "nothing"
    one = command("llama-4-scout", "--gpus", 1, "--context", 131072, "--prefill", 4096)
    assert (
        "(12 layers x 131,072 tokens, 36 layers x 12,287 tokens) x 2 x 8 heads x 128 x 2 bytes x 1 rows"
        in one
    )
    assert table(one)["0"][1] == pytest.approx(8.25, abs=0.01) and table(one)["cpu"][0] > 100
    assert re.search(r"1\d\d\.\d\d GB of routed experts are in RAM, and experts_memory=\d+ bytes", one)
    assert "are on no accelerator" not in one
    small = command("llama-4-scout", "--gpus", 1, "--gpu-memory", 16)
    assert re.search(r"16\.\d\d GB are on no accelerator: every pass moves them to device 0\.", small)
    eight = table(command("llama-4-maverick", "--gpus", 8))
    assert eight["disk"][0] > 0 and sum(row[0] for row in eight.values()) == pytest.approx(803.17, abs=0.1)
    # Twelve cards hold all exactly, where nothing has to be brought.
    assert table(command("llama-4-maverick", "--gpus", 12))["disk"][0] == 0
    assert table(command("llama-4-maverick", "--gpus", 11))["cpu"][0] > 0
    dense = command("llama-2-7b", "--dtype", "float16")
    assert "x 4,096 tokens" in dense, "the default context is no longer than the model's"


def test_large_models_take_seconds_and_little_memory():
    """The memory is that of torch and transformers too, with which the process begins."""
    script = (
        "import pathlib, re, resource, runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        # Linux keeps the peak of the process that started this one, but not in its status.
        "status = pathlib.Path('/proc/self/status')\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+)', status.read_text())[1] if status.exists() else None\n"
        "print(peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
    )
    result = programs.run(
        ["-c", script, EXAMPLES / "plan_placement.py", "llama-4-maverick"], env=environment(), timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "401,583,781,376 parameters, 803.17 GB in bfloat16" in result.stdout
    unit = 1 if sys.platform == "darwin" else 1024
    assert unit * int(result.stderr.splitlines()[-1]) < 2 * GB


@for_models("is_head")
def test_quantized_sizes(case):
    """What is quantized is what transformers' bitsandbytes integration replaces, and experts, matrix by matrix."""
    config = case.make_config()
    model = case.make()
    kept = [*get_keys_to_not_convert(model), *model._keep_in_fp32_modules]
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(re.match(rf"{key}(\.|$)", name) for key in kept)
    }
    assert not [name for name in linear if "router" in name or "lm_head" in name]
    for bits, size in (
        (8, lambda weight: weight.numel() + 4 * weight.shape[0]),
        (4, lambda weight: (weight.numel() + 1) // 2 + 4 * ((weight.numel() + 63) // 64)),
    ):
        result = llamoe.plan_placement(config, gpus=[GB], ram=0, bits=bits, context=20, headroom=0)
        expected = 0
        for name, weight in model.named_parameters():
            if ".experts." in name:
                is_output_first = config.get_text_config().experts_are_output_first
                for matrix in weight if is_output_first else weight.mT:
                    expected += sum(map(size, matrix.chunk(2 if "gate_up" in name else 1)))
            else:
                expected += size(weight) if name in linear else 2 * weight.numel()
        assert result.device_map == {"": 0} and result.weights == {0: expected}


def test_quantized_mixtures_are_told_the_truth(command):
    output = command("llama-4-scout", "--dtype", "int4")
    # Half a byte, and a float32 scale for 64 weights.
    assert re.search(r"  experts +96,636,764,160 x 0\.5625 bytes", output)
    assert "linear layers and routed experts, as bitsandbytes stores them" in output
    assert "and bitsandbytes refuses that" not in output
    maverick = command("llama-4-maverick", "--dtype", "int4")
    assert "and bitsandbytes refuses that" not in maverick
    assert "Experts elsewhere are read as files have them: run `llamoe quantize IN OUT --to int4`" in maverick
    assert "and bitsandbytes refuses that" in command("llama-2-70b", "--dtype", "int4", "--gpu-memory", 24)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["llama-4-scut"], "no preset is called 'llama-4-scut': did you mean 'llama-4-scout'"),
        (["no/such/folder"], "no such folder or file: no/such/folder"),
        ([EXAMPLES], "no such file: .*config.json"),
        (["llama-2-7b", "--context", 8192], "context = 8192: should be tokens, from 1 to 4096"),
        (["llama-2-7b", "--context", 0], "context=0: give a whole number of at least 1"),
        (["llama-2-7b", "--prefill", 9000], "prefill=9000: give at most the tokens of context=4096"),
        (["llama-2-7b", "--gpus", -1], "--gpus must be at least 0 and finite, not -1"),
        (["llama-2-7b", "--batch", 0], "--batch must be at least 1 and finite, not 0"),
        (["llama-2-7b", "--gpu-memory", 4], "device (0|cpu) of 4 GB has no room beside headroom=4 GB"),
        (
            ["llama-2-7b", "--batch", 99],
            "the cache of 4096 tokens in 99 rows takes 212.6 GB, and device 0 has 76.0",
        ),
        (
            ["llama-2-7b", "--save", "/no/such/folder/map.json"],
            "--save /no/such/folder/map.json: there is no such folder",
        ),
        (["llama-2-7b", "--gpu-memory", "inf"], "--gpu-memory must be at least 0 and finite, not inf"),
        (["llama-2-7b", "--prefill", 0], "--prefill must be at least 1 and finite, not 0"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, says, command, capsys):
    with pytest.raises(SystemExit) as caught:
        command(*arguments)
    message = capsys.readouterr().err
    assert caught.value.code == 2 and re.search(says, message) and message.count("\n") == 1, message


def test_config_that_is_none(tmp_path, command, capsys):
    for content, says in (
        ("{", "config.json|Expecting"),
        ('{"model_type": "gpt2"}', "'gpt2'"),
        ("[]", "plan_pl"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(SystemExit):
            command(tmp_path)
        assert re.search(says, capsys.readouterr().err)


def test_stock_presets_and_folders_agree(tmp_path):
    """A stock folder is planned as what it is read as."""
    draw(Llama4ForConditionalGeneration, stock_multimodal_config()).save_pretrained(tmp_path)
    found = read_source(str(tmp_path))
    assert type(found.config) is llamoe.LlamoeConfig and found.stored
    assert llamoe.count_parameters(found.config).total == HEAD.make().num_parameters()
    found = read_source("llama-2-7b")
    assert found.config.to_dict() == preset("llama-2-7b").to_dict() and found.stored is None
