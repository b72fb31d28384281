"""What `save_pretrained` writes loads again: for every class, origin of the model and option."""

import json
import socket
from functools import cache

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import few_bits
from support.models import (
    MODELS,
    Case,
    assert_same_weights,
    dense_config,
    draw,
    load_whole,
    run,
    shallow,
    tensors_in,
    text_config,
)
from transformers import AutoModelForSequenceClassification

import llamoe
from llamoe.configuration.errors import CheckpointError

HEADS = [
    Case(
        f"Llamoe{prefix}For{task}", config, AutoModelForSequenceClassification, stock, has_experts=not prefix
    )
    for prefix, task, config, stock in (
        ("Dense", "SequenceClassification", dense_config, "LlamaForSequenceClassification"),
        ("Dense", "TokenClassification", dense_config, "LlamaForTokenClassification"),
        ("Dense", "QuestionAnswering", dense_config, "LlamaForQuestionAnswering"),
        ("", "SequenceClassification", text_config, None),
    )
]
# Mixtral's layouts, of which stock's has other tensors, are in `test_mixtral.py`.
CASES = {case.name: shallow(case) for case in MODELS + HEADS if "Mixtral" not in case.name}
for_classes = pytest.mark.parametrize("name", CASES)

# Class to another class that is saved under other keys, and whose folder it can load.
RENAMED = {
    "LlamoeDenseModel": "LlamoeDenseForQuestionAnswering",
    "LlamoeDenseForCausalLM": "LlamoeDenseForQuestionAnswering",
    "LlamoeDenseForSequenceClassification": "LlamoeDenseForQuestionAnswering",
    "LlamoeDenseForTokenClassification": "LlamoeDenseForQuestionAnswering",
    "LlamoeDenseForQuestionAnswering": "LlamoeDenseForCausalLM",
    "LlamoeTextModel": "LlamoeForConditionalGeneration",
    "LlamoeForCausalLM": "LlamoeForConditionalGeneration",
    "LlamoeForSequenceClassification": "LlamoeForConditionalGeneration",
    "LlamoeVisionModel": "LlamoeForConditionalGeneration",
    "LlamoeModel": "LlamoeForConditionalGeneration",
    "LlamoeForConditionalGeneration": "LlamoeModel",
}
# Base models, whose folders models with a head can load.
BASES = {"Dense": "LlamoeDenseModel", "": "LlamoeTextModel"}


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Return a function that gives the folder of a class, saved in shards; tests do not change it."""

    @cache
    def folder(name):
        path = tmp_path_factory.mktemp(name)
        CASES[name].make(seed=3).save_pretrained(path, max_shard_size="150KB")
        return path

    return folder


# Origins of a model: functions of the case, an empty folder, and `folder_of`.


def built(case, folder, folder_of):
    return case.make()


def tied(case, folder, folder_of):
    config = case.make_config()
    config.get_text_config().tie_word_embeddings = True
    config.tie_word_embeddings = True
    return draw(case.model_class, config)


def resized(case, folder, folder_of):
    model = case.make()
    model.resize_token_embeddings(117)
    return model


def from_stock(case, folder, folder_of):
    stock = getattr(transformers, case.stock_name)
    config = stock.config_class.from_dict(llamoe.to_stock(case.make_config()))
    draw(stock, config).save_pretrained(folder)
    return case.model_class.from_pretrained(folder)


def from_ours(case, folder, folder_of):
    return case.model_class.from_pretrained(folder_of(case.name))


def renamed(case, folder, folder_of):
    return case.model_class.from_pretrained(folder_of(RENAMED[case.name]))


def from_base(case, folder, folder_of):
    return case.model_class.from_pretrained(folder_of(BASES["Dense" if "Dense" in case.name else ""]))


def mapped(case, folder, folder_of):
    """Load by the caller's own renaming of keys."""
    case.make().save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({f"mine.{key}": tensor for key, tensor in load_file(file).items()}, file, {"format": "pt"})
    return case.model_class.from_pretrained(folder, key_mapping={r"^mine\.": ""})


def half(case, folder, folder_of):
    return case.make().bfloat16()


def offloaded(case, folder, folder_of):
    return case.model_class.from_pretrained(folder_of(case.name), device_map={"": "disk"})


