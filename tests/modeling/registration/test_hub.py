"""Folders that load by `trust_remote_code=True` where nobody has imported llamoe."""

import importlib.util
import json
import os
import sys

import pytest
import torch
import transformers
from support import programs
from support.models import (
    MODELS,
    MULTIMODAL,
    dense_config,
    make_asymmetric,
    multimodal_config,
    text_config,
    vision_config,
)
from support.paths import TINY
from transformers import AutoConfig, AutoTokenizer

import llamoe

pytestmark = pytest.mark.slow

MODULE = "llamoe_hub.py"
HEADS = [
    ("LlamoeDenseForSequenceClassification", dense_config, "AutoModelForSequenceClassification"),
    ("LlamoeDenseForTokenClassification", dense_config, "AutoModelForTokenClassification"),
    ("LlamoeDenseForQuestionAnswering", dense_config, "AutoModelForQuestionAnswering"),
    ("LlamoeForSequenceClassification", text_config, "AutoModelForSequenceClassification"),
]
ALL = [(case.name, case.make_config, case.auto_class.__name__) for case in MODELS] + HEADS
BASES = {
    "LlamoeDenseConfig": "LlamoeDenseModel",
    "LlamoeMixtralConfig": "LlamoeMixtralModel",
    "LlamoeTextConfig": "LlamoeTextModel",
    "LlamoeVisionConfig": "LlamoeVisionModel",
    "LlamoeConfig": "LlamoeModel",
}


def make(name, make_config):
    return make_asymmetric(getattr(llamoe, name)(make_config()))


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def files(folder):
    return {path.name for path in folder.iterdir()}


def run_python(code, *arguments, modules):
    """Run code in a process that can import llamoe, with a cache of its own for the modules of model folders."""
    done = programs.run(["-c", code, *arguments], env={**os.environ, "HF_MODULES_CACHE": str(modules)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# What is written


@pytest.mark.parametrize(("name", "make_config", "auto"), ALL, ids=[row[0] for row in ALL])
def test_folder_says_how_it_is_loaded(name, make_config, auto, tmp_path):
    model = make(name, make_config)
    model.save_pretrained(tmp_path)
    config_class = type(model.config).__name__
    expected = {
        "AutoConfig": f"llamoe_hub.{config_class}",
        "AutoModel": f"llamoe_hub.{BASES[config_class]}",
        auto: f"llamoe_hub.{name}",
    }
    if name == "LlamoeForConditionalGeneration":
        expected["AutoModelForMultimodalLM"] = f"llamoe_hub.{name}"
    assert read_config(tmp_path)["auto_map"] == expected
    module = (tmp_path / MODULE).read_text()
    assert len(module.splitlines()) < 30 and "torch" not in module
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".py", ".safetensors"}
    assert [path.name for path in tmp_path.glob("*.py")] == [MODULE]


def test_stock_layout_has_none_and_takes_ours_away(tmp_path):
    model = make("LlamoeDenseForCausalLM", dense_config)
    model.save_pretrained(tmp_path)
    (tmp_path / "notes.py").write_text("# a user's own\n")
    model.save_pretrained(tmp_path, layout="stock")
    assert "auto_map" not in read_config(tmp_path) and read_config(tmp_path)["model_type"] == "llama"
    assert MODULE not in files(tmp_path) and "notes.py" in files(tmp_path)
    (tmp_path / MODULE).write_text("# somebody else's file of that name\n")
    model.save_pretrained(tmp_path, layout="stock")
    assert MODULE in files(tmp_path)


def test_config_by_itself(tmp_path):
    for make_config in (dense_config, text_config, vision_config, multimodal_config):
        config = make_config()
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        name = type(config).__name__
        assert files(folder) == {"config.json", MODULE}
        assert read_config(folder)["auto_map"] == {
            "AutoConfig": f"llamoe_hub.{name}",
            "AutoModel": f"llamoe_hub.{BASES[name]}",
        }
        loaded = AutoConfig.from_pretrained(folder)
        assert type(loaded) is type(config) and loaded == config
        config.to_json_file(tmp_path / "other.json")
        assert "auto_map" not in json.loads((tmp_path / "other.json").read_text())


def test_what_was_read_is_not_written_again(tmp_path):
    """Entries of `auto_map` that a folder had are replaced by those of the class that is saved."""
    make("LlamoeDenseForCausalLM", dense_config).save_pretrained(tmp_path)
    content = read_config(tmp_path)
    content["auto_map"] = {auto: f"someone/else--{entry}" for auto, entry in content["auto_map"].items()}
    content["auto_map"]["AutoModelForMaskedLM"] = "modeling_other.Other"
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = llamoe.LlamoeDenseForSequenceClassification.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "again")
    assert read_config(tmp_path / "again")["auto_map"] == {
        "AutoConfig": "llamoe_hub.LlamoeDenseConfig",
        "AutoModel": "llamoe_hub.LlamoeDenseModel",
        "AutoModelForSequenceClassification": "llamoe_hub.LlamoeDenseForSequenceClassification",
    }
    model.save_pretrained(tmp_path / "stock", layout="stock")
    assert "auto_map" not in read_config(tmp_path / "stock")


