"""Checkpoints with a linear layer for each matrix of each expert load as stacks, or an error names the tensor."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.models import (
    MODELS,
    MULTIMODAL,
    assert_same_weights,
    load_whole,
    run,
)
from support.tables import in_turn

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert

TEXT = next(case for case in MODELS if case.name == "LlamoeForCausalLM")
SPELLINGS = {
    "numbered": "{experts}.{number}.{part}_proj.weight",  # transformers, llm-compressor, GPTQModel
    "listed": "{experts}.{part}_projs.{number}.weight",  # Axolotl
}
for_spellings = pytest.mark.parametrize("spelling", SPELLINGS)


def split(state, spelling="numbered", only=""):
    """Return a state dict in which stacks whose names contain `only` are split into linear layers, `[out, in]`."""
    result = {}
    for name, tensor in state.items():
        experts, _, stack = name.rpartition(".")
        if not experts.endswith(".experts") or only not in name:
            result[name] = tensor
            continue
        parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}[stack]
        for number, matrix in enumerate(tensor):
            for part, columns in zip(parts, matrix.chunk(len(parts), dim=1), strict=True):
                key = SPELLINGS[spelling].format(experts=experts, number=number, part=part)
                result[key] = columns.t().contiguous()
    assert len(result) > len(state)
    return result


def write(folder, model, state, form="one", layout="llamoe"):
    """Write a folder of these weights: one file or shards, among which each layer's experts are spread."""
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder, layout=layout)
    (folder / "model.safetensors").unlink()
    pieces = 3 if "sharded" in form else 1
    files = [dict(list(state.items())[piece::pieces]) for piece in range(pieces)]
    stem, suffix, save = (
        ("pytorch_model", ".bin", torch.save) if "bin" in form else ("model", ".safetensors", save_file)
    )
    names = [stem + (f"-{piece}-of-{pieces}" if pieces > 1 else "") + suffix for piece in range(pieces)]
    for name, file in zip(names, files, strict=True):
        save(file, folder / name)
    if pieces > 1:
        weight_map = {key: name for name, file in zip(names, files, strict=True) for key in file}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def saved_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    model = TEXT.make(num_local_experts=3)
    state = split(model.state_dict())
    write(folder, model, state)
    return folder, model, state


@pytest.fixture
def text(saved_text):
    """Return a folder of numbered experts, its model, and its state dict, which alone may be changed."""
    folder, model, state = saved_text
    return folder, model, dict(state)


@pytest.mark.parametrize(
    ("case", "spelling"),
    in_turn([case for case in MODELS if case.is_llama4], SPELLINGS),
    ids=lambda value: getattr(value, "name", value),
)
def test_every_class_reads_its_own_folder(case, spelling, tmp_path):
    # Sorted by name, experts 10 and 11 would come before 2.
    model = case.make(num_local_experts=12)
    write(tmp_path, model, split(model.state_dict(), spelling), "sharded")
    again = load_whole(case.model_class, tmp_path)
    assert_same_weights(again.state_dict(), model.state_dict())
    inputs = case.inputs()
    assert torch.equal(run(again, **inputs), run(model, **inputs))


@pytest.mark.parametrize(
    ("form", "layout"), [("one", "stock"), ("sharded", "llamoe"), ("bin", "llamoe"), ("sharded bin", "stock")]
)
def test_every_form_of_a_folder_is_read(form, layout, tmp_path):
    model = MULTIMODAL.make()
    write(tmp_path, model, split(model.state_dict()), form, layout)
    if form == "sharded":
        shards = [set(safe_open(path, "pt").keys()) for path in tmp_path.glob("*.safetensors")]
        experts = "language_model.model.layers.1.feed_forward.experts."
        assert all(any(name.startswith(experts) for name in shard) for shard in shards)
    again = load_whole(llamoe.LlamoeForConditionalGeneration, tmp_path)
    assert_same_weights(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "name", ["LlamoeModel", "LlamoeForCausalLM", "LlamoeTextModel", "LlamoeForSequenceClassification"]
)
def test_parts_of_a_multimodal_folder_are_read(name, tmp_path):
    model = MULTIMODAL.make()
    state = model.state_dict()
    write(tmp_path, model, split(state))
    part, info = getattr(llamoe, name).from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == ({"score.weight"} if "Classification" in name else set())
    expected = {name: tensor for name, tensor in state.items() if "experts" in name}
    given = {name: tensor for name, tensor in part.state_dict().items() if "experts" in name}
    assert [tensor.tolist() for tensor in given.values()] == [tensor.tolist() for tensor in expected.values()]


