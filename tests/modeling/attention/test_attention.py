"""Every attention implementation gives the numbers of `eager`: padded, packed, cached, in chunks, with gradients.

Flash attention needs a GPU. What is ours of it, the arithmetic of sequences and indices, is proven here on a plain
version of its two functions that stands where transformers loads the package; `test_flash_attention_on_a_gpu` runs
the real kernels where there are any.
"""

import functools
import logging

import pytest
import torch
from support.models import MODELS, PADDING, main_output, max_abs, run
from support.tables import in_turn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

import llamoe
from llamoe.modeling._compat import CACHE
from llamoe.modeling.attention import implementation as implementation_module

CASES = {case.name: case for case in MODELS}
TEXT, DENSE = CASES["LlamoeForCausalLM"], CASES["LlamoeDenseForCausalLM"]
MIXTRAL = CASES["LlamoeMixtralForCausalLM"]
DECODERS = pytest.mark.parametrize("case", [DENSE, TEXT], ids=lambda case: case.name)
# Models without a head are in those with one.
HEADS = [case for case in MODELS if case.is_head]
WHOLE = [*HEADS, CASES["LlamoeVisionModel"]]
# Those of the fixture `implementation`; `eager` is the truth.
IMPLEMENTATIONS = ["sdpa", "flex_attention", "flash_attention_2"]
# Sums in another order, of logits with a deviation of about one.
TOLERANCE = 1e-5


def named(value):
    return getattr(value, "name", value)


def make(case, implementation):
    """A model with an implementation of attention."""
    model = case.make_small()
    model.set_attn_implementation(implementation)
    assert implementation in (
        model.config._attn_implementation,
        model.config.get_text_config()._attn_implementation,
    )
    return model


def pair(case, implementation):
    """A model with `eager`, and the same with another implementation."""
    return make(case, "eager"), make(case, implementation)


# What `truth_of` gives.
_TRUTHS = {}


def truth_of(case, **inputs):
    """The numbers of `eager`, computed once for all other implementations."""
    key = case, *((name, tensor.numpy().tobytes()) for name, tensor in inputs.items())
    if key not in _TRUTHS:
        _TRUTHS[key] = run(make(case, "eager"), **inputs)
    return _TRUTHS[key]


def assert_equal(given, expected, mask=None):
    difference = (given - expected).abs()
    if mask is not None:
        difference = difference[mask.bool()]
    assert difference.max() < TOLERANCE * max(1.0, expected.std().item())


@pytest.mark.parametrize(
    ("case", "implementation", "side"),
    in_turn(WHOLE, IMPLEMENTATIONS, ["left", "right", "none"]),
    indirect=["implementation"],
    ids=named,
)
def test_every_class_equals_eager(case, side, implementation):
    side = side if case.is_text else "none"
    model = make(case, implementation)
    inputs = case.inputs(padding=(0, 0, 0) if side == "none" else PADDING)
    if side == "right" and case.is_text:
        for name in ("input_ids", "attention_mask"):
            rows = zip(inputs[name], PADDING, strict=True)
            inputs[name] = torch.stack([row.roll(-pad) for row, pad in rows])
    mask = inputs.get("attention_mask")
    assert_equal(run(model, **inputs), truth_of(case, **inputs), mask)
    if side == "none" and case.is_text:
        del inputs["attention_mask"]
        assert_equal(run(model, **inputs), truth_of(case, **inputs))


# How rows of several sequences, without an attention mask, say where each begins.
PACKED = {
    "positions": {"return_position_ids": True},
    "lengths": {"return_position_ids": False, "return_flash_attn_kwargs": True},
    "both": {"return_position_ids": True, "return_flash_attn_kwargs": True},
}


@pytest.mark.parametrize(
    ("case", "implementation", "by", "use_cache"),
    in_turn([DENSE, TEXT], IMPLEMENTATIONS, PACKED, [False, True]),
    indirect=["implementation"],
    ids=named,
)
def test_packed_rows_equal_rows_alone(case, by, use_cache, implementation):
    """Sequences shorter and longer than a chunk; lengths alone only flash attention would heed otherwise."""
    model, lengths = make(case, implementation), (5, 31, 1, 16)
    parts = case.inputs(padding=(0,))["input_ids"][0].split(lengths)
    collate = DataCollatorWithFlattening(**PACKED[by], return_tensors="pt")
    batch = collate([{"input_ids": part.tolist()} for part in parts])
    del batch["labels"]
    if by == "positions":  # of a second row with other sequences
        batch = {name: torch.cat([value, value.flip(1)]) for name, value in batch.items()}
        batch["position_ids"][1] = torch.cat([torch.arange(length) for length in lengths[::-1]])
        parts = [*parts, *batch["input_ids"][1].split(lengths[::-1])]
    logits = run(model, **batch, use_cache=use_cache).flatten(0, 1)
    for given, part in zip(logits.split([len(part) for part in parts]), parts, strict=True):
        assert_equal(given, truth_of(case, input_ids=part[None])[0])


