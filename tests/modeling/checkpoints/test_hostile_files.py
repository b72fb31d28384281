"""Files made to mislead, to hang or to take all memory are refused soon, by an error that names the file.

The fixture `guard` opens them in a process that has twenty seconds and a gigabyte more memory than it needs to start.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hostile_files import JSON, entry, safetensors
from support.spoilt_folders import FAMILIES, KINDS, edit, index_of, refused
from support.tables import in_turn

import llamoe

pytestmark = pytest.mark.slow

# The guard itself


def test_the_guard_sees_memory_and_time(guard):
    assert "MemoryError" in guard.run("allocate", gigabytes=2).kinds
    assert "OutOfTime" in guard.run("wait", limit=0.5, seconds=60).kinds
    assert guard.run("wait", seconds=0).kinds == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_folder_loads_under_guard(kind, model_folders, guard):
    assert guard.run("load", folder=model_folders / kind).kinds == []


# Configurations

# Of the fields with an upper bound: some that count layers or experts, and some that are the size of a tensor.
SIZES = {
    "dense": {"num_hidden_layers": 10**9, "vocab_size": 10**15},
    "text": {"num_local_experts": 2**40, "num_experts": 2**40, "no_rope_layer_interval": 10**300},
    "tower": {"num_hidden_layers": 10**9, "image_size": 2**40},
}


def sizes():
    for family, fields in SIZES.items():
        for field, value in fields.items():
            yield family, None, field, value
    for part, family in (("text_config", "text"), ("vision_config", "tower")):
        for field, value in SIZES[family].items():
            yield "multimodal", part, field, value


@pytest.mark.parametrize(("family", "part", "field", "value"), list(sizes()))
def test_size_beyond_reason(family, part, field, value, model_copy, guard):
    """`from_pretrained` and `inspect` refuse the value before they build anything of that size."""
    path = model_copy(family)
    content = json.loads((path / "config.json").read_text())
    (content[part] if part else content)[field] = value
    (path / "config.json").write_text(json.dumps(content))
    field = "num_local_experts" if field == "num_experts" else field
    says = rf"{field} = .*(beyond reason|out of range|must)"
    guard.refused("load", says, folder=path, name=FAMILIES[family][0].__name__)
    guard.refused("look", says, folder=path)
    guard.refused("look", says, folder=path / "config.json")


def test_a_configuration_without_end(model_copy, guard):
    path, refusal = model_copy("text"), r"at most \d+ were expected"
    edit(path / "config.json", layer_types=["full_attention"] * 3_000_000)
    guard.refused("load", refusal, folder=path, name="LlamoeForCausalLM")
    guard.refused("look", refusal, folder=path / "config.json")


# Which tensor, from where


@pytest.mark.parametrize("kind", ["sharded", "sharded_bin"])
def test_tensor_in_two_shards(kind, model_copy):
    """transformers would take the copy in the last file, whatever the index says."""
    path = model_copy(kind)
    shards = sorted({*json.loads(index_of(path).read_text())["weight_map"].values()})
    first, last = path / shards[0], path / shards[-1]
    read, write = (load_file, save_file) if kind == "sharded" else (torch.load, torch.save)
    name, value = next(iter(read(first).items()))
    write({**read(last), name: value + 1}, last)
    message = refused(path, f"{name}' is in .* too")
    assert str(first) in message and str(last) in message


OUTSIDE = [
    "../secret/{}", "/{}", "{absolute}", "inner/../../secret/{}", "..", "../secret/../secret/{}", "..\\secret\\{}",
    "c:\\{}", "a\0b", "", "0" * 5000,
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), in_turn(OUTSIDE, ["sharded", "sharded_bin"]))
def test_index_that_leaves_the_folder(kind, name, model_copy, model_folders, tmp_path):
    path = model_copy(kind)
    suffix = "safetensors" if kind == "sharded" else "bin"
    weight_map = json.loads(index_of(path).read_text())["weight_map"]
    secret = tmp_path / "secret"
    secret.mkdir()
    (path / "inner").mkdir()
    shard = weight_map["model.norm.weight"]
    moved = shutil.move(path / shard, secret / f"stolen.{suffix}")
    hostile = name.format(f"stolen.{suffix}", absolute=moved)
    changed = {key: hostile if file == shard else file for key, file in weight_map.items()}
    index_of(path).write_text(json.dumps({"metadata": {}, "weight_map": changed}))
    # transformers or the system refuses some of these names before our check.
    with pytest.raises((OSError, ValueError)):
        llamoe.LlamoeDenseForCausalLM.from_pretrained(path)


def test_config_that_names_weights_outside(model_copy, tmp_path):
    """transformers checks the name of the index that config.json gives, but not the files that the index names."""
    path = model_copy("sharded")
    index = json.loads(index_of(path).read_text())
    shard = index["weight_map"]["model.norm.weight"]
    shutil.move(path / shard, tmp_path / "stolen.safetensors")
    index["weight_map"] = {
        key: "../stolen.safetensors" if file == shard else file for key, file in index["weight_map"].items()
    }
    index_of(path).rename(path / "mine.safetensors.index.json")
    (path / "mine.safetensors.index.json").write_text(json.dumps(index))
    edit(path / "config.json", transformers_weights="mine.safetensors.index.json")
    refused(path, "stolen.safetensors: is named in .* outside")


@pytest.mark.parametrize("kind", KINDS)
def test_repository_in_the_cache(kind, model_folders, tmp_path):
    """A snapshot in the cache has links to files outside of its folder, and loads nevertheless."""
    place = tmp_path / "models--owner--name"
    snapshot = place / "snapshots/0123456789012345678901234567890123456789"
    shutil.copytree(model_folders / kind, place / "blobs")
    snapshot.mkdir(parents=True)
    for path in (place / "blobs").iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(snapshot.name)
    options = {"cache_dir": tmp_path, "local_files_only": True}
    weights = llamoe.LlamoeDenseForCausalLM.from_pretrained(model_folders / "single").state_dict()
    for folder, more in ((snapshot, {}), ("owner/name", options)):
        found = llamoe.LlamoeDenseForCausalLM.from_pretrained(folder, **more).state_dict()
        assert all(torch.equal(found[name], weights[name]) for name in weights)


# Files


def hole(file):
    """Make a file of a terabyte that takes no space on the disk."""
    file.touch()
    os.truncate(file, 2**40)


INDEX = "model.safetensors.index.json"
PAIR = "{" + ",".join(f'"x":{json.dumps(entry(shape, 0, 24))}' for shape in ([2, 3], [3, 2])) + "}"
# Files that can be read without end; nobody writes to the pipe.
ENDLESS = {"hole": hole, "pipe": os.mkfifo, "zeros": lambda file: file.symlink_to("/dev/zero")}
HEADERS = {
    "twice": safetensors(PAIR.encode(), bytes(24)),
    "twice by another spelling": safetensors(PAIR.replace("offsets", "\\u006fffsets").encode(), bytes(24)),
}
# The file, its content, and words of our error; None if any error that comes soon is enough, as transformers' own.
HOSTILE = {
    **{f"{file}: {what}": (file, make, None) for file in ("config.json", INDEX, "model.safetensors")
       for what, make in ENDLESS.items()},
    **{f"config.json: {what}": ("config.json", *row) for what, row in JSON.items()},
    **{f"{INDEX}: {what}": (INDEX, content, None) for what, (content, _) in JSON.items()},
    **{f"header: {what}": ("model.safetensors", make, "is damaged") for what, make in HEADERS.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file(name, model_copy, guard):
    file, content, says = HOSTILE[name]
    path = model_copy("sharded" if file == INDEX else "single")
    (path / file).unlink()
    if callable(content):
        content(path / file)
    else:
        (path / file).write_bytes(content.encode() if isinstance(content, str) else content)
    if says is not None:
        assert file in guard.refused("load", says, folder=path)
    else:
        outcome = guard.run("load", limit=10, folder=path)
        assert outcome.kinds and "OutOfTime" not in outcome.kinds, outcome
