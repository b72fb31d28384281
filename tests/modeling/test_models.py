"""One harness for all model classes: each test runs on every class that has what it tests, made from a tiny config."""

import copy
import io
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers
from safetensors import safe_open
from support import (
    DENSE,
    IMAGE_TOKEN,
    TEXT,
    TOKENS_PER_TILE,
    VISION,
    make_asymmetric,
    max_abs,
    stock_dense_config,
    stock_multimodal_config,
    stock_text_config,
)
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    Llama4VisionConfig,
    StaticCache,
)

import llamoe
from llamoe.modeling import moe
from llamoe.modeling.attention import eager_attention_forward

# Several attention chunks of 16 and temperature floors of 8; the batch holds rows that begin 5 and 17 tokens late.
LENGTH = 53
PADDING = (5, 0, 17)


def dense_config(**text):
    return llamoe.from_stock(stock_dense_config(**text))


def text_config(**text):
    return llamoe.from_stock(stock_text_config(**{"num_experts_per_tok": 2, **text}))


def vision_config():
    return llamoe.from_stock(Llama4VisionConfig(**VISION))


def multimodal_config(**text):
    return llamoe.from_stock(stock_multimodal_config(text))


@dataclass(frozen=True)
class Case:
    """A model class and what the tests must know of it."""

    name: str
    make_config: Callable
    auto_class: type
    stock_name: str | None
    is_text: bool = True
    has_images: bool = False
    has_experts: bool = False
    is_head: bool = False

    @property
    def model_class(self):
        return getattr(llamoe, self.name)

    def make(self, seed=0, **text):
        return make_asymmetric(self.model_class(self.make_config(**text)), seed)

    def inputs(self, padding=PADDING, length=LENGTH):
        """Rows without a token twice in a row, left-padded; row 1 has two tiles, row 2 one."""
        generator = torch.Generator().manual_seed(1)
        inputs = {}
        tiles = 0
        if self.is_text:
            ids = torch.randint(3, 90, (len(padding), length), generator=generator)
            mask = torch.ones_like(ids)
            for row, pad in enumerate(padding):
                ids[row, :pad], mask[row, :pad] = 0, 0
                if self.has_images and row:
                    count = TOKENS_PER_TILE * (3 - row)
                    ids[row, pad + 2 : pad + 2 + count] = IMAGE_TOKEN
                    tiles += 3 - row
            inputs = {"input_ids": ids, "attention_mask": mask}
        if self.has_images:
            size = VISION["image_size"]
            inputs["pixel_values"] = torch.randn(tiles or 3, 3, size, size, generator=generator)
        return inputs

    def row(self, inputs, row):
        """One row of `inputs` on its own, without its padding."""
        pad = int((inputs["attention_mask"][row] == 0).sum())
        alone = {name: inputs[name][row : row + 1, pad:] for name in ("input_ids", "attention_mask")}
        if self.has_images and row:
            alone["pixel_values"] = inputs["pixel_values"][slice(0, 2) if row == 1 else slice(2, 3)]
        return alone


CASES = [
    Case("LlamoeDenseModel", dense_config, AutoModel, "LlamaModel"),
    Case("LlamoeDenseForCausalLM", dense_config, AutoModelForCausalLM, "LlamaForCausalLM", is_head=True),
    Case("LlamoeTextModel", text_config, AutoModel, "Llama4TextModel", has_experts=True),
    Case(
        "LlamoeForCausalLM",
        text_config,
        AutoModelForCausalLM,
        "Llama4ForCausalLM",
        has_experts=True,
        is_head=True,
    ),
    Case("LlamoeVisionModel", vision_config, AutoModel, "Llama4VisionModel", is_text=False, has_images=True),
    Case("LlamoeModel", multimodal_config, AutoModel, None, has_images=True, has_experts=True),
    Case(
        "LlamoeForConditionalGeneration",
        multimodal_config,
        AutoModelForImageTextToText,
        "Llama4ForConditionalGeneration",
        has_images=True,
        has_experts=True,
        is_head=True,
    ),
]
MULTIMODAL = CASES[-1]


