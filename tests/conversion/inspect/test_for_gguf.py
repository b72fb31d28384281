"""`llamoe inspect --for gguf`: what llama.cpp makes of a checkpoint, and what its converter needs before."""

import json
import shutil

import pytest
from support.models import dense_config, draw, text_config
from support.paths import EXAMPLES

import llamoe
from llamoe import conversion
from llamoe.conversion import convert, inspect, quantize
from llamoe_command import cli

pytestmark = pytest.mark.slow

FIXED = dict(attention_chunk_size=8192, floor_scale=8192)
TINY = EXAMPLES / "llamoe-tiny"


@pytest.fixture(scope="module")
def of_pictures():
    """Of a multimodal model, whatever else there is to say."""
    return inspect("llama-4-scout", reader="gguf").gguf_notes


def run(capsys, *words):
    """Exit status and what is printed."""
    status = 0
    try:
        cli.main(["inspect", *map(str, words)])
    except SystemExit as end:
        status = end.code or 0
    return status, capsys.readouterr().out


@pytest.fixture
def stock(tmp_path):
    convert(TINY, tmp_path / "stock", layout="stock")
    return tmp_path / "stock"


def test_nothing_is_said_unless_somebody_asks(capsys):
    found = inspect(TINY)
    assert found.gguf is None
    assert found.gguf_notes == []
    assert "gguf" not in dict(found.sections())
    assert run(capsys, "mistral-7b-v0.1")[0] == 0


def test_a_folder_that_the_converter_reads(stock, of_pictures, capsys):
    found = inspect(stock, reader="gguf")
    assert found.gguf == []
    assert found.gguf_notes == of_pictures
    assert dict(found.sections())["gguf"][0] == ("", "llama.cpp computes this model as it is")
    assert run(capsys, stock, "--for", "gguf")[0] == 0
    assert inspect("llama-3-8b", reader="gguf").gguf_notes == []


def test_what_is_to_do_before(stock, of_pictures, tmp_path, capsys):
    """It is no fault of the model: the exit status stays 0."""
    *pictures, step = inspect(TINY, reader="gguf").gguf_notes
    assert pictures == of_pictures
    assert "`llamoe convert PATH FOLDER --layout stock`" in step
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (stock / name).unlink()
    _, step = inspect(stock, reader="gguf").gguf_notes
    assert "tokenizer" in step
    status, out = run(capsys, stock, "--for", "gguf", "--json")
    assert status == 0
    assert json.loads(out)["gguf_notes"] == [*of_pictures, step]


@pytest.mark.parametrize("made", ["split", "packed", "meta"])
def test_other_forms_are_converted_before(made, stock, tmp_path):
    folder = tmp_path / "other"
    if made == "split":
        convert(stock, folder, experts="split")
    elif made == "packed":
        quantize(TINY, folder, to="int8")
    else:
        convert(stock, folder, to="meta")
    found = inspect(folder, reader="gguf")
    assert found.gguf == []
    assert any("--layout stock" in step for step in found.gguf_notes)
    # What the step gives is read.
    convert(folder, tmp_path / "again", layout="stock")
    assert not any("--layout stock" in step for step in inspect(tmp_path / "again", reader="gguf").gguf_notes)


def test_what_llama_cpp_would_misread_ends_with_1(tmp_path, capsys):
    draw(llamoe.LlamoeForCausalLM, text_config()).save_pretrained(tmp_path / "model", layout="stock")
    status, out = run(capsys, tmp_path / "model", "--for", "gguf", "--json")
    assert status == 1
    chunk, temperature = json.loads(out)["gguf"]
    assert chunk.startswith("attention_chunk_size = 16")
    assert temperature.startswith("attn_temperature_tuning = True, floor_scale = 8")
    status, out = run(capsys, "mistral-7b-v0.1", "--for", "gguf")
    assert status == 1
    assert "sliding_window = 4096" in out


def test_a_folder_whose_weights_others_packed(tmp_path):
    """It is described as far as it can be opened."""
    draw(llamoe.LlamoeDenseForCausalLM, dense_config(hidden_size=84)).save_pretrained(
        tmp_path, layout="stock"
    )
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}})
    )
    (problem,) = inspect(tmp_path, reader="gguf").gguf
    assert problem.startswith("quant_method = 'awq'")


def test_weights_without_a_configuration(stock, tmp_path):
    shutil.copy(stock / "model.safetensors", tmp_path / "alone.safetensors")
    (problem,) = inspect(tmp_path / "alone.safetensors", reader="gguf").gguf
    assert "no configuration" in problem


def test_another_reader_is_refused():
    with pytest.raises(ValueError, match="reader = 'onnx': valid are 'gguf' and None"):
        conversion.inspect(TINY, reader="onnx")


def test_a_configuration_alone_is_judged(tmp_path, capsys):
    file = tmp_path / "config.json"
    text_config(**FIXED).save_pretrained(tmp_path)
    assert inspect(file, reader="gguf").gguf == []
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_qk_norm": False}))
    assert run(capsys, file, "--for", "gguf")[0] == 1