def test_renamed_keys_are_read(tmp_path, text):
    folder, model, state = text
    renamed = {
        name.replace("feed_forward.experts", "moe.e").replace("model.", "net.", 1): t
        for name, t in state.items()
    }
    write(tmp_path / "renamed", model, renamed)
    mapping = {r"^net\.": "model.", r"moe\.e\.": "feed_forward.experts."}
    again = load_whole(llamoe.LlamoeForCausalLM, tmp_path / "renamed", key_mapping=mapping)
    assert_same_weights(again.state_dict(), model.state_dict())


@for_spellings
def test_a_state_dict_is_read(spelling):
    model = TEXT.make()
    state = split(model.state_dict(), spelling)
    again = llamoe.LlamoeForCausalLM.from_pretrained(None, config=model.config, state_dict=state)
    assert_same_weights(again.state_dict(), model.state_dict())
    assert state.keys() == split(model.state_dict(), spelling).keys()


@pytest.mark.parametrize("only", ["layers.1.", "gate_up_proj", "down_proj"])
def test_fused_and_split_stacks_and_spellings_may_stand_side_by_side(only, tmp_path):
    model = TEXT.make()
    state = split(model.state_dict(), only=only)
    if only == "layers.1.":
        state = split(state, "listed", only="layers.3.")
    write(tmp_path, model, state)
    assert_same_weights(load_whole(llamoe.LlamoeForCausalLM, tmp_path).state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("stored", "given"),
    [
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float32", "auto"),
        ("bfloat16", "float32"),
        ("bfloat16", "auto"),
    ],
)
def test_dtypes(stored, given, tmp_path):
    model = TEXT.make().to(getattr(torch, stored))
    write(tmp_path, model, split(model.state_dict()))
    again = load_whole(llamoe.LlamoeForCausalLM, tmp_path, dtype=given)
    wanted = getattr(torch, stored if given == "auto" else given)
    assert_same_weights(again.state_dict(), model.to(wanted).state_dict())


# Saving


@pytest.mark.parametrize(
    ("case", "original_format"),
    in_turn([case for case in MODELS if case.has_experts], [None, False, True]),
    ids=lambda value: getattr(value, "name", value),
)
def test_what_is_saved_is_stacked(case, original_format, tmp_path):
    model = case.make()
    if case.is_llama4:
        write(tmp_path / "split", model, split(model.state_dict()))
    else:
        model.save_pretrained(tmp_path / "split", layout="stock")
    loaded = case.model_class.from_pretrained(tmp_path / "split")
    options = {} if original_format is None else {"save_original_format": original_format}
    loaded.save_pretrained(tmp_path / "saved", **options)
    with safe_open(tmp_path / "saved/model.safetensors", "pt") as file:
        stacks = {name.rpartition(".experts.")[2] for name in file.keys() if ".experts." in name}
    assert stacks == {"gate_up_proj", "down_proj"}


# Places


def test_device_maps(text, tmp_path):
    folder, model, _ = text
    inputs = TEXT.inputs()
    expected = run(model, **inputs)
    everything = {"": "cpu", "model.layers.1.feed_forward.experts": "disk", "lm_head": "disk"}
    for device_map in ("cpu", "auto", everything, {"": "disk"}):
        placed = llamoe.LlamoeForCausalLM.from_pretrained(
            folder, device_map=device_map, offload_folder=tmp_path / "offload"
        )
        assert torch.equal(run(placed, **inputs), expected), device_map
    written = {path.name for path in (tmp_path / "offload").glob("*.safetensors")}
    stacks = {name for name in model.state_dict() if ".experts." in name}
    assert {name.removesuffix(".safetensors") for name in written} == stacks, "the rest is read where it is"
    # Stacks that stay in memory need no file.
    rest = {"": "disk", **{f"model.layers.{layer}.feed_forward.experts": "cpu" for layer in (1, 3)}}
    placed = llamoe.LlamoeForCausalLM.from_pretrained(folder, device_map=rest)
    assert torch.equal(run(placed, **inputs), expected)


# What is wrong with a checkpoint

LAYER = "model.layers.1.feed_forward.experts"


def put(part, *shape, dtype=torch.float32):
    """Return a function that stores another tensor under a name below the layer's experts."""
    return lambda state: state.update({f"{LAYER}.{part}": torch.ones(shape).to(dtype)})