def for_cases(*wanted):
    """Parametrise over the classes that have all of these."""
    chosen = [case for case in CASES if all(getattr(case, name) for name in wanted)]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


def main_output(output):
    return output.logits if "logits" in output else output.last_hidden_state


@torch.no_grad()
def run(model, **inputs):
    return main_output(model(**inputs))


def content_of(folder):
    """A saved configuration but for its dtype, which transformers adds to the nested ones when it loads."""
    lines = (folder / "config.json").read_text().splitlines()
    return [line for line in lines if '"dtype"' not in line]


def assert_same_weights(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


# Saving, loading and copying


@for_cases()
@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_save_and_load_is_bit_equal(case, dtype, max_shard_size, tmp_path):
    model = case.make().to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "40KB")
    loaded, info = case.model_class.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == dtype
    assert_same_weights(model, loaded)
    loaded.save_pretrained(tmp_path / "again")
    assert content_of(tmp_path / "again") == content_of(tmp_path)
    for (name, buffer), (_, other) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
        assert torch.equal(buffer, other) and other.dtype == torch.float32, name
    inputs = case.inputs()
    assert torch.equal(run(model, **inputs), run(loaded, **inputs))


@for_cases()
def test_auto_classes_give_our_class(case, tmp_path):
    model = case.make()
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is type(model.config) and config == model.config
    loaded = case.auto_class.from_pretrained(tmp_path)
    assert type(loaded) is case.model_class
    assert_same_weights(model, loaded)
    made = case.auto_class.from_config(config)
    assert type(made) is case.model_class and made.state_dict().keys() == model.state_dict().keys()


def test_auto_model_gives_the_base_class_of_a_head(tmp_path):
    """transformers' convention: AutoModel on a head's folder loads the model below the head."""
    for case in CASES:
        if case.is_head:
            model = case.make()
            model.save_pretrained(tmp_path / case.name)
            base, info = AutoModel.from_pretrained(tmp_path / case.name, output_loading_info=True)
            assert type(base) is type(model.model) and not info["missing_keys"], info
            assert_same_weights(model.model, base)


@for_cases()
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch_save"])
def test_copies_are_equal_and_independent(case, how):
    model, inputs = case.make(), case.inputs()
    expected = run(model, **inputs)
    getattr(model, "model", None)  # a view that was made already must not be shared with the copy
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run(other, **inputs), expected)


@for_cases()
@pytest.mark.parametrize("how", ["from_pretrained", "to_empty"])
def test_meta_construction_leaves_no_buffer_wrong(case, how, tmp_path):
    """`to_empty` is how FSDP and others fill a model made on the meta device; its buffers then hold anything."""
    model, inputs = case.make(), case.inputs()
    if how == "from_pretrained":
        model.save_pretrained(tmp_path)
        other = case.model_class.from_pretrained(tmp_path)
    else:
        with torch.device("meta"):
            other = case.model_class(case.make_config())
        other.to_empty(device="cpu").load_state_dict(model.state_dict())
        other.eval()
    for (name, buffer), (_, expected) in zip(other.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert torch.equal(run(other, **inputs), run(model, **inputs))


@for_cases("is_head")
def test_tied_head_is_saved_once_and_tied_again(case, tmp_path):
    model = case.make(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "lm_head" in name]  # noqa: SIM118
    loaded, info = case.model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    inputs = case.inputs()
    assert torch.equal(run(model, **inputs), run(loaded, **inputs))


@for_cases("is_head")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_resized_vocabulary(case, tied, tmp_path):
    model, inputs = case.make(tie_word_embeddings=tied), case.inputs()
    before = run(model, **inputs)
    model.resize_token_embeddings(120)
    output = model(**inputs, labels=inputs["input_ids"])
    assert output.logits.shape[-1] == model.config.get_text_config().vocab_size == 120
    assert max_abs(output.logits[..., :101], before) < 1e-5
    assert output.loss.isfinite()
    model.save_pretrained(tmp_path)
    assert torch.equal(run(case.model_class.from_pretrained(tmp_path), **inputs), output.logits)


@for_cases("stock_name")
def test_parameters_and_modules_are_those_of_stock(case):
    model = case.make()
    stock_class = getattr(transformers, case.stock_name)
    stock_config = {
        dense_config: stock_dense_config,
        text_config: stock_text_config,
        vision_config: lambda: Llama4VisionConfig(**VISION),
        multimodal_config: stock_multimodal_config,
    }[case.make_config]()
    stock = stock_class(stock_config)
    assert model.num_parameters() == stock.num_parameters()
    names = {type(module).__name__ for module in model.modules()}
    assert model._no_split_modules and set(model._no_split_modules) <= names


# Outputs


@for_cases()
def test_forward_is_deterministic_and_changes_no_input(case):
    model, inputs = case.make(), case.inputs()
    given = copy.deepcopy(inputs)
    assert torch.equal(run(model, **inputs), run(model, **inputs))
    assert all(torch.equal(inputs[name], given[name]) for name in given)


@for_cases()
def test_tuple_is_the_output_in_order(case):
    model, inputs = case.make(), case.inputs()
    if case.is_head:
        inputs["labels"] = inputs["input_ids"]
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).to_tuple()
        given = model(**inputs, output_hidden_states=True, return_dict=False)
    assert type(given) is tuple and len(given) == len(expected)
    for mine, theirs in zip(given, expected, strict=True):
        assert type(mine) is type(theirs)
        assert not isinstance(mine, torch.Tensor) or torch.equal(mine, theirs)