# Origin to classes: all for `built`; for each other origin, classes that differ in what it changes.
STATES = {
    built: CASES,
    tied: ["LlamoeDenseForCausalLM", "LlamoeForConditionalGeneration"],
    resized: ["LlamoeDenseForQuestionAnswering", "LlamoeForCausalLM", "LlamoeModel"],
    from_stock: ["LlamoeDenseForTokenClassification", "LlamoeVisionModel", "LlamoeForConditionalGeneration"],
    from_ours: ["LlamoeDenseModel", "LlamoeModel"],
    renamed: [
        "LlamoeDenseModel",
        "LlamoeDenseForQuestionAnswering",
        "LlamoeForCausalLM",
        "LlamoeForSequenceClassification",
        "LlamoeVisionModel",
        "LlamoeForConditionalGeneration",
    ],
    from_base: ["LlamoeDenseForSequenceClassification", "LlamoeForCausalLM"],
    mapped: ["LlamoeForSequenceClassification", "LlamoeForConditionalGeneration"],
    half: ["LlamoeDenseForCausalLM", "LlamoeTextModel"],
    offloaded: ["LlamoeDenseForQuestionAnswering", "LlamoeVisionModel", "LlamoeForConditionalGeneration"],
}
SHARDED = ("LlamoeDenseForCausalLM", "LlamoeForConditionalGeneration")
OPTIONS = [
    {},
    {
        "save_original_format": True,
        "save_peft_format": False,
        "is_main_process": True,
        "token": None,
        "max_shard_size": "150KB",
    },
    {"save_original_format": False, "max_shard_size": 150_000, "variant": "half"},
    {"save_original_format": True, "layout": "stock"},
    {"layout": "stock", "max_shard_size": "150KB"},
    {
        "state_dict": ...,
        "save_original_format": True,
        "save_function": torch.save,
        "safe_serialization": False,
    },
]