# What positions may stand under a mask. The logarithm of the temperature has no value for the first of them; the
# library's own tokens are numbered from the first real one.
HIDDEN = {
    "counted on from the padding": lambda index, pad: index - pad,
    "of any size": lambda index, pad: torch.tensor([-3, 2**40, -(2**62), 11])[index % 4],
    "of the limits": lambda index, pad: torch.where(index % 2 == 0, torch.iinfo(torch.int64).min, 2**63 - 1),
}


@pytest.mark.parametrize(
    ("case", "implementation", "cache", "hidden"),
    [
        *in_turn([TEXT], ["eager", *IMPLEMENTATIONS], [None, "dynamic", "static"], HIDDEN),
        *((DENSE, *row) for row in zip(IMPLEMENTATIONS, (None, "dynamic", "static"), HIDDEN, strict=True)),
    ],
    indirect=["implementation"],
    ids=named,
)
def test_positions_that_a_mask_hides_do_not_matter(case, cache, hidden, implementation):
    """Padding on the left, on the right and in the middle; in one pass and in pieces, over borders of chunks."""
    model = make(case, implementation)
    inputs = case.inputs((3, 0, 17), length=37)
    mask = inputs["attention_mask"]
    mask[0, 30:], mask[1, 33:] = 0, 0
    if cache is None:  # windows of a chunk count in indices
        mask[2, 20:23] = 0
    clean = (mask.cumsum(1) - 1).clamp(min=0)
    expected = truth_of(case, **inputs, position_ids=clean)
    index = torch.arange(37).expand(3, -1)
    inputs["position_ids"] = torch.where(
        mask == 1, clean, HIDDEN[hidden](index, torch.tensor([[3], [0], [17]]))
    )
    pieces = (37,) if cache is None else (2, 14, 1, 19, 1)
    past = {
        None: lambda: None,
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=40),
    }[cache]()
    parts, begin = [], 0
    for size in pieces:
        end = begin + size
        piece = {name: inputs[name][:, begin:end] for name in ("input_ids", "position_ids")}
        parts.append(run(model, **piece, attention_mask=mask[:, :end], past_key_values=past))
        begin = end
    assert_equal(torch.cat(parts, 1), expected, mask)


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=50),
    "no_layers": lambda config: DynamicCache(),
}


@pytest.mark.parametrize(
    ("case", "implementation", "cache", "side", "pieces"),
    [
        *in_turn(
            [TEXT],
            ["eager", *IMPLEMENTATIONS],
            CACHES,
            ["left", "right", "none", "late"],
            [(15, 1, 1, 13, 7), (3, 5, 27, 2)],
        ),
        *(
            (TEXT, "sdpa", cache, side, (7, 20, 1, 9))
            for cache in CACHES
            for side in ("none", "late", "left")
        ),
        (DENSE, "sdpa", "dynamic", "right", (15, 1, 1, 13, 7)),
        (DENSE, "flex_attention", "static", "left", (15, 1, 1, 13, 7)),
        (DENSE, "flash_attention_2", "no_layers", "none", (15, 1, 1, 13, 7)),
        *(
            (MIXTRAL, *row, (9, 1, 1, 7, 1, 1, 17))  # a window in every layer
            for row in in_turn(IMPLEMENTATIONS, CACHES, ["left", "none"])
        ),
    ],
    indirect=["implementation"],
    ids=named,
)
def test_pieces_with_a_cache_equal_one_pass(case, side, cache, pieces, implementation):
    """Pieces and single tokens before, on and behind the border of a chunk, shorter and longer than one.

    transformers' own flex attention fails this with a static cache.
    """
    model = make(case, implementation)
    inputs = case.inputs((3, 0, 17) if side == "left" else (0, 0, 0), length=sum(pieces))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if side == "right":  # rows that end early; what follows is not looked at
        mask[0, 20:], mask[2, 3:] = 0, 0
    options = {} if side == "none" else {"attention_mask": mask}
    if side == "late":
        options = {"position_ids": torch.arange(len(ids[0]))[None] + 6}
    expected = truth_of(case, input_ids=ids, **options)
    past, parts, begin = CACHES[cache](model.config), [], 0
    for size in pieces:
        end = begin + size
        given = {
            name: value[:, :end] if name == "attention_mask" else value[:, begin:end]
            for name, value in options.items()
        }
        parts.append(run(model, input_ids=ids[:, begin:end], past_key_values=past, **given))
        begin = end
    assert_equal(torch.cat(parts, 1), expected, mask)