@for_cases()
@pytest.mark.parametrize("by_config", [False, True], ids=["argument", "config"])
def test_hidden_states_and_attentions(case, by_config):
    model, inputs = case.make(), case.inputs()
    model.set_attn_implementation("eager")
    options = {"output_hidden_states": True, "output_attentions": True}
    if by_config:
        for name, value in options.items():
            setattr(model.config, name, value)
    with torch.no_grad():
        output = model(**inputs, **({} if by_config else options))
    config = model.config.get_text_config()
    batch, length = (3, LENGTH) if case.is_text else (3, config.num_patches + 1)
    assert len(output.hidden_states) == config.num_hidden_layers + 1
    assert {tuple(state.shape) for state in output.hidden_states} == {(batch, length, config.hidden_size)}
    assert len(output.attentions) == config.num_hidden_layers
    heads = config.num_attention_heads
    assert {tuple(weights.shape) for weights in output.attentions} == {(batch, heads, length, length)}
    rows = torch.stack(output.attentions).sum(-1)
    assert max_abs(rows, torch.ones_like(rows)) < 1e-5
    if not case.is_head and case.is_text:
        assert torch.equal(output.hidden_states[-1], output.last_hidden_state)


@for_cases("is_text")
def test_rows_do_not_touch_each_other(case):
    model, inputs = case.make(), case.inputs()
    together = run(model, **inputs)
    for row, pad in enumerate(PADDING):
        alone = run(model, **case.row(inputs, row))
        assert max_abs(alone[0], together[row, pad:]) < 1e-5 * together.std()
        assert max_abs(alone[0, -1], together[row - 1, -1]) > 0.1 * together.std()


# The cache


@for_cases("is_text")
@pytest.mark.parametrize(
    "pieces",
    [[52], [30, 20], [32, 16], [33, 1, 14], [48, 2], [47], [30]],
    ids=lambda pieces: "-".join(map(str, pieces)),
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_pieces_and_single_tokens_equal_one_pass(case, pieces, cache):
    """Prefill in pieces, then token by token: borders of the pieces fall before, on and behind chunk borders."""
    model, inputs = case.make(), case.inputs()
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    expected = run(model, input_ids=ids, attention_mask=mask, use_cache=False, **inputs)
    config = model.config.get_text_config()
    past = DynamicCache(config=config) if cache == "dynamic" else StaticCache(config=config, max_cache_len=60)
    parts, begin = [], 0
    for size in pieces + [1] * (LENGTH - sum(pieces)):
        end = begin + size
        part = run(
            model,
            input_ids=ids[:, begin:end],
            attention_mask=mask[:, :end],
            past_key_values=past,
            use_cache=True,
            **inputs,
        )
        parts.append(part)
        begin = end
        inputs = {}  # the pictures stand in the first piece
    difference = (torch.cat(parts, 1) - expected).abs()[mask.bool()]
    assert difference.max() < 1e-5 * expected.std()


# Generation


def generate(model, inputs, **options):
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": -1, **options}
    return model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]


