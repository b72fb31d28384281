"""Every attention implementation gives the numbers of `eager`; `test_judged.py` tests decoders on all kinds of batches.

FlashAttention needs a GPU. llamoe's part, the lengths and indices of sequences, is tested on a CPU, with plain versions
of the two functions that transformers loads from the package. `test_flash_attention_on_a_gpu` runs the real kernels.
"""

import logging

import pytest
import torch
from support.models import MODELS, main_output, max_abs, run
from support.tables import in_turn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DataCollatorWithFlattening

import llamoe
from llamoe.modeling.attention import implementation as implementation_module

CASES = {case.name: case for case in MODELS}
TEXT, DENSE = CASES["LlamoeForCausalLM"], CASES["LlamoeDenseForCausalLM"]
DECODERS = pytest.mark.parametrize("case", [DENSE, TEXT], ids=lambda case: case.name)
# Models with a head contain those without.
HEADS = [case for case in MODELS if case.is_head]
WHOLE = [*HEADS, CASES["LlamoeVisionModel"]]
# The fixture `implementation` takes these names; results are compared with `eager`.
IMPLEMENTATIONS = ["sdpa", "flex_attention", "flash_attention_2"]
# Sums are in another order; logits have a standard deviation of about one.
TOLERANCE = 1e-5


def named(value):
    return getattr(value, "name", value)


def make(case, implementation):
    """Return a model with this implementation of attention."""
    model = case.make_small()
    model.set_attn_implementation(implementation)
    assert implementation in (
        model.config._attn_implementation,
        model.config.get_text_config()._attn_implementation,
    )
    return model


def truth_of(case, **inputs):
    """Return the result of `eager`."""
    return run(make(case, "eager"), **inputs)


def assert_equal(given, expected, mask=None):
    difference = (given - expected).abs()
    if mask is not None:
        difference = difference[mask.bool()]
    assert difference.max() < TOLERANCE * max(1.0, expected.std().item())