@pytest.mark.parametrize("case", [MODELS[0], MULTIMODAL], ids=lambda case: case.name)
def test_registering_for_auto_classes_copies_nothing(case, tmp_path):
    model = case.make()
    model.register_for_auto_class(case.auto_class.__name__)
    model.config.register_for_auto_class()
    assert not model.is_remote_code() and not model.config.is_remote_code()
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.py")] == [MODULE]
    assert read_config(tmp_path)["auto_map"][case.auto_class.__name__] == f"llamoe_hub.{case.name}"


def test_subclass_of_a_user_is_exported_as_usual(tmp_path):
    """transformers copies the file of the user's class; its base class comes from the installed llamoe."""
    source = tmp_path / "my_model.py"
    source.write_text(
        "from llamoe import LlamoeDenseForCausalLM\n\n\nclass Mine(LlamoeDenseForCausalLM):\n    pass\n"
    )
    spec = importlib.util.spec_from_file_location("my_model", source)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_model"] = module
    try:
        spec.loader.exec_module(module)
        module.Mine.register_for_auto_class("AutoModelForCausalLM")
        model = make_asymmetric(module.Mine(dense_config()))
        for folder in (tmp_path / "once", tmp_path / "twice"):
            model.save_pretrained(folder)
            assert {path.name for path in folder.glob("*.py")} == {MODULE, "my_model.py"}
            assert read_config(folder)["auto_map"] == {
                "AutoConfig": "llamoe_hub.LlamoeDenseConfig",
                "AutoModel": "llamoe_hub.LlamoeDenseModel",
                "AutoModelForCausalLM": "my_model.Mine",
            }
    finally:
        del sys.modules["my_model"]


# Loading