@for_cases("is_head")
def test_generate_on_a_padded_batch_equals_each_row_alone(case):
    """Twenty tokens, over more than one chunk border; the reference is the argmax of passes without a cache."""
    model, inputs = case.make(), case.inputs(length=29)
    together = generate(model, inputs)
    for row in range(len(PADDING)):
        alone = case.row(inputs, row)
        assert torch.equal(generate(model, alone)[0], together[row])
        for _ in range(20):
            token = run(model, **alone, use_cache=False)[:, -1].argmax(-1, keepdim=True)
            alone["input_ids"] = torch.cat([alone["input_ids"], token], 1)
            alone["attention_mask"] = torch.ones_like(alone["input_ids"])
        assert torch.equal(alone["input_ids"][0, -20:], together[row])


@for_cases("is_head")
@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prefill_chunk_size": 11},
        {"num_beams": 1, "output_hidden_states": True, "output_logits": True, "return_dict_in_generate": True},
    ],
    ids=["static", "no_cache", "prefill_chunks", "dict"],
)
def test_ways_to_generate_agree(case, options):
    model, inputs = case.make(), case.inputs(length=29)
    if "prefill_chunk_size" in options and case.has_images:
        pytest.skip("transformers prefills in pieces for texts only")
    expected = generate(model, inputs)
    if "return_dict_in_generate" in options:
        result = model.generate(**inputs, max_new_tokens=20, do_sample=False, eos_token_id=-1, **options)
        assert len(result.logits) == len(result.hidden_states) == 20
        given = result.sequences[:, 29:]
    else:
        given = generate(model, inputs, **options)
    assert torch.equal(given, expected)


@for_cases("is_head")
def test_sampling_follows_the_seed(case):
    model, inputs = case.make(), case.inputs(length=29)
    samples = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        samples.append(generate(model, inputs, do_sample=True, num_return_sequences=2))
    assert samples[0].shape == (6, 20)
    assert torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])
    assert not torch.equal(samples[0][0], samples[0][1])


@for_cases("is_head")
def test_beams_find_no_worse_than_greedy(case):
    model, inputs = case.make(), case.row(case.inputs(length=29), 1)

    def log_probability(tokens):
        ids = torch.cat([inputs["input_ids"], tokens], 1)
        whole = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        scores = run(model, **whole)[:, -9:-1].log_softmax(-1)
        return scores.gather(2, tokens[..., None]).sum().item()

    greedy = generate(model, inputs, max_new_tokens=8)
    beams = generate(model, inputs, max_new_tokens=8, num_beams=4)
    assert beams.shape == greedy.shape and not torch.equal(beams, greedy)
    assert log_probability(beams) > log_probability(greedy)


# Training


def gradients(case, model, reentrant=None, aux_coef=0.0):
    inputs = case.inputs()
    model.zero_grad()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if aux_coef:
        model.config.get_text_config().router_aux_loss_coef = aux_coef
        inputs["output_router_logits"] = True
    if case.is_head:
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    else:
        loss = model(**inputs).last_hidden_state.square().mean()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(given, expected):
    (loss, mine), (expected_loss, theirs) = given, expected
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in theirs.items():
        assert (mine[name] is None) == (gradient is None), name
        if gradient is not None:
            assert max_abs(mine[name], gradient) <= 1e-5 * gradient.abs().max(), name


@for_cases()
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_checkpointing_keeps_the_gradients(case, reentrant):
    expected = gradients(case, case.make().train())
    model = case.make().train()
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    calls = []
    for layer in layers:
        layer.input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    assert_same_gradients(gradients(case, model, reentrant), expected)
    # Computed again in the backward pass; else nothing was saved.
    assert len(calls) == 2 * len(layers)


