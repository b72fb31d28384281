"""After `llamoe.adopt` unchanged scripts get our classes for stock folders; `llamoe.release` undoes it."""

import json

import pytest
import torch
import transformers
from support import programs
from support.models import (
    make_asymmetric,
    max_abs,
    stock_dense_config,
    stock_model,
    stock_multimodal_config,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    Llama4VisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.models.auto import modeling_auto

import llamoe
from llamoe.modeling.base import LlamoePreTrainedModel

STOCK_CONFIGS = {
    "llama": LlamaConfig,
    "llama4": Llama4Config,
    "llama4_text": Llama4TextConfig,
    "llama4_vision_model": Llama4VisionConfig,
}
SPECIAL = [
    "[PAD]",
    "<|eot|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
]
WORDS = ["what", "is", "in", "the", "picture", "and", "this", "one", "?", "a", "red", "circle", "on", "left"]
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, "<|image|>", "<|patch|>", "[UNK]", *WORDS])}


@pytest.fixture(autouse=True)
def nothing_adopted():
    yield
    llamoe.release()


def answers():
    """What each Auto class gives for each stock config, and all that was entered into the Auto classes."""
    autos = {
        name: auto._model_mapping
        for name, auto in vars(modeling_auto).items()
        if name.startswith("AutoModel") and getattr(auto, "_model_mapping", None) is not None
    }
    given = {
        (name, model_type): mapping[config_class]
        for name, mapping in autos.items()
        for model_type, config_class in STOCK_CONFIGS.items()
        if config_class in mapping
    }
    return given, {name: dict(mapping._extra_content) for name, mapping in autos.items()}


def adopted():
    """The stock model types whose models are ours at present."""
    given, _ = answers()
    return {model_type for (_, model_type), model in given.items() if is_ours(model)}


def is_ours(model):
    return (model if isinstance(model, type) else type(model)).__module__.startswith("llamoe.")


def make_tokenizer():
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|eot|>",
        pad_token="[PAD]",
        padding_side="left",
        extra_special_tokens=[*SPECIAL[2:], "<|image|>", "<|patch|>"],
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders that only stock classes wrote: a language model, two heads, a multimodal model with its processor."""
    root = tmp_path_factory.mktemp("stock")
    tokenizer = make_tokenizer()
    size = {
        "vocab_size": len(VOCABULARY),
        "pad_token_id": VOCABULARY["[PAD]"],
        "eos_token_id": VOCABULARY["<|eot|>"],
    }
    for name, model_class in {
        "lm": LlamaForCausalLM,
        "sequences": LlamaForSequenceClassification,
    }.items():
        stock_model(model_class, stock_dense_config(num_labels=5, **size)).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    config = stock_multimodal_config(size)
    config.image_token_index = VOCABULARY["<|patch|>"]
    stock_model(Llama4ForConditionalGeneration, config).save_pretrained(root / "pictures")
    tokenizer.save_pretrained(root / "pictures")
    return root


# Which classes


def test_auto_classes_of_stock_types_give_ours():
    before = answers()
    llamoe.adopt("llama", "llama4")
    given, _ = answers()
    assert set(before[0]) <= set(given) and all(is_ours(model) for model in given.values())
    bases = {model_type: given["AutoModel", model_type].__name__ for model_type in STOCK_CONFIGS}
    assert bases == {
        "llama": "LlamoeDenseModel",
        "llama4": "LlamoeModel",
        "llama4_text": "LlamoeTextModel",
        "llama4_vision_model": "LlamoeVisionModel",
    }
    llamoe.release()
    assert answers() == before


@pytest.mark.parametrize(
    ("names", "types"),
    [
        (["llama"], {"llama"}),
        (["llama4"], {"llama4", "llama4_text", "llama4_vision_model"}),
        (["llama4_text"], {"llama4_text"}),
        (["llama", "llama4_text"], {"llama", "llama4_text"}),
        ([], set(STOCK_CONFIGS)),
    ],
)
def test_names_and_what_they_stand_for(names, types):
    before = answers()
    llamoe.adopt(*names)
    assert adopted() == types
    llamoe.adopt(*names)  # once more is no more
    llamoe.release(*names)
    assert answers() == before


def test_a_part_can_be_released():
    llamoe.adopt()
    llamoe.release("llama")
    assert adopted() == {"llama4", "llama4_text", "llama4_vision_model"}
    llamoe.release("llama4_text")
    llamoe.release("llama4_text", "llama")  # not adopted: nothing to do
    assert adopted() == {"llama4", "llama4_vision_model"}


@pytest.mark.parametrize("function", ["adopt", "release"])
def test_unknown_model_type(function):
    for wrong in ("qwen2", "llamoe", "LLAMA", "", None, ["llama"], LlamaConfig):
        with pytest.raises(ValueError, match=rf"llamoe\.{function}"):
            getattr(llamoe, function)("llama", wrong)
        assert adopted() == set()


# As a context manager


def test_blocks_nest_and_restore_what_was_before():
    before = answers()
    with llamoe.adopt("llama"):
        assert adopted() == {"llama"}
        with llamoe.adopt("llama", "llama4_text"):
            assert adopted() == {"llama", "llama4_text"}
        assert adopted() == {"llama"}
        # A block ends by an exception, too.
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
        entries[LlamaConfig] = Llama4ForCausalLM  # entered while we stand there: not ours to take away
    assert entries[LlamaConfig] is Llama4ForCausalLM


# Loading

SCRIPT = """
import json, sys, torch
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoProcessor, AutoTokenizer, pipeline)