LOAD = """
import json, os, sys
import torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

root, found = sys.argv[1], {}
for name in sorted(os.listdir(root)):
    try:
        AutoModel.from_pretrained(f"{root}/{name}", trust_remote_code=False)
    except ValueError as error:
        found[name] = {"refused": str(error)}
found["tokenizer"] = AutoTokenizer.from_pretrained(f"{root}/LlamoeDenseForCausalLM")("a red circle")["input_ids"]
assert "llamoe" not in sys.modules

from transformers.cli.serving.model_manager import ModelManager
manager = ModelManager(trust_remote_code=True, device="cpu", model_timeout=-1)
served, tokenizer = manager.load_model_and_processor(f"{root}/LlamoeDenseForCausalLM@main")
found["served"] = [type(served).__name__, manager.get_model_modality(served, tokenizer).name]

def outputs(model, name):
    with torch.no_grad():
        return model(**torch.load(f"{root}/{name}/inputs.pt"))[0]

for name in sorted(os.listdir(root)):
    auto = getattr(transformers, json.load(open(f"{root}/{name}/auto.json")))
    model = auto.from_pretrained(f"{root}/{name}", trust_remote_code=True)
    import llamoe
    first = outputs(model, name)
    model.save_pretrained(f"{root}/{name}/again")
    again = auto.from_pretrained(f"{root}/{name}/again", trust_remote_code=True)
    base = AutoModel.from_pretrained(f"{root}/{name}/again", trust_remote_code=True)
    found[name].update(
        ours=type(model) is type(again) is getattr(llamoe, name),
        config=type(model.config) is getattr(llamoe, type(model.config).__name__),
        base=type(base).__name__,
        output=(first - torch.load(f"{root}/{name}/expected.pt")).abs().max().item(),
        again=(outputs(again, name) - first).abs().max().item(),
        files=sorted(os.listdir(f"{root}/{name}/again")),
    )
    if model.can_generate():
        inputs = torch.load(f"{root}/{name}/inputs.pt")
        one, two = (m.generate(**inputs, max_new_tokens=5, do_sample=False) for m in (model, again))
        found[name]["generated"] = [one.shape[1] - inputs["input_ids"].shape[1], torch.equal(one, two)]
from transformers.dynamic_module_utils import get_class_from_dynamic_module
reference = AutoConfig.from_pretrained(f"{root}/LlamoeModel").auto_map["AutoModel"]
found["dynamic"] = get_class_from_dynamic_module(reference, f"{root}/LlamoeModel") is llamoe.LlamoeModel
print()
print(json.dumps(found))
"""


@pytest.fixture
def one_thread():
    """Compute with one thread, as the other process does: the order of sums depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_round_trip_without_our_import(tmp_path, one_thread):
    """A script that imports only transformers loads, saves and loads again; transformers' server loads, too."""
    root = tmp_path / "folders"
    without = ("LlamoeDenseModel", "LlamoeTextModel")
    chosen = [row for row in ALL[: len(MODELS) + 1] if row[0] not in without]
    generative = set()
    for name, make_config, auto in chosen:
        model = make(name, make_config)
        model.save_pretrained(root / name, max_shard_size="40KB" if name == "LlamoeForCausalLM" else "5GB")
        case = next((case for case in MODELS if case.name == name), MODELS[0])
        inputs = case.inputs(padding=(5, 0, 3), length=31)
        with torch.no_grad():
            torch.save(model(**inputs)[0], root / name / "expected.pt")
        torch.save(inputs, root / name / "inputs.pt")
        (root / name / "auto.json").write_text(json.dumps(auto))
        generative |= {name} if model.can_generate() else set()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.save_pretrained(root / "LlamoeDenseForCausalLM")
    found = run_python(LOAD, root, modules=tmp_path / "modules")
    assert found.pop("tokenizer") == tokenizer("a red circle")["input_ids"]
    assert found.pop("served") == ["LlamoeDenseForCausalLM", "LLM"]
    assert found.pop("dynamic") is True
    assert found.keys() == {name for name, _, _ in chosen}
    for name, _, _ in chosen:
        entry = found[name]
        assert "contains custom code" in entry["refused"] and "`trust_remote_code=True`" in entry["refused"]
        assert entry["ours"] and entry["config"] and entry["output"] == entry["again"] == 0, (name, entry)
        assert entry["base"] in BASES.values() and MODULE in entry["files"]
        assert [file for file in entry["files"] if file.endswith(".py")] == [MODULE]
        assert entry.get("generated") == ([5, True] if name in generative else None), name


# What transformers looks up by name


def test_tools_that_go_by_names_know_ours():
    names = transformers.models.auto.modeling_auto
    assert names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["llamoe_dense"] == "LlamoeDenseForCausalLM"
    assert names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["llamoe_text"] == "LlamoeForCausalLM"
    assert names.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["llamoe"] == "LlamoeForConditionalGeneration"
    for name, _, _ in ALL:
        assert getattr(transformers, name) is getattr(llamoe, name)