def lose(*parts):
    return lambda state: [state.pop(f"{LAYER}.{part}_proj.weight") for part in parts]


def rename(old, new):
    return lambda state: state.update({f"{LAYER}.{new}": state.pop(f"{LAYER}.{old}.weight")})


# A change of the state dict, and words of the error.
DAMAGE = {
    "missing expert": (lose("1.gate", "1.up", "1.down"), r"\.experts\.1\.\w+_proj\.weight is missing"),
    "missing last expert": (lose("2.gate", "2.up", "2.down"), "ignore_mismatched_sizes"),
    "missing up": (lose("0.up"), r"\.experts\.0\.up_proj\.weight is missing"),
    "missing last up": (lose("2.up"), rf"{LAYER}\.gate_up_proj: .*'\.experts\.\*\.up_proj\.weight': 2"),
    "missing every up": (lose("0.up", "1.up", "2.up"), rf"{LAYER}\.gate_up_proj: .*gate_proj\.weight': 3}}"),
    "one expert more": (put("3.up_proj.weight", 52, 72), rf"{LAYER}\.gate_up_proj: .*up_proj\.weight': 4}}"),
    "transposed": (put("1.up_proj.weight", 72, 52), r"1\.up_proj\.weight .*\[72, 52\].*\[52, 72\]"),
    "another width": (put("2.down_proj.weight", 72, 53), r"2\.down_proj\.weight .*\[72, 53\].*\[72, 52\]"),
    "a vector": (put("2.down_proj.weight", 72), r"2\.down_proj\.weight .*\[72\]"),
    "packed": (put("0.up_proj.weight", 52, 72, dtype=torch.uint8), r"\.0\.up_proj\.weight .*U8"),
    "float8": (put("0.up_proj.weight", 52, 72, dtype=torch.float8_e4m3fn), r"\.0\.up_proj\.weight .*F8_E4M3"),
    "quantizer's names": (rename("0.up_proj", "0.up_proj.weight_packed"), r"\.0\.up_proj\.weight is missing"),
    "another spelling": (rename("0.up_proj", "0.w3.weight"), r"\.0\.up_proj\.weight is missing"),
    "bias": (put("1.up_proj.bias", 52), r"\.1\.up_proj\.bias belong to experts"),
    "stack, too": (put("down_proj", 3, 52, 72), rf"\.\d\.down_proj\.weight .*{LAYER}\.down_proj"),
    "one of another spelling": (put("up_projs.1.weight", 52, 72), r"\.up_projs\.0\.weight is missing"),
    "twice": (put("01.up_proj.weight", 52, 72), r"\.1\.up_proj\.weight is missing, or stored under two names"),
    "missing every down": (lose("0.down", "1.down", "2.down"), rf"weights are missing: {LAYER}\.down_proj"),
}  # fmt: skip


@pytest.mark.parametrize(("what", "form"), in_turn(DAMAGE, ["one", "sharded", "bin", "state_dict"]))
def test_damage_is_an_error_that_names_the_tensor(what, form, text, tmp_path):
    _, model, state = text
    damage, named = DAMAGE[what]
    damage(state)
    if form == "state_dict":
        given = {"config": model.config, "state_dict": state}
    else:
        given = {}
        write(tmp_path / "damaged", model, state, form)
    folder = None if given else tmp_path / "damaged"
    # Wrong shapes of whole stacks are reported by transformers.
    with pytest.raises((CheckpointError, RuntimeError), match=named):
        llamoe.LlamoeForCausalLM.from_pretrained(folder, **given)


def test_any_size_is_drawn_anew_when_that_is_asked_for(text):
    folder, model, _ = text
    options = dict(num_local_experts=2, ignore_mismatched_sizes=True, output_loading_info=True)
    smaller, info = llamoe.LlamoeForCausalLM.from_pretrained(folder, **options)
    stacks = {name for name in model.state_dict() if ".experts." in name}
    assert {name for name, *_ in info["mismatched_keys"]} >= stacks
    assert not info["missing_keys"]


@for_spellings
def test_the_command_reads_both_spellings(spelling, tmp_path):
    model = TEXT.make()
    write(tmp_path / "split", model, split(model.state_dict(), spelling))
    convert(tmp_path / "split", tmp_path / "fused", layout="llamoe")
    assert_same_weights(
        load_whole(llamoe.LlamoeForCausalLM, tmp_path / "fused").state_dict(), model.state_dict()
    )