def weights_of(model):
    """Return all weights of a model, also those that lie on disk."""
    from transformers.integrations.accelerate import load_offloaded_parameter

    return {
        name: load_offloaded_parameter(model, name) if tensor.is_meta else tensor
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize(
    ("state", "name"),
    [(state, name) for state, names in STATES.items() for name in sorted(names)],
    ids=lambda value: getattr(value, "__name__", value),
)
@torch.no_grad()
def test_what_is_saved_loads_here_and_in_stock(name, state, folder_of, tmp_path):
    case = CASES[name]
    model = state(case, tmp_path / "source", folder_of).eval()
    expected = weights_of(model)
    aliases = {key for key in expected if key == "lm_head.weight" or key.endswith(".lm_head.weight")}
    hidden = aliases if getattr(model.config.get_text_config(), "tie_word_embeddings", False) else set()
    configs = {}
    for number, options in enumerate(OPTIONS):
        # Variants and shards do not depend on the model's origin, and hardly on its class.
        if number in (1, 2, 4) and not (state is built and case.name in SHARDED):
            continue
        options, layout = dict(options), options.get("layout", "llamoe")
        if "state_dict" in options:
            options["state_dict"] = dict(expected)
        if layout == "stock" and not case.stock_name:
            continue
        folder = tmp_path / f"saved-{number}"
        model.save_pretrained(folder, **options)
        # Our files have stock's keys, whatever the origin.
        assert_same_weights(tensors_in(folder), {key: expected[key] for key in expected.keys() - hidden})
        config = json.loads((folder / "config.json").read_text())
        is_new = layout not in configs
        assert config == configs.setdefault(layout, config), options
        # Files with the same tensors and config are read again only for models that were built.
        if not is_new and state is not built:
            continue
        again = load_whole(case.model_class, folder, variant=options.get("variant"))
        assert_same_weights(again.state_dict(), expected)
        # Buffers are not saved. Equal weights and buffers give equal outputs: compare those once a class.
        assert_same_weights(dict(again.named_buffers()), dict(model.named_buffers()))
        if number == 0 and state is built:
            inputs = case.inputs()
            assert torch.equal(again(**inputs)[0], model(**inputs)[0])
        if layout == "stock":
            stock = load_whole(getattr(transformers, case.stock_name), folder)
            assert_same_weights(stock.state_dict(), expected)


def test_positional_options(tmp_path):
    """Positional arguments have transformers' order; the ninth is `save_original_format`."""
    name = "LlamoeForConditionalGeneration"
    model = CASES[name].make()
    model.save_pretrained(tmp_path, True, None, False, "150KB", "v", None, True, True)
    assert_same_weights(
        load_whole(CASES[name].model_class, tmp_path, variant="v").state_dict(), model.state_dict()
    )


def test_part_of_a_model_is_saved_as_a_model_of_its_own(folder_of, tmp_path):
    """A part of a model saves its weights under its own keys, also if loading had renamed those of the whole."""
    whole = renamed(CASES["LlamoeForConditionalGeneration"], None, folder_of)
    for part in (whole.language_model, whole.vision_model, whole.model, whole.language_model.model):
        folder = tmp_path / type(part).__name__
        part.save_pretrained(folder, save_original_format=True)
        assert_same_weights(load_whole(type(part), folder).state_dict(), part.state_dict())


def test_weights_that_are_mapped_from_the_folder_that_is_saved_to(tmp_path):
    """A save may replace the file that the weights are mapped from, or are read from during the save."""
    case = CASES["LlamoeForCausalLM"]
    case.make().save_pretrained(tmp_path, max_shard_size="90KB")
    for options in ({}, {"device_map": {"": "cpu"}}, {"device_map": {"": "disk"}}):
        model = case.model_class.from_pretrained(tmp_path, **options)
        expected = {name: tensor.clone() for name, tensor in weights_of(model).items()}
        model.save_pretrained(tmp_path, max_shard_size="130KB" if options else "150KB")
        assert_same_weights(load_whole(case.model_class, tmp_path).state_dict(), expected)


def test_only_hidden_folders_of_this_hosts_ended_processes_are_removed(tmp_path, monkeypatch):
    """Another host's name may begin with this one's, and folders may have names that are no save's."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(psutil, "pid_exists", lambda process: process != 7)
    kept = [".llamoe-saving-node-8-abc", ".llamoe-saving-node-a-7-abc", ".llamoe-saving-node-7-9-abc"]
    for name in [".llamoe-saving-node-7-abc", *kept]:
        (tmp_path / name).mkdir()
    CASES["LlamoeForCausalLM"].make().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob(".llamoe-saving-*")} == {*kept}


# Adapters


def lora(**options):
    peft = pytest.importorskip("peft")
    targets = {"target_modules": ["q_proj"], "target_parameters": ["feed_forward.experts.gate_up_proj"]}
    return peft.LoraConfig(r=3, init_lora_weights=False, **{**targets, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_original_format": True},
        {"max_shard_size": "2KB"},
        {"save_peft_format": False},
        {"variant": "half"},
        {"state_dict": ...},
    ],
    ids=str,
)
def test_adapters_of_a_model_load_again(options, tmp_path):
    case = CASES["LlamoeForCausalLM"]
    model = case.make()
    model.add_adapter(lora())
    inputs = case.inputs()
    if "state_dict" in options:
        options = {"state_dict": model.state_dict()}
    model.save_pretrained(tmp_path, **options)
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
    }
    again = case.make()
    again.load_adapter(str(tmp_path))
    assert torch.equal(run(again, **inputs), run(model, **inputs))


def test_an_adapter_beside_its_model(tmp_path):
    """A model and its adapter in one folder load together, and may be saved there again."""
    case = CASES["LlamoeForCausalLM"]
    model = case.make()
    model.save_pretrained(tmp_path)
    model.add_adapter(lora())
    inputs = case.inputs()
    for _ in range(2):
        model.save_pretrained(tmp_path)
        assert {"config.json", "model.safetensors", "adapter_config.json"} <= {
            path.name for path in tmp_path.iterdir()
        }
        again = case.model_class.from_pretrained(tmp_path)
        assert torch.equal(run(again, **inputs), run(model, **inputs))


@pytest.mark.parametrize(
    "extra", [{}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3]}], ids=str
)
@pytest.mark.parametrize(
    "make", [few_bits.make, lambda family: few_bits.packed(family, "int8")], ids=["plain", "int8"]
)
def test_weights_of_a_model_whose_adapter_was_deleted(extra, make, tmp_path):
    model = make("text")
    expected = model.state_dict()
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    model.add_adapter(lora(target_parameters=stacks, **extra))
    model.delete_adapter("default")
    model.save_pretrained(tmp_path)
    assert_same_weights(load_whole(type(model), tmp_path).state_dict(), expected)


def test_a_model_inside_of_peft_is_not_saved(tmp_path):
    """Its weights have peft's names, under which no loader would find them."""
    peft = pytest.importorskip("peft")
    trained = peft.get_peft_model(CASES["LlamoeForCausalLM"].make(), lora())
    for inside in (trained.get_base_model(), trained.base_model):
        with pytest.raises(ValueError, match="PeftModel"):
            inside.save_pretrained(tmp_path / "inside")
    assert not (tmp_path / "inside").exists()


# Missing weights


def lose(folder, *wanted):
    """Remove the tensors whose names contain one of these words from model.safetensors; return their names."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    lost = [key for key in tensors if any(word in key for word in wanted)]
    assert lost
    save_file({key: tensors[key] for key in tensors.keys() - set(lost)}, file, {"format": "pt"})
    return lost


@for_classes
def test_missing_weights_of_the_named_class_are_an_error(name, tmp_path):
    case = CASES[name]
    case.make().save_pretrained(tmp_path, layout="stock" if case.stock_name else "llamoe")
    lost = lose(tmp_path, "layers.1.self_attn.q_proj.weight")
    match = f"config.json .* {name}, .*{len(lost)} .*{', '.join(lost)}"
    every = ({}, {"ignore_mismatched_sizes": True}, {"config": case.make_config()}, {"dtype": "auto"})
    with pytest.raises(CheckpointError, match=match):
        case.model_class.from_pretrained(tmp_path, **every[list(CASES).index(name) % len(every)])


@pytest.mark.parametrize(
    ("base", "name", "head"),
    [
        ("LlamoeDenseModel", "LlamoeDenseForCausalLM", "lm_head"),
        ("LlamoeTextModel", "LlamoeForCausalLM", "lm_head"),
        ("LlamoeTextModel", "LlamoeForSequenceClassification", "score"),
        ("LlamoeModel", "LlamoeForConditionalGeneration", "language_model.lm_head"),
    ],
)
def test_what_a_checkpoint_of_another_class_cannot_have_is_reported(base, name, head, tmp_path):
    """A head loaded from a base model's folder is new; transformers reports it as missing."""
    model = CASES[base].make()
    model.save_pretrained(tmp_path)
    # A given config may name the class with the head; the class in the folder's config.json decides.
    config = CASES[name].make_config()
    config.architectures = [name]
    for options in ({}, {"config": config}):
        again, info = getattr(llamoe, name).from_pretrained(tmp_path, output_loading_info=True, **options)
        assert info["missing_keys"] == {f"{head}.weight"} and not info["unexpected_keys"]
        assert_same_weights(again.model.state_dict(), model.state_dict())


def test_without_the_name_of_a_class_missing_weights_are_reported(tmp_path):
    CASES["LlamoeForCausalLM"].make().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    del content["architectures"]
    file.write_text(json.dumps(content))
    lost = lose(tmp_path, "q_proj")
    _, info = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {*lost}


def test_a_state_dict_may_be_a_part(tmp_path):
    model = CASES["LlamoeForCausalLM"].make()
    model.config.architectures = ["LlamoeForCausalLM"]
    _, info = llamoe.LlamoeForCausalLM.from_pretrained(
        None,
        config=model.config,
        state_dict={"lm_head.weight": model.lm_head.weight.detach()},
        output_loading_info=True,
    )
    assert info["missing_keys"] == model.state_dict().keys() - {"lm_head.weight"}


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_need_be_there_once(kept, tmp_path):
    case = CASES["LlamoeDenseForCausalLM"]
    model = tied(case, None, None)
    embedding = model.lm_head.weight
    weights = {name: tensor for name, tensor in model.state_dict().items() if tensor is not embedding}
    names = {"lm_head.weight", "model.embed_tokens.weight"}
    for name in names - {kept}:
        del weights[name]
    model.save_pretrained(tmp_path, state_dict=weights)
    assert_same_weights(load_whole(case.model_class, tmp_path).state_dict(), model.state_dict())
    lose(tmp_path, kept)
    with pytest.raises(CheckpointError, match=r"weights are missing: "):
        case.model_class.from_pretrained(tmp_path)


def test_another_size_is_asked_for_by_its_own_option(tmp_path):
    """With `ignore_mismatched_sizes` a weight of another size is initialized anew; a missing one is an error."""
    case = CASES["LlamoeDenseForSequenceClassification"]
    case.make().save_pretrained(tmp_path)
    options = {"num_labels": 5, "ignore_mismatched_sizes": True}
    model, info = case.model_class.from_pretrained(tmp_path, output_loading_info=True, **options)
    assert [key for key, *_ in info["mismatched_keys"]] == ["score.weight"]
    lose(tmp_path, "score")
    with pytest.raises(CheckpointError, match=r"missing: score\.weight"):
        case.model_class.from_pretrained(tmp_path, **options)


def test_a_class_of_the_users_own_on_our_checkpoint(tmp_path):
    class Mine(llamoe.LlamoeForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.extra = torch.nn.Linear(config.hidden_size, 3)
            self.post_init()

    CASES["LlamoeForCausalLM"].make().save_pretrained(tmp_path / "ours")
    model, info = Mine.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert info["missing_keys"] == {"extra.weight", "extra.bias"}
    model.save_pretrained(tmp_path / "mine")
    assert_same_weights(load_whole(Mine, tmp_path / "mine").state_dict(), model.state_dict())
    lose(tmp_path / "mine", "extra.bias")
    with pytest.raises(CheckpointError, match=r"this is a Mine, .*: extra\.bias"):
        Mine.from_pretrained(tmp_path / "mine")
