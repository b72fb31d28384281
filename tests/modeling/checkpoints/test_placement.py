"""Models that transformers or accelerate places on CPU and disk compute the same bits as in memory.

One test places layers on a GPU, if there is one.
"""

from functools import partial

import accelerate
import pytest
import torch
from support.models import (
    MODELS,
    ROPES,
    SHALLOW,
    SHALLOW_MODELS,
    SHALLOW_VISION,
    for_models,
    make_asymmetric,
    max_abs,
    run,
    scaled_rope,
    stock_multimodal_config,
    stock_text_config,
)
from support.tables import in_turn
from transformers import Llama4ForCausalLM, Llama4ForConditionalGeneration

import llamoe
from llamoe.modeling.checkpoints.device_map import settle_device_map

CPU = torch.device("cpu")
CASES = SHALLOW_MODELS
HEADS = {case.name: case for case in CASES if case.is_head}
# 29 tokens and the 6 that are generated cross a border of the attention's chunks of 16 tokens.
LENGTH = 29


def for_pairs(name, values, times=1):
    """Parametrize over the model classes, with `times` of the values for each class."""
    return pytest.mark.parametrize(
        ("case", name), in_turn(CASES, values, times=times), ids=lambda it: getattr(it, "name", it)
    )


def bytes_of(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def layers_of(model):
    return [
        name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules
    ]


def in_turns(model):
    """Return a device map with every second layer on disk (a mixture's is among them), and all else in memory."""
    return {"": "cpu", **dict.fromkeys(layers_of(model)[1::2], "disk")}


def generate(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=-1, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves each class once: the model, its folders, inputs, and outputs for them."""
    made = {}

    def get(case):
        if case not in made:
            folder = tmp_path_factory.mktemp(case.name)
            model, inputs = case.make(), case.inputs(length=LENGTH)
            model.save_pretrained(folder / "one")
            model.save_pretrained(folder / "shards", max_shard_size="400KB")
            expected = run(model, **inputs), generate(model, inputs) if case.is_head else None
            made[case] = model, folder, inputs, expected
        return made[case]

    return get


def assert_equal(case, model, inputs, expected):
    logits, tokens = expected
    assert torch.equal(run(model, **inputs), logits)
    assert not case.is_head or torch.equal(generate(model, inputs), tokens)


def num_offloaded(model):
    return sum(parameter.is_meta for parameter in model.parameters())


# transformers


WAYS = {
    "cpu": lambda model: {"device_map": "cpu"},
    "disk": lambda model: {"device_map": {"": "disk"}},
    "layers_in_turns": lambda model: {"device_map": in_turns(model)},
    "parts_in_turns": lambda model: {
        "device_map": {
            name: ("cpu", "disk")[place % 2] for place, (name, _) in enumerate(model.named_children())
        }
        | {name: "cpu" for name, _ in model.named_parameters(recurse=False)}
    },
    "max_memory": lambda model: {"device_map": "auto", "max_memory": {"cpu": int(0.6 * bytes_of(model))}},
    "buffers_too": lambda model: {"device_map": in_turns(model), "offload_buffers": True},
}


@for_pairs("way", WAYS)
def test_device_maps_change_no_bit(case, way, saved, tmp_path):
    model, folder, inputs, expected = saved(case)
    files = "one" if way in ("parts_in_turns", "buffers_too") else "shards"
    options = WAYS[way](model)
    given = options["device_map"]
    before = dict(given) if isinstance(given, dict) else given
    # Weights on disk are read from the checkpoint itself; this folder is for those that cannot be.
    if way == "max_memory":
        options["offload_folder"] = tmp_path
    placed = case.auto_class.from_pretrained(folder / files, **options)
    assert type(placed) is case.model_class
    assert (num_offloaded(placed) > 0) == (way != "cpu")
    # accelerate keeps the class token, a parameter beside modules, in memory.
    in_memory = len(list(placed.parameters(recurse=False)))
    assert num_offloaded(placed) >= len(list(placed.parameters())) - in_memory or way != "disk"
    assert way == "cpu" or settle_device_map(model, placed.hf_device_map) == placed.hf_device_map
    assert given == before, "the caller's dict is his own"
    assert_equal(case, placed, inputs, expected)


@pytest.mark.parametrize("place", [("disk", "cpu"), ("cpu", "disk")], ids=["tower_on_disk", "text_on_disk"])
def test_tower_and_text_apart(place, saved):
    """`model`, a view without hooks, works on a placed head: generation encodes images through it."""
    model, folder, inputs, expected = saved(SHALLOW_MODELS[-1])
    device_map = {"vision_model": place[0], "multi_modal_projector": place[0], "language_model": place[1]}
    placed = llamoe.LlamoeForConditionalGeneration.from_pretrained(folder / "shards", device_map=device_map)
    assert placed.hf_device_map == device_map
    assert_equal(SHALLOW_MODELS[-1], placed, inputs, expected)
    assert torch.equal(run(placed.model, **inputs), run(model.model, **inputs))
    beams = dict(num_beams=3, num_return_sequences=2)
    assert torch.equal(generate(placed, inputs, **beams), generate(model, inputs, **beams))
    with torch.no_grad():
        images = [m.get_image_features(inputs["pixel_values"]) for m in (model, placed)]
        embeds = [m.get_input_embeddings()(inputs["input_ids"]) for m in (model, placed)]
    assert torch.equal(images[0].pooler_output, images[1].pooler_output)
    rest = {**inputs, "input_ids": None}
    assert torch.equal(
        run(placed, **rest, inputs_embeds=embeds[1]), run(model, **rest, inputs_embeds=embeds[0])
    )


@pytest.mark.parametrize(
    ("stock_class", "make_config", "names"),
    [
        (Llama4ForCausalLM, partial(stock_text_config, **SHALLOW), ["LlamoeTextModel"]),
        (
            Llama4ForConditionalGeneration,
            partial(stock_multimodal_config, SHALLOW, SHALLOW_VISION),
            ["LlamoeForConditionalGeneration", "LlamoeModel", "LlamoeForCausalLM", "LlamoeVisionModel"],
        ),
    ],
    ids=["text", "multimodal"],
)
def test_stock_folders_and_their_parts(stock_class, make_config, names, tmp_path):
    """Weights on disk are read by the names in stock's files, although loading renames them."""
    make_asymmetric(stock_class(make_config())).save_pretrained(tmp_path, max_shard_size="400KB")
    for name in names:
        case = next(case for case in MODELS if case.name == name)
        inputs = case.inputs(length=LENGTH)
        plain = case.model_class.from_pretrained(tmp_path)
        expected = run(plain, **inputs), generate(plain, inputs) if case.is_head else None
        device_map = in_turns(plain) if case.is_head else {"": "disk"}
        placed = case.model_class.from_pretrained(tmp_path, device_map=device_map)
        assert num_offloaded(placed), name
        assert_equal(case, placed, inputs, expected)


@pytest.mark.parametrize(
    ("case", "device_map"),
    in_turn(HEADS.values(), ["disk", "embeddings", "auto"]),
    ids=lambda it: getattr(it, "name", it),
)
def test_tied_head(case, device_map, tmp_path):
    model, inputs = case.make(tie_word_embeddings=True), case.inputs(length=LENGTH)
    model.save_pretrained(tmp_path)
    expected = run(model, **inputs), generate(model, inputs)
    options = {}
    if device_map == "disk":
        device_map = {"": "disk"}
    elif device_map == "embeddings":
        prefix = "language_model." if case.has_images else ""
        on_disk = ("model.embed_tokens", "lm_head", "model.layers.1")
        device_map = {"": "cpu", **{prefix + name: "disk" for name in on_disk}}
    elif device_map == "auto":
        options["max_memory"] = {"cpu": int(0.6 * bytes_of(model))}
    placed = case.model_class.from_pretrained(tmp_path, device_map=device_map, **options)
    assert num_offloaded(placed)
    assert_equal(case, placed, inputs, expected)


# accelerate


# Per cent of a model's bytes that may lie in memory. accelerate keeps room there for the largest layer.
MOST = 90
OFFLOADS = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, execution_device=CPU),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, folder, execution_device=CPU),
    "dispatch_model": lambda model, folder: accelerate.dispatch_model(
        model,
        accelerate.infer_auto_device_map(
            model,
            max_memory={"cpu": MOST * bytes_of(model) // 100},
            no_split_module_classes=list(model._no_split_modules),
        ),
        offload_dir=folder,
    ),
}


