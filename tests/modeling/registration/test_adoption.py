"""After `llamoe.adopt` unchanged scripts get our classes for stock folders; `llamoe.release` undoes it."""

import json

import pytest
import torch
import transformers
from support import programs
from support.chat_folders import write_llama
from support.models import (
    make_asymmetric,
    max_abs,
    stock_dense_config,
    stock_model,
    stock_multimodal_config,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from transformers.models.auto import modeling_auto

import llamoe

BASES = {
    "llama": "LlamoeDenseModel",
    "mistral": "LlamoeDenseModel",
    "ministral": "LlamoeDenseModel",
    "mixtral": "LlamoeMixtralModel",
    "llama4": "LlamoeModel",
    "llama4_text": "LlamoeTextModel",
    "llama4_vision_model": "LlamoeVisionModel",
}


@pytest.fixture(autouse=True)
def nothing_adopted():
    yield
    llamoe.release()


def answers():
    """Return the model class of each Auto class and stock config, and all entries added to the Auto classes."""
    autos = {
        name: auto._model_mapping
        for name, auto in vars(modeling_auto).items()
        if name.startswith("AutoModel") and getattr(auto, "_model_mapping", None) is not None
    }
    given = {
        (name, model_type): mapping[config_class]
        for name, mapping in autos.items()
        for model_type in BASES
        for config_class in [transformers.CONFIG_MAPPING[model_type]]
        if config_class in mapping
    }
    return given, {name: dict(mapping._extra_content) for name, mapping in autos.items()}


def is_ours(model_class):
    return model_class.__module__.startswith("llamoe.")


def adopted():
    """Return the stock model types for which an Auto class returns one of our classes."""
    given, _ = answers()
    return {model_type for (_, model_type), model_class in given.items() if is_ours(model_class)}


# Which classes


def test_auto_classes_of_stock_types_give_ours():
    before = answers()
    llamoe.adopt()
    given, _ = answers()
    assert set(before[0]) <= set(given)
    # We have no mixture with a head for question answering.
    assert {key for key, model_class in given.items() if not is_ours(model_class)} == {
        ("AutoModelForQuestionAnswering", "mixtral")
    }
    assert {model_type: given["AutoModel", model_type].__name__ for model_type in BASES} == BASES
    llamoe.release()
    assert answers() == before


@pytest.mark.parametrize(
    ("names", "types"),
    [
        (["llama"], {"llama"}),
        (["llama4"], {"llama4", "llama4_text", "llama4_vision_model"}),
        (["llama4_text"], {"llama4_text"}),
        (["llama", "llama4_text"], {"llama", "llama4_text"}),
        ([], set(BASES)),
    ],
)
def test_names_and_what_they_stand_for(names, types):
    before = answers()
    llamoe.adopt(*names)
    assert adopted() == types
    # A second adoption and a second release do nothing.
    llamoe.adopt(*names)
    llamoe.release(*names)
    llamoe.release(*names)
    assert answers() == before


def test_a_part_can_be_released():
    llamoe.adopt("llama", "llama4")
    llamoe.release("llama")
    assert adopted() == {"llama4", "llama4_text", "llama4_vision_model"}
    llamoe.release("llama4_text", "llama")
    assert adopted() == {"llama4", "llama4_vision_model"}


@pytest.mark.parametrize("function", ["adopt", "release"])
def test_unknown_model_type(function):
    for wrong in ("qwen2", "llamoe", "LLAMA", "", None, ["llama"], LlamaConfig):
        with pytest.raises(ValueError, match=rf"llamoe\.{function}"):
            getattr(llamoe, function)("llama", wrong)
        assert adopted() == set()


def test_blocks_nest_and_restore_what_was_before():
    before = answers()
    with llamoe.adopt("llama"):
        assert adopted() == {"llama"}
        with llamoe.adopt("llama", "llama4_text"):
            assert adopted() == {"llama", "llama4_text"}
        assert adopted() == {"llama"}
        # An exception ends the adoption of its block.
        with pytest.raises(KeyError), llamoe.adopt("llama4"):
            raise KeyError
        assert adopted() == {"llama"}
    assert answers() == before


def test_entries_of_others_come_back(monkeypatch):
    class Theirs(LlamaForCausalLM):
        pass

    entries = AutoModelForCausalLM._model_mapping._extra_content
    monkeypatch.setitem(entries, LlamaConfig, Theirs)
    with llamoe.adopt("llama"):
        assert entries[LlamaConfig] is llamoe.LlamoeDenseForCausalLM
    assert entries[LlamaConfig] is Theirs
    with llamoe.adopt("llama"):
        # An entry that others make during an adoption stays.
        entries[LlamaConfig] = Llama4ForCausalLM
    assert entries[LlamaConfig] is Llama4ForCausalLM


# Loading

SCRIPT = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, pipeline
from PIL import Image

root = sys.argv[1]
found = {}

def note(name, model, result):
    found[name] = {"class": type(model).__module__ + "." + type(model).__name__, "result": result}

tokenizer = AutoTokenizer.from_pretrained(root + "/lm")
model = AutoModelForCausalLM.from_pretrained(root + "/lm")
with torch.no_grad():
    note("model", model, model(**tokenizer("a red circle on the left", return_tensors="pt")).logits.tolist())
pipe = pipeline("text-generation", root + "/lm")
note("text", pipe.model, pipe("what is in the", max_new_tokens=12, do_sample=False))
pipe = pipeline("text-classification", root + "/sequences", top_k=None)
note("sequences", pipe.model, pipe(["this is a red circle", "what ?"]))
picture = Image.new("RGB", (60, 40), (200, 30, 60))
processor = AutoProcessor.from_pretrained(root + "/pictures")
pipe = pipeline("image-text-to-text", root + "/pictures", processor=processor)
asked = dict(text="<|image|> what is this ?", images=picture, max_new_tokens=12)
note("pictures", pipe.model, pipe(**asked, generate_kwargs={"do_sample": False}))
pipe = pipeline("text-generation", root + "/pictures")
note("text of pictures", pipe.model, pipe("what is in the", max_new_tokens=12, do_sample=False))
print(json.dumps(found, default=float))
"""


def assert_close(given, expected):
    if isinstance(expected, dict | list):
        assert type(given) is type(expected) and len(given) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_close(given[key], expected[key])
    else:
        is_number = isinstance(expected, float)
        assert given == (pytest.approx(expected, abs=2e-5) if is_number else expected)


@pytest.mark.slow
def test_unchanged_script_gets_our_classes_and_stock_results(tmp_path):
    """A script runs on stock's folders in two processes, of which the second adopts stock's types first."""
    pytest.importorskip("torchvision", reason="pictures need the extra 'vision'")
    from support.pictures import make_processor

    write_llama(tmp_path / "lm")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "lm")
    config = stock_dense_config(vocab_size=len(tokenizer), num_labels=5, pad_token_id=tokenizer.pad_token_id)
    stock_model(LlamaForSequenceClassification, config).save_pretrained(tmp_path / "sequences")
    tokenizer.save_pretrained(tmp_path / "sequences")
    processor = make_processor(max_patches=4)
    vocabulary = processor.tokenizer.get_vocab()
    config = stock_multimodal_config({"vocab_size": len(vocabulary), "eos_token_id": vocabulary["<|eot|>"]})
    config.image_token_index = vocabulary["<|patch|>"]
    stock_model(Llama4ForConditionalGeneration, config).save_pretrained(tmp_path / "pictures")
    processor.save_pretrained(tmp_path / "pictures")
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = [str(tmp_path / "script.py"), str(tmp_path)]
    runner = "import llamoe, runpy, sys; llamoe.adopt(); sys.argv.pop(0); runpy.run_path(sys.argv[0])"
    results = []
    for command in (arguments, ["-c", runner, *arguments]):
        done = programs.run(command)
        assert done.returncode == 0, done.stderr
        assert "not supported" not in done.stderr, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    stock, ours = results
    assert {entry.pop("class").split(".")[0] for entry in stock.values()} == {"transformers"}
    assert {name: entry.pop("class").rpartition(".")[2] for name, entry in ours.items()} == {
        "model": "LlamoeDenseForCausalLM",
        "text": "LlamoeDenseForCausalLM",
        "sequences": "LlamoeDenseForSequenceClassification",
        "pictures": "LlamoeForConditionalGeneration",
        "text of pictures": "LlamoeForCausalLM",
    }
    assert_close(ours, stock)


def test_config_stays_stock_and_its_object_as_it_was(tmp_path):
    config = stock_multimodal_config()
    stock_model(Llama4ForConditionalGeneration, config).save_pretrained(tmp_path)
    with llamoe.adopt():
        config = AutoConfig.from_pretrained(tmp_path)
        before = config.to_dict()
        made = AutoModelForImageTextToText.from_config(config)
        assert type(made) is llamoe.LlamoeForConditionalGeneration
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert type(config) is Llama4Config and config.to_dict() == before | {"dtype": config.to_dict()["dtype"]}


def test_composite_of_another_library_runs_on_our_language_model(tmp_path):
    """A LLaVA, which builds its language model with AutoModel, gets ours, with stock's outputs and files."""
    text = stock_dense_config(vocab_size=103)
    vision = transformers.CLIPVisionConfig(
        hidden_size=60, intermediate_size=44, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=14
    )  # fmt: skip
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=102)
    stock = make_asymmetric(transformers.LlavaForConditionalGeneration(config))
    stock.save_pretrained(tmp_path / "stock")
    with llamoe.adopt("llama"):
        ours = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "stock")
        ours.save_pretrained(tmp_path / "ours")
    assert type(ours.model.language_model) is llamoe.LlamoeDenseModel
    again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert type(again.model.language_model) is transformers.LlamaModel
    ids = torch.randint(3, 90, (2, 23), generator=torch.Generator().manual_seed(1))
    ids[:, 3:7] = 102
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 28, 28)}
    with torch.no_grad():
        expected = stock(**inputs).logits
        assert max_abs(ours(**inputs).logits, expected) < 2e-5 * expected.std()
        assert torch.equal(again(**inputs).logits, expected)
    options = dict(max_new_tokens=8, do_sample=False)
    assert torch.equal(ours.generate(**inputs, **options), stock.generate(**inputs, **options))