def generated(case, cache, implementation):
    """Five tokens, over the border at 32."""
    options = dict(max_new_tokens=5, do_sample=False, cache_implementation=cache, disable_compile=True)
    return make(case, implementation).generate(**case.inputs(length=29), **options).tolist()


@functools.cache
def generated_by_eager(case, cache):
    return generated(case, cache, "eager")


@pytest.mark.parametrize(
    ("implementation", "cache", "case"),
    in_turn(IMPLEMENTATIONS, ["dynamic", "static"], HEADS),
    indirect=["implementation"],
    ids=named,
)
def test_generate_equals_eager(case, cache, implementation):
    assert generated(case, cache, implementation) == generated_by_eager(case, cache)


# torch has no backward pass of flex attention on the CPU.
@pytest.mark.parametrize(
    ("case", "implementation", "rows"),
    [
        *((case, name, "padded") for case in WHOLE for name in ("sdpa", "flash_attention_2")),
        *((case, "sdpa", rows) for case in HEADS for rows in ("plain", "packed")),
    ],
    indirect=["implementation"],
    ids=named,
)
def test_gradients_equal_eager(case, implementation, rows):
    truth, model = pair(case, implementation)
    inputs = case.inputs() if rows == "padded" else case.inputs(padding=(0, 0, 0))
    mask = inputs["attention_mask"].bool() if case.is_text else slice(None)
    if rows != "padded":
        del inputs["attention_mask"]
    if rows == "packed":
        inputs["position_ids"] = (torch.arange(mask.shape[1]) % 20)[None]
    for each in (truth, model):
        main_output(each.train()(**inputs))[mask].square().mean().backward()
    for (name, given), expected in zip(model.named_parameters(), truth.parameters(), strict=True):
        if expected.grad is not None:
            assert max_abs(given.grad, expected.grad) <= 1e-4 * expected.grad.abs().max(), name


def test_an_unknown_type_of_layer_is_refused(flash):
    """Under flash attention, which takes no mask, it would become full attention in silence."""
    model = make(DENSE, "flash_attention_2")
    model.config.layer_types = ["full_attention", "dilated_attention", "full_attention"]
    with pytest.raises(KeyError, match="dilated_attention"):
        model(DENSE.inputs()["input_ids"], use_cache=False)


# Flash attention: what the kernels are given


def test_flash_is_given_sequences_where_there_is_padding(flash):
    model, inputs = make(DENSE, "flash_attention_2"), DENSE.inputs()
    run(model, **inputs)
    assert flash.calls == {"varlen": model.config.num_hidden_layers}
    flash.calls.clear()
    run(model, input_ids=inputs["input_ids"])
    assert flash.calls == {"whole": model.config.num_hidden_layers}


@torch.no_grad()
@DECODERS
def test_a_boolean_mask_of_four_axes(case):
    """`eager` adds masks to the scores, where true would be one."""
    ids = case.inputs()["input_ids"]
    index = torch.arange(ids.shape[1])
    mask = (index <= index[:, None]) & ((index % 5 != 2) | (index == index[:, None]))
    eager, sdpa = (
        make(case, name)(ids, attention_mask=mask[None, None]).logits for name in ("eager", "sdpa")
    )
    # The order of summation; where masks were added as ones, 1 and more.
    assert max_abs(eager, sdpa) < 1e-4
    with pytest.raises(ValueError, match="attention_mask"):
        make(case, "eager")(ids, attention_mask=mask[None, None].long())


# Attention weights