@pytest.mark.parametrize("name", ["LlamoeForConditionalGeneration", "LlamoeVisionModel"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_pictures_equal_eager(name, implementation):
    case = CASES[name]
    inputs = case.inputs()
    given = run(make(case, implementation), **inputs)
    assert_equal(given, truth_of(case, **inputs), inputs.get("attention_mask"))


@pytest.mark.parametrize(
    ("case", "implementation", "with_positions"),
    in_turn([DENSE, TEXT], IMPLEMENTATIONS, [False, True]),
    indirect=["implementation"],
    ids=named,
)
def test_lengths_of_a_flattening_collator(case, with_positions, implementation):
    """If the collator gives no positions, they follow from its lengths, which are arguments of FlashAttention alone."""
    model = make(case, implementation)
    rows = case.inputs(padding=(0,))["input_ids"][0].split((20, 33))
    collate = DataCollatorWithFlattening(
        return_position_ids=with_positions, return_flash_attn_kwargs=True, return_tensors="pt"
    )
    batch = collate([{"input_ids": row.tolist()} for row in rows])
    assert ("position_ids" in batch) == with_positions
    logits = run(model, **{name: batch[name] for name in batch if name != "labels"})[0]
    for given, row in zip(logits.split((20, 33)), rows, strict=True):
        assert_equal(given, truth_of(case, input_ids=row[None])[0])


@pytest.mark.parametrize("implementation", ["eager", *IMPLEMENTATIONS], indirect=True)
def test_positions_that_a_mask_hides_may_be_any(implementation):
    """For some of these positions the logarithm in the temperature is NaN."""
    inputs = TEXT.inputs((3, 0, 17), length=37)
    mask, index = inputs["attention_mask"], torch.arange(37).expand(3, -1)
    clean = (mask.cumsum(1) - 1).clamp(min=0)
    expected = truth_of(TEXT, **inputs, position_ids=clean)
    for hidden in (2**40, -(2**62), 2**63 - 1, torch.iinfo(torch.int64).min, index - mask.argmax(1)[:, None]):
        inputs["position_ids"] = torch.where(mask == 1, clean, hidden)
        assert_equal(run(make(TEXT, implementation), **inputs), expected, mask)


def test_an_unknown_type_of_layer_is_refused(flash):
    """FlashAttention takes no mask, so such layers would silently have full attention."""
    model = make(DENSE, "flash_attention_2")
    model.config.layer_types = ["full_attention", "dilated_attention", "full_attention"]
    with pytest.raises(KeyError, match="dilated_attention"):
        model(DENSE.inputs()["input_ids"], use_cache=False)


# Arguments of FlashAttention's kernels


def test_flash_attention_gets_sequences_if_there_is_padding(flash):
    model, inputs = make(DENSE, "flash_attention_2"), DENSE.inputs()
    run(model, **inputs)
    assert flash.calls == {"varlen": model.config.num_hidden_layers}
    flash.calls.clear()
    run(model, input_ids=inputs["input_ids"])
    assert flash.calls == {"whole": model.config.num_hidden_layers}


@torch.no_grad()
@DECODERS
def test_a_boolean_mask_of_four_axes(case):
    """`eager` adds masks to the scores, so True must not count as 1."""
    ids = case.inputs()["input_ids"]
    index = torch.arange(ids.shape[1])
    mask = (index <= index[:, None]) & ((index % 5 != 2) | (index == index[:, None]))
    eager, sdpa = (
        make(case, name)(ids, attention_mask=mask[None, None]).logits for name in ("eager", "sdpa")
    )
    # Sums are in another order. If the mask were added as ones, the difference would be 1 and more.
    assert max_abs(eager, sdpa) < 1e-4
    with pytest.raises(ValueError, match="attention_mask"):
        make(case, "eager")(ids, attention_mask=mask[None, None].long())


# Attention weights


@pytest.mark.parametrize(("case", "name"), in_turn(HEADS, IMPLEMENTATIONS), ids=named)
def test_only_eager_returns_attention_weights(case, name, flash):
    """Other implementations return an empty tuple, and from `generate` one for each token, as in transformers."""
    model = make(case, name)
    inputs = case.inputs(length=29)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        plain = run(model, **inputs)
        output = model(**inputs, output_attentions=True)
        assert output.attentions == () and torch.equal(main_output(output), plain)
        options = dict(max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
        assert model.generate(**inputs, **options).attentions == ((), ())


def test_flex_attention_returns_no_weights(monkeypatch):
    """On a GPU its second result is the logarithm of each row's sum, which transformers returns as the attentions."""
    model = DENSE.make_small()
    monkeypatch.setattr(implementation_module, "FOR_GPUS", ())
    functions = llamoe.modeling.attention.layer.ALL_ATTENTION_FUNCTIONS
    model.set_attn_implementation("flex_attention")
    monkeypatch.setitem(
        functions,
        "flex_attention",
        lambda _, q, *args, **kwargs: (torch.zeros_like(q).transpose(1, 2), q.sum(-1)),
    )
    # Otherwise the mask function would be compiled.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert model(**DENSE.inputs(), output_attentions=True).attentions == ()


@torch.no_grad()
@pytest.mark.parametrize("name", ["LlamoeVisionModel", "LlamoeModel", "LlamoeForConditionalGeneration"])
def test_weights_of_the_tower(name):
    """The tower returns weights with every implementation, since it then computes by `eager`."""
    case, attentions = CASES[name], []
    model, pixels = case.make_small(), case.inputs()["pixel_values"]
    for implementation in ("eager", "sdpa"):
        if name == "LlamoeVisionModel":
            model.set_attn_implementation(implementation)
            attentions.append(model(pixels, output_attentions=True).attentions)
        else:
            model.set_attn_implementation({"vision_config": implementation})
            attentions.append(model.get_image_features(pixels, output_attentions=True).attentions)
    layers = getattr(model, "vision_model", model).model.layers
    assert len(attentions[0]) == len(attentions[1]) == len(layers)
    assert all(max_abs(mine, its) < 1e-6 for mine, its in zip(*attentions, strict=True))


# Implementations with their own caches


@DECODERS
def test_keywords_reach_the_implementation_unchanged(case):
    """Continuous batching, vLLM and others pass their caches through the model to the attention function."""
    calls = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        calls.append((module, kwargs))
        return torch.zeros_like(query).transpose(1, 2), None

    functions = llamoe.modeling.attention.layer.ALL_ATTENTION_FUNCTIONS
    functions["untouched"] = attend
    try:
        model = case.make_small()
        model.set_attn_implementation("untouched")
        names = ["block_table", "attention_instances"]
        extra = {name: object() for name in names}
        lengths = torch.tensor([0, 20, 53], dtype=torch.int32)
        positions = torch.arange(53)[None]
        ids = case.inputs(padding=(0,))["input_ids"]
        model(ids, position_ids=positions, cu_seq_lens_q=lengths, max_length_q=33, use_cache=False, **extra)
    finally:
        del functions["untouched"]
    assert [module.layer_idx for module, _ in calls] == list(range(model.config.num_hidden_layers))
    for module, kwargs in calls:
        assert all(kwargs[name] is extra[name] for name in extra)
        assert kwargs["cu_seq_lens_q"] is lengths and kwargs["position_ids"] is positions
        assert kwargs["scaling"] == module.scaling and module.is_causal
        assert module.num_key_value_groups == 3 and module.config is model.config


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES.values()], ids=lambda case: case.name)
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_on_a_gpu(case, version):
    """Errors of the real kernels in bfloat16, measured against float32, are at most 1.5 times those of `eager`."""
    model, inputs = case.make_small(head_dim=32) if case.is_text else case.make_small(), case.inputs()
    inputs = {name: value.cuda() for name, value in inputs.items()}
    model = model.cuda()
    model.set_attn_implementation("eager")
    truth = run(model, **inputs)
    model = model.to(torch.bfloat16)
    eager = run(model, **inputs)
    try:
        model.set_attn_implementation(f"flash_attention_{version}")
    except ImportError as error:
        pytest.skip(str(error))
    flash = run(model, **inputs)
    errors = [(logits.float() - truth).abs() for logits in (eager, flash)]
    if case.is_text:
        errors = [error[inputs["attention_mask"].bool()] for error in errors]
    assert errors[1].median() <= 1.5 * errors[0].median()


@pytest.mark.parametrize(
    ("case", "name"),
    [*((case, "flex_attention") for case in WHOLE), (TEXT, "flash_attention_2")],
    ids=named,
)
def test_sdpa_replaces_other_implementations(case, name, flash, monkeypatch, caplog):
    """It replaces flex attention on a CPU, and FlashAttention in decoders with chunks, with one warning.

    Batches have padding, and are longer than a chunk.
    """
    logging.Logger.warning_once.cache_clear()
    functions = llamoe.modeling.attention.layer.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions, name, None)
    model, inputs = make(case, name), case.inputs()
    for _ in range(2):
        assert_equal(run(model, **inputs), truth_of(case, **inputs), inputs.get("attention_mask"))
    assert sum(name in record.message for record in caplog.records) == 1


def test_a_block_mask_on_a_cpu():
    model = make(DENSE, "flex_attention")
    ids = DENSE.inputs(padding=(0, 0))["input_ids"]
    blocks = create_block_mask(lambda b, h, q, k: (q >= k) & (k >= 3 * b), 2, None, 53, 53, "cpu")
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = truth_of(DENSE, input_ids=ids, attention_mask=mask, position_ids=torch.arange(53)[None])
    assert_equal(run(model, input_ids=ids, attention_mask=blocks), expected, mask)


@pytest.mark.slow
@DECODERS
def test_compiled_flex_attention_equals_eager(case, monkeypatch):
    """Flex attention is compiled, as on a GPU; on a CPU this takes half a minute."""
    monkeypatch.setattr(implementation_module, "FOR_GPUS", ())
    model, inputs = make(case, "flex_attention"), case.inputs()
    assert_equal(run(model, **inputs), truth_of(case, **inputs), inputs["attention_mask"])
