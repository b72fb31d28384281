"""For damaged or hostile folders a command's error names the file or key; none of their code runs, no target stays."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.conversions import META_LLAMA_2
from support.hostile_files import JSON, code, entry, safetensors
from support.models import draw, text_config

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert, inspect, quantize, verify

READERS = {
    "convert": lambda source, target: convert(source, target),
    "inspect": lambda source, target: inspect(source),
    "verify": lambda source, target: verify(source, source),
}
NORM, EXPERTS = "model.norm.weight", "model.layers.1.feed_forward.experts"
ONE_EXPERT = f"{EXPERTS}.2.up_proj.weight"
BEYOND = safetensors({NORM: entry([2**40], 0, 2**42)})
OUTSIDE = {NORM: "../one/model.safetensors"}
HQQ = {"quant_method": "hqq"}
PROJECTION = "model.layers.0.self_attn.{}_proj.weight"
WIDE = torch.zeros(32, 128).bfloat16()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Make undamaged folders: one file, several, experts one by one, a file of torch, Meta's format, int4."""
    root = tmp_path_factory.mktemp("folders")
    draw(llamoe.LlamoeForCausalLM, text_config()).save_pretrained(root / "one", layout="stock")
    convert(root / "one", root / "shards", shard_size="100KB")
    convert(root / "one", root / "split", experts="split")
    shutil.copytree(root / "one", root / "bin")
    torch.save(load_file(root / "bin/model.safetensors"), root / "bin/pytorch_model.bin")
    (root / "bin/model.safetensors").unlink()
    case = replace(META_LLAMA_2, params={**META_LLAMA_2.params, "n_layers": 2})
    case.write(root / "meta", case.weights(torch.bfloat16), 2)
    packable = llamoe.LlamoeDenseConfig(
        vocab_size=97, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    draw(llamoe.LlamoeDenseForCausalLM, packable).bfloat16().save_pretrained(root / "packable")
    quantize(root / "packable", root / "packed", to="int4")
    return root


def change(function):
    """Apply a function to the tensors of model.safetensors."""

    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        function(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def put(name, value):
    return change(lambda tensors: tensors.update({name: value}))


def lose(name):
    return change(lambda tensors: tensors.pop(name))


def write(name, content):
    def damage(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def cut(name, by=5):
    def damage(folder):
        path = next(folder.glob(name))
        os.truncate(path, path.stat().st_size - by)

    return damage


def remove(name):
    return lambda folder: sorted(folder.glob(name))[0].unlink()


def edit(name, **entries):
    def damage(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **entries}))

    return damage


def edit_quantization(**entries):
    def damage(folder):
        config = json.loads((folder / "config.json").read_text())
        edit("config.json", quantization_config={**config["quantization_config"], **entries})(folder)

    return damage


def index(function):
    def damage(folder):
        path = folder / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        function(content["weight_map"])
        path.write_text(json.dumps(content))

    return damage


def second_copy(folder):
    """Store a tensor in two shards."""
    shards = sorted(folder.glob("*.safetensors"))
    name, value = next(iter(load_file(shards[0]).items()))
    save_file({**load_file(shards[-1]), name: value + 1}, shards[-1])


def saved(content, **options):
    return lambda folder: torch.save(content, folder / "pytorch_model.bin", **options)


def pipe(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.unlink()
    os.mkfifo(shard)


# Name: the folder, the damage, and words of the error.
DAMAGE = {
    "no configuration": ("one", remove("config.json"), "unrecognised checkpoint format"),
    "empty": ("one", write("model.safetensors", b""), "model.safetensors"),
    "cut short": ("one", cut("model.safetensors"), "model.safetensors"),
    "a header without end": ("one", write("model.safetensors", safetensors(b"{" * 99)), "model.safetensors"),
    "a tensor beyond the end": ("one", write("model.safetensors", BEYOND), "model.safetensors"),
    "a pipe": ("shards", pipe, "model-00001"),
    "a missing tensor": ("one", lose(NORM), f"{NORM} missing"),
    "an unknown tensor": ("one", put("model.extra.weight", torch.ones(3)), "model.extra.weight"),
    "another shape": ("one", put(NORM, torch.ones(71)), NORM),
    "a dtype of no weight": ("one", put(NORM, torch.ones(72, dtype=torch.int8)), NORM),
    "a missing expert": ("split", lose(ONE_EXPERT), f"{ONE_EXPERT} missing"),
    "an expert twice": ("split", put(f"{EXPERTS}.gate_up_proj", torch.ones(5, 72, 112)), f"{EXPERTS}.gate_up_proj"),
    "a lost shard": ("shards", remove("model-00002*"), "model-00002"),
    "a shard cut short": ("shards", cut("model-00002*"), "model-00002"),
    "an index that leaves the folder": ("shards", index(lambda names: names.update(OUTSIDE)), "outside"),
    "a tensor in two shards": ("shards", second_copy, "is also in another file"),
    "one file beside shards": ("shards", write("model.safetensors", safetensors({})), "both"),
    "code in a pickle": ("bin", lambda folder: code(folder / "pytorch_model.bin"), "pytorch_model.bin"),
    "a list in a pickle": ("bin", saved([torch.ones(3)]), "not a dictionary"),
    "a number in a pickle": ("bin", saved({NORM: 3.5}), "missing"),
    "a key that is no name": ("bin", saved({3: torch.ones(2)}), "a key is 3"),
    "a sparse tensor": ("bin", saved({NORM: torch.eye(3).to_sparse()}), "pytorch_model.bin"),
    "a format before zip": ("bin", saved({}, _use_new_zipfile_serialization=False), "torch before 1.6 has to be saved"),
    "a pickle cut short": ("bin", cut("pytorch_model.bin", 1000), "pytorch_model.bin"),
    **{f"config.json: {name}": ("one", write("config.json", text), "config.json") for name, (text, _) in JSON.items()},
    "another architecture": ("one", edit("config.json", model_type="qwen2"), "qwen2"),
    "an unknown quantization": ("one", edit("config.json", quantization_config=HQQ), "hqq"),
    "layers beyond reason": ("one", edit("config.json", num_hidden_layers=2**40), "num_hidden_layers"),
    "a width beyond reason": ("one", edit("config.json", hidden_size=2**40), "hidden_size"),
    "int4: a missing scale": ("packed", lose(f"{PROJECTION.format('q')}_scale"), "q_proj.weight_scale missing"),
    "int4: missing codes": ("packed", lose(PROJECTION.format("q")), "q_proj.weight missing"),
    "int4: plain weights": ("packed", put(PROJECTION.format("k"), WIDE), "int4:32 stores it as uint8 [32, 64]"),
    "int4: an unknown tensor": ("packed", put("model.layers.0.scale", torch.zeros(3)), "model.layers.0.scale"),
    "int4: of a later llamoe": ("packed", edit_quantization(format_version=2), "format_version=2"),
    "int4: another format": ("packed", edit_quantization(weights="int5"), "weights='int5'"),
    "int4: no pattern of names": ("packed", edit_quantization(modules_to_not_convert=["("]), "unterminated"),
    "int4: larger groups": ("packed", edit_quantization(group_size=256), "int4:256 stores it as"),
    "Meta: an empty file": ("meta", write("consolidated.01.pth", b""), "consolidated.01.pth"),
    "Meta: a width beyond reason": ("meta", edit("params.json", dim=10**30), "params.json"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
@pytest.mark.parametrize("name", DAMAGE)
def test_every_reader_names_the_damage(name, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind, damage, words = DAMAGE[name]
    source, target = shutil.copytree(folders / kind, tmp_path / "source"), tmp_path / "target"
    damage(source)
    before = {path.name: path.lstat().st_mtime_ns for path in source.iterdir()}
    for reader in READERS.values():
        with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
            reader(source, target)
        assert str(source) in str(caught.value) or words in str(caught.value)
        assert not target.exists()
    assert {path.name: path.lstat().st_mtime_ns for path in source.iterdir()} == before
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_checkpoint_is_named(reader, tmp_path):
    for name, content in {"notes.txt": b"hello", "nothing.pt": b"", "list.json": b"[]"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "notes.txt", "nothing.pt", "list.json", "empty"):
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / name))):
            READERS[reader](tmp_path / name, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("kind", "value", "options"),
    [
        *((kind, value, {}) for kind in ("one", "bin", "meta") for value in (float("nan"), -float("inf"))),
        ("one", 1e6, {"dtype": "float16"}),
    ],
)
def test_nan_and_infinity_leave_no_target(kind, value, options, folders, tmp_path):
    source = shutil.copytree(folders / kind, tmp_path / "source")
    file = {"one": "model.safetensors", "bin": "pytorch_model.bin", "meta": "consolidated.01.pth"}[kind]
    tensors = load_file(source / file) if kind == "one" else torch.load(source / file)
    name = "layers.1.attention.wk.weight" if kind == "meta" else "model.layers.1.self_attn.k_proj.weight"
    tensors[name].view(-1)[-1] = value
    (save_file if kind == "one" else torch.save)(tensors, source / file)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.* in {options.get('dtype', '')}"):
        convert(source, tmp_path / "target", **options)
    assert not (tmp_path / "target").exists()