@for_cases("is_head", "has_experts")
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_checkpointing_keeps_the_router_loss_or_says_that_it_cannot(case, reentrant):
    """Reentrant checkpointing records router logits without a graph: the loss would show a term that trains nothing."""
    expected = gradients(case, case.make().train(), aux_coef=3.0)
    try:
        given = gradients(case, case.make().train(), reentrant, aux_coef=3.0)
    except ValueError as error:
        assert reentrant and "use_reentrant" in str(error)
    else:
        assert_same_gradients(given, expected)


@for_cases("is_head")
def test_training_lowers_the_loss(case):
    model, inputs = case.make().train(), case.inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    losses = []
    for _ in range(8):
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses


# Backends


@pytest.fixture
def calls(monkeypatch):
    """Counts how often each backend runs."""
    counts = {}

    def count(name, function):
        def counted(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return counted

    for module in ("attention", "vision"):
        name = f"llamoe.modeling.{module}.eager_attention_forward"
        monkeypatch.setattr(name, count("eager_attention", eager_attention_forward))
    monkeypatch.setattr(moe.Experts, "loop_over_experts", count("eager", moe.Experts.loop_over_experts))
    monkeypatch.setattr(moe, "grouped_mm_experts_forward", count("grouped_mm", moe.grouped_mm_experts_forward))
    batched = moe.EXPERTS_INTERFACE["batched_mm"]
    moe.EXPERTS_INTERFACE["batched_mm"] = count("batched_mm", batched)
    yield counts
    moe.EXPERTS_INTERFACE["batched_mm"] = batched


@for_cases()
@pytest.mark.parametrize("when", ["load", "set"])
def test_attention_implementation_is_taken(case, when, calls, tmp_path):
    model, inputs = case.make(), case.inputs()
    expected = run(model, **inputs)
    assert "eager_attention" not in calls
    if when == "set":
        model.set_attn_implementation("eager")
    else:
        model.save_pretrained(tmp_path)
        model = case.model_class.from_pretrained(tmp_path, attn_implementation="eager")
    difference = (run(model, **inputs) - expected).abs()
    if case.is_text:  # what stands on padding is anything
        difference = difference[inputs["attention_mask"].bool()]
    assert difference.max() < 1e-5 * expected.std()
    layers = sum(type(module).__name__ in model._no_split_modules for module in model.modules())
    assert calls["eager_attention"] == layers


@for_cases("has_experts")
@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("when", ["load", "set", "from_config"])
def test_experts_implementation_is_taken(case, name, when, calls, tmp_path):
    model, inputs = case.make(), case.inputs()
    model.set_experts_implementation("eager")
    expected = run(model, **inputs)
    if when == "set":
        model.set_experts_implementation(name)
    elif when == "load":
        model.save_pretrained(tmp_path)
        model = case.model_class.from_pretrained(tmp_path, experts_implementation=name)
    else:
        weights = model.state_dict()
        model = case.auto_class.from_config(case.make_config(), experts_implementation=name)
        model.load_state_dict(weights)
        model.eval()
    calls.clear()
    assert max_abs(run(model, **inputs), expected) < 1e-5 * expected.std()
    assert calls == {name: 2}


@for_cases("has_experts")
@pytest.mark.parametrize("when", ["load", "set"])
def test_unknown_experts_implementation(case, when, tmp_path):
    model = case.make()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"experts_implementation=\"fast\".*grouped_mm"):
        if when == "set":
            model.set_experts_implementation("fast")
        else:
            case.model_class.from_pretrained(tmp_path, experts_implementation="fast")


@for_cases("has_experts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_grouped_mm_in_torch(case, dtype, monkeypatch):
    model, inputs = case.make(intermediate_size=48).to(dtype), case.inputs()
    expected = run(model, **inputs)
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    assert max_abs(run(model, **inputs), expected) < (1e-5 if dtype == torch.float32 else 0.05) * expected.std()
    main_output(model(**inputs)).float().square().mean().backward()
    experts = next(module for module in model.modules() if isinstance(module, moe.Experts))
    assert experts.gate_up_proj.grad.abs().sum() > 0


@for_cases()
@pytest.mark.parametrize("how", ["from_pretrained", "from_config"])
def test_one_line_names_the_backends(case, how, tmp_path, caplog):
    model = case.make()
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="llamoe"):
        if how == "from_pretrained":
            case.auto_class.from_pretrained(tmp_path, attn_implementation="eager")
        else:
            case.auto_class.from_config(case.make_config(), attn_implementation="eager")
    lines = [record.getMessage() for record in caplog.records if record.name == "llamoe"]
    experts = ", experts grouped_mm" if case.has_experts else ""
    assert lines == [f"{case.name}: attention eager{experts}"]