root = sys.argv[1]
found = {}

def note(name, pipe, result):
    found[name] = {"class": type(pipe.model).__module__ + "." + type(pipe.model).__name__, "result": result}

tokenizer = AutoTokenizer.from_pretrained(root + "/lm")
model = AutoModelForCausalLM.from_pretrained(root + "/lm")
inputs = tokenizer(["what is this ?", "a red circle on the left and this one"], padding=True, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits[inputs["attention_mask"].bool()]
found["model"] = {"class": type(model).__module__ + "." + type(model).__name__, "logits": logits.tolist()}

pipe = pipeline("text-generation", root + "/lm")
note("text", pipe, pipe("what is in the", max_new_tokens=12, do_sample=False))
pipe = pipeline("text-classification", root + "/sequences", top_k=None)
note("sequences", pipe, pipe(["this is a red circle", "what ?"]))
if len(sys.argv) > 2:
    from PIL import Image
    picture = Image.new("RGB", (60, 40), (200, 30, 60))
    processor = AutoProcessor.from_pretrained(root + "/pictures")
    pipe = pipeline("image-text-to-text", root + "/pictures", processor=processor)
    asked = dict(text="<|image|> what is this ?", images=picture, max_new_tokens=12)
    note("pictures", pipe, pipe(**asked, generate_kwargs={"do_sample": False}))
    pipe = pipeline("text-generation", root + "/pictures")
    note("text of pictures", pipe, pipe("what is in the", max_new_tokens=12, do_sample=False))
print(json.dumps(found, default=float))
"""


def assert_close(given, expected):
    if isinstance(expected, dict):
        assert given.keys() == expected.keys()
        for name in expected:
            assert_close(given[name], expected[name])
    elif isinstance(expected, list):
        assert len(given) == len(expected)
        for mine, theirs in zip(given, expected, strict=True):
            assert_close(mine, theirs)
    elif isinstance(expected, float):
        assert given == pytest.approx(expected, abs=2e-5)
    else:
        assert given == expected


@pytest.mark.slow
def test_unchanged_script_gets_our_classes_and_stock_results(folders, tmp_path):
    """The same file runs twice, in fresh processes: as it is, and started after an adoption."""
    pictures = []
    try:
        import PIL  # noqa: F401
        import torchvision  # noqa: F401
    except ImportError:
        pass  # the pictures' part needs the extra `vision`
    else:
        image_processor = transformers.Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
        processor = transformers.Llama4Processor(
            image_processor, make_tokenizer(), patch_size=14, pixel_shuffle_ratio=0.5
        )
        processor.save_pretrained(folders / "pictures")
        pictures = ["pictures"]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(script), str(folders), *pictures]
    runner = "import llamoe, runpy, sys; llamoe.adopt(); sys.argv.pop(0); runpy.run_path(sys.argv[0])"
    results = []
    for command in (arguments, ["-c", runner, *arguments]):
        done = programs.run(command)
        assert done.returncode == 0, done.stderr
        assert "not supported" not in done.stderr, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    stock, ours = results
    classes = {name: entry.pop("class").rpartition(".")[2] for name, entry in ours.items()}
    assert {entry.pop("class").split(".")[0] for entry in stock.values()} == {"transformers"}
    expected = {
        "model": "LlamoeDenseForCausalLM",
        "text": "LlamoeDenseForCausalLM",
        "sequences": "LlamoeDenseForSequenceClassification",
    }
    if pictures:
        expected |= {"pictures": "LlamoeForConditionalGeneration", "text of pictures": "LlamoeForCausalLM"}
    assert classes == expected
    assert_close(ours, stock)


def test_config_stays_stock_and_its_object_as_it_was(folders):
    with llamoe.adopt():
        config = AutoConfig.from_pretrained(folders / "pictures")
        before = config.to_dict()
        made = AutoModelForImageTextToText.from_config(config)
        assert type(made) is llamoe.LlamoeForConditionalGeneration
        AutoModelForCausalLM.from_pretrained(folders / "pictures", config=config)
        assert type(AutoConfig.from_pretrained(folders / "lm")) is LlamaConfig
    assert type(config) is Llama4Config and config.to_dict() == before | {"dtype": config.to_dict()["dtype"]}


def test_adopted_model_saves_as_ours_or_as_stock(folders, tmp_path):
    with llamoe.adopt("llama"):
        model = AutoModelForCausalLM.from_pretrained(folders / "lm")
        model.save_pretrained(tmp_path / "ours")
        model.save_pretrained(tmp_path / "stock", layout="stock")
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        expected = model(ids).logits
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert type(again) is type(model) is llamoe.LlamoeDenseForCausalLM
        assert torch.equal(again(ids).logits, expected)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
        assert type(stock) is LlamaForCausalLM
        assert max_abs(stock(ids).logits, expected) < 2e-5 * expected.std()


def test_composite_of_another_library_runs_on_our_language_model():
    """A LLaVA builds its language model with AutoModel: under an adoption ours, with the same numbers."""
    text = stock_dense_config(vocab_size=103)
    vision = transformers.CLIPVisionConfig(
        hidden_size=60, intermediate_size=44, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=14
    )  # fmt: skip
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=102)
    stock = make_asymmetric(transformers.LlavaForConditionalGeneration(config))
    with llamoe.adopt("llama"):
        ours = transformers.LlavaForConditionalGeneration(config).eval()
    assert type(ours.model.language_model) is llamoe.LlamoeDenseModel
    ours.load_state_dict(stock.state_dict())
    ids = torch.randint(3, 90, (2, 23), generator=torch.Generator().manual_seed(1))
    ids[:, 3:7] = 102
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 28, 28)}
    with torch.no_grad():
        expected = stock(**inputs).logits
        assert max_abs(ours(**inputs).logits, expected) < 2e-5 * expected.std()
    options = dict(max_new_tokens=8, do_sample=False)
    assert torch.equal(ours.generate(**inputs, **options), stock.generate(**inputs, **options))


def test_stock_head_that_is_named_itself_stays_stock(folders, tmp_path):
    """Its base model comes from AutoModel and is ours meanwhile; numbers and saved folder do not tell."""
    ids = torch.arange(2, 20)[None]
    stock = LlamaForSequenceClassification.from_pretrained(folders / "sequences")
    with llamoe.adopt(), torch.no_grad():
        model = LlamaForSequenceClassification.from_pretrained(folders / "sequences")
        expected = stock(ids).logits
        assert max_abs(model(ids).logits, expected) < 2e-5 * expected.std()
        model.save_pretrained(tmp_path)
    again = LlamaForSequenceClassification.from_pretrained(tmp_path)
    assert type(again.model) is transformers.LlamaModel and type(again.config) is LlamaConfig
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [("mistral", {"sliding_window": 5}), ("mixtral", {"num_local_experts": 3, "sliding_window": 5})],
    ids=["mistral", "mixtral"],
)
def test_mistrals_folders_give_our_classes_and_stocks_numbers(model_type, fields, tmp_path):
    config = AutoConfig.for_model(
        model_type, vocab_size=53, hidden_size=24, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, **fields,
    )  # fmt: skip
    ids = torch.randint(0, 53, (2, 13), generator=torch.Generator().manual_seed(0))
    for auto_name in ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"):
        auto_class = getattr(transformers, f"AutoModelFor{auto_name}")
        stock = make_asymmetric(auto_class.from_config(config))
        stock.config.pad_token_id = 0
        stock.save_pretrained(tmp_path / auto_name)
        with llamoe.adopt(model_type):
            ours = auto_class.from_pretrained(tmp_path / auto_name)
        # There is no head of ours that finds answers with a mixture.
        has_head = (model_type, auto_name) != ("mixtral", "QuestionAnswering")
        assert isinstance(ours, LlamoePreTrainedModel) == has_head
        assert type(auto_class.from_pretrained(tmp_path / auto_name)) is type(stock)
        with torch.no_grad():
            for mine, its in zip(ours(ids).to_tuple()[:1], stock(ids).to_tuple()[:1], strict=True):
                assert max_abs(mine, its) < 1e-5