@pytest.mark.parametrize(("case", "name"), in_turn(HEADS, IMPLEMENTATIONS), ids=named)
def test_no_weights_but_from_eager(case, name, flash):
    """As in transformers: an empty tuple, in `generate` one for each token."""
    model = make(case, name)
    inputs = case.inputs(length=29)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        plain = run(model, **inputs)
        output = model(**inputs, output_attentions=True)
        assert output.attentions == () and torch.equal(main_output(output), plain)
        options = dict(max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
        assert model.generate(**inputs, **options).attentions == ((), ())


def test_what_flex_gives_beside_its_output_is_no_weights(monkeypatch):
    """On a GPU it gives the logarithm of each row's sum, which transformers returns as the attentions."""
    model = DENSE.make_small()
    monkeypatch.setattr(implementation_module, "FOR_GPUS", ())
    functions = llamoe.modeling.attention.layer.ALL_ATTENTION_FUNCTIONS
    model.set_attn_implementation("flex_attention")
    monkeypatch.setitem(
        functions,
        "flex_attention",
        lambda _, q, *args, **kwargs: (torch.zeros_like(q).transpose(1, 2), q.sum(-1)),
    )
    # The mask, too, would be compiled.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert model(**DENSE.inputs(), output_attentions=True).attentions == ()


@torch.no_grad()
@pytest.mark.parametrize("name", ["LlamoeVisionModel", "LlamoeModel", "LlamoeForConditionalGeneration"])
def test_weights_of_the_tower(name):
    """A pass that returns them is eager in any case, whose weights are stock's."""
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


# Implementations that bring their own keys and values


@DECODERS
def test_keywords_reach_the_implementation_untouched(case):
    """Continuous batching, vLLM and others hand their caches to the attention function through the model."""
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
        # From transformers 5.24 on this is a model's own argument.
        names += ["cache"] if CACHE == "past_key_values" else []
        given = {name: object() for name in names}
        lengths = torch.tensor([0, 20, 53], dtype=torch.int32)
        positions = torch.arange(53)[None]
        ids = case.inputs(padding=(0,))["input_ids"]
        model(ids, position_ids=positions, cu_seq_lens_q=lengths, max_length_q=33, use_cache=False, **given)
    finally:
        del functions["untouched"]
    assert [module.layer_idx for module, _ in calls] == list(range(model.config.num_hidden_layers))
    for module, kwargs in calls:
        assert all(kwargs[name] is given[name] for name in given)
        assert kwargs["cu_seq_lens_q"] is lengths and kwargs["position_ids"] is positions
        assert kwargs["scaling"] == module.scaling and module.is_causal
        assert module.num_key_value_groups == 3 and module.config is model.config


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES.values()], ids=lambda case: case.name)
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_on_a_gpu(case, version):
    """The real kernels, in bfloat16, are as near to float32 as eager is."""
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
def test_sdpa_computes_in_the_place_of_others(case, name, flash, monkeypatch, caplog):
    """Of flex attention on a CPU, of flash attention in decoders with chunks.

    Batches with padding, over chunks; told once.
    """
    logging.Logger.warning_once.cache_clear()
    functions = llamoe.modeling.attention.layer.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions, name, None)
    truth, model = pair(case, name)
    inputs = case.inputs()
    mask = inputs.get("attention_mask")
    for _ in range(2):
        assert_equal(run(model, **inputs), run(truth, **inputs), mask)
    assert sum(name in record.message for record in caplog.records) == 1


def test_a_block_mask_on_a_cpu():
    truth, model = pair(DENSE, "flex_attention")
    ids = DENSE.inputs(padding=(0, 0))["input_ids"]
    blocks = create_block_mask(lambda b, h, q, k: (q >= k) & (k >= 3 * b), 2, None, 53, 53, "cpu")
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = run(truth, input_ids=ids, attention_mask=mask, position_ids=torch.arange(53)[None])
    assert_equal(run(model, input_ids=ids, attention_mask=blocks), expected, mask)


@pytest.mark.slow
@DECODERS
def test_compiled_flex_attention_equals_eager(case, monkeypatch):
    """As it runs on a GPU, compiled; half a minute of C++."""
    monkeypatch.setattr(implementation_module, "FOR_GPUS", ())
    truth, model = pair(case, "flex_attention")
    inputs = case.inputs()
    assert_equal(run(model, **inputs), run(truth, **inputs), inputs["attention_mask"])