def test_the_line_says_where_grouped_mm_gives_way(tmp_path, caplog):
    """A width of 52 in bfloat16 is 104 bytes, no multiple of 16."""
    with caplog.at_level(logging.INFO, logger="llamoe"):
        AutoModelForCausalLM.from_config(text_config(), dtype=torch.bfloat16)
    assert "experts eager (grouped_mm does not take" in caplog.text


# The multimodal class as a pair of a head and the model below it


def test_view_of_the_model_below_the_head():
    model, inputs = MULTIMODAL.make(), MULTIMODAL.inputs()
    names = set(model.state_dict())
    view = model.model
    assert type(view) is llamoe.LlamoeModel and view is model.model and view is model.base_model
    assert model.get_decoder() is view.language_model is model.language_model.model
    states = run(view, **inputs)
    assert torch.equal(model.get_output_embeddings()(states), run(model, **inputs))
    assert set(model.state_dict()) == names and "model" not in dict(model.named_children())

    model.train()
    assert model.model.training
    model.eval()
    assert not model.model.training
    model.to(torch.bfloat16)
    assert model.model.dtype == torch.bfloat16

    model.multi_modal_projector = copy.deepcopy(model.multi_modal_projector)
    assert model.model is not view and model.model.multi_modal_projector is model.multi_modal_projector
    model.set_decoder(copy.deepcopy(model.get_decoder()))
    assert model.model.language_model is model.language_model.model


def test_assigning_the_model_below_the_head():
    """A second copy of the weights under `model.` would be trained and saved by nobody, or twice."""
    model = MULTIMODAL.make()
    names, replacement = set(model.state_dict()), copy.deepcopy(model.model)
    try:
        model.model = replacement
    except (AttributeError, TypeError):
        return
    assert set(model.state_dict()) == names
    assert model.language_model.model is replacement.language_model


# What transformers reads without llamoe

READ_STOCK = """
import sys, torch, transformers
folder, out = sys.argv[1:]
inputs = torch.load(f"{folder}/inputs.pt")
results = {}
for name in inputs:
    model_class = getattr(transformers, name.split("-")[1])
    model, info = model_class.from_pretrained(f"{folder}/{name}", output_loading_info=True)
    assert not any(info.values()), (name, info)
    output = model(**inputs[name])
    results[name] = output.logits if "logits" in output else output.last_hidden_state
    assert type(model).__name__ in (model.config.architectures or [type(model).__name__])
assert "llamoe" not in sys.modules
torch.save(results, out)
"""


@pytest.fixture(scope="module")
def stock_results(tmp_path_factory):
    """Every class in both states, new and loaded, saved for stock and run there by one process."""
    folder = tmp_path_factory.mktemp("stock")
    inputs, expected = {}, {}
    for case in CASES:
        if not case.stock_name:
            continue
        model = case.make()
        model.save_pretrained(folder / "ours")
        for state, saved in (("new", model), ("loaded", case.model_class.from_pretrained(folder / "ours"))):
            name = f"{state}-{case.stock_name}"
            saved.save_pretrained(folder / name, layout="stock")
            # Stock scales padded rows by other temperatures: the comparison is on rows without padding.
            inputs[name] = case.inputs(padding=(0, 0, 0))
            expected[name] = run(saved, **inputs[name])
    torch.save(inputs, folder / "inputs.pt")
    done = subprocess.run(
        [sys.executable, "-c", READ_STOCK, folder, folder / "results.pt"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return expected, torch.load(folder / "results.pt")


@for_cases("stock_name")
@pytest.mark.parametrize("state", ["new", "loaded"])
def test_stock_layout_is_read_without_llamoe(case, state, stock_results):
    expected, results = stock_results
    name = f"{state}-{case.stock_name}"
    assert max_abs(results[name], expected[name]) < 1e-5 * expected[name].std()