@for_pairs("how", OFFLOADS)
def test_offload_of_a_model_in_memory(case, how, saved, tmp_path):
    """Stock Llama 4 fails here: it asks its embedding, whose weight is not in memory, for a device."""
    _, _, inputs, expected = saved(case)
    placed = OFFLOADS[how](case.make(), tmp_path)
    assert num_offloaded(placed)
    assert_equal(case, placed, inputs, expected)


# Construction on the meta device


@pytest.mark.parametrize(
    ("name", "rope", "loader"),
    [
        (("LlamoeDenseModel", "LlamoeTextModel")[number % 2], *pair)
        for number, pair in enumerate(in_turn(ROPES, ["disk", "empty weights", "empty weights and buffers"]))
    ],
)
def test_loaders_leave_no_frequency_wrong(name, rope, loader, tmp_path):
    """Inputs are short, long and short again, since `dynamic` and `longrope` change their buffers with the length."""
    case = next(case for case in SHALLOW_MODELS if case.name == name)
    model = case.make(**scaled_rope(rope))
    model.save_pretrained(tmp_path)
    if loader == "disk":
        other = case.model_class.from_pretrained(tmp_path, device_map={"": "disk"}, offload_buffers=True)
    else:
        with accelerate.init_empty_weights(include_buffers="buffers" in loader):
            other = case.model_class(model.config)
        accelerate.load_checkpoint_in_model(other, tmp_path, device_map={"": "cpu"})
        other.eval()
    for length in (29, 50, 29) if rope in ("dynamic", "longrope") else (29,):
        inputs = case.inputs(length=length)
        assert torch.equal(run(other, **inputs), run(model, **inputs)), length
    for (buffer_name, buffer), (_, expected) in zip(
        other.named_buffers(), model.named_buffers(), strict=True
    ):
        assert buffer.dtype == torch.float32 and torch.equal(buffer, expected), buffer_name


# One accelerator


@pytest.mark.gpu
@for_models(models=SHALLOW_MODELS)
@pytest.mark.parametrize("rest", ["cuda:0", "cpu", "disk"])
def test_gpu_with_layers_elsewhere(case, rest, saved):
    model, folder, inputs, expected = saved(case)
    plain = case.model_class.from_pretrained(folder / "one", device_map=0)
    device_map = {"": 0, **dict.fromkeys(layers_of(model)[1::2], rest)}
    placed = case.model_class.from_pretrained(folder / "one", device_map=device_map)
    on_gpu = {name: tensor.to("cuda") for name, tensor in inputs.items()}
    assert torch.equal(run(placed, **on_gpu), run(plain, **on_gpu))
    assert max_abs(run(placed, **on_gpu).cpu(), expected[0]) < 1e-3
    assert not case.is_head or torch.equal(generate(placed, on_gpu), generate(plain, on_gpu))
