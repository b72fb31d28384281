"""Layers, windows, chunks and causality that users change in a loaded model have the same effect as in transformers."""

import copy

import pytest
import torch
import transformers
from support.models import (
    DENSE,
    MIXTRAL,
    MULTIMODAL,
    TEXT,
    max_abs,
    padding_mask,
    random_ids,
    run,
    stock_model,
)
from support.tables import in_turn

import llamoe

WINDOW, LENGTH = 5, 17
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FIELDS = {
    "Llama": DENSE,
    "Mistral": {**DENSE, "sliding_window": WINDOW},
    "Ministral": {**DENSE, "sliding_window": WINDOW, "layer_types": MIXED},
    "Mixtral": {**MIXTRAL, "sliding_window": WINDOW},
    # In transformers' Llama 4 the temperature of queries counts padding; in ours it does not.
    "Llama4": {**TEXT, "attention_chunk_size": WINDOW, "attn_temperature_tuning": False},
}
FAMILIES = list(FIELDS)
HEADS = {"Mixtral": "LlamoeMixtralForCausalLM", "Llama4": "LlamoeForCausalLM"}
# Sums are in another order; logits have a standard deviation of about one.
TOLERANCE = 1e-5


def pair(family, **changes):
    """Return transformers' model, and ours with its weights."""
    config = getattr(transformers, f"{family}{'Text' * (family == 'Llama4')}Config")(
        **{**FIELDS[family], **changes}
    )
    stock = stock_model(getattr(transformers, f"{family}ForCausalLM"), config)
    ours = getattr(llamoe, HEADS.get(family, "LlamoeDenseForCausalLM"))(llamoe.from_stock(config)).eval()
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def check_logits(stock, ours, length=LENGTH, **options):
    """Check that logits are equal, with padding and without."""
    ids, mask = random_ids(2, length), padding_mask((3, 0), length)
    given, expected = (run(model, input_ids=ids, **options) for model in (ours, stock))
    assert max_abs(given, expected) < TOLERANCE
    options["attention_mask"] = mask
    given, expected = (run(model, input_ids=ids, **options) for model in (ours, stock))
    assert max_abs(given[mask > 0], expected[mask > 0]) < TOLERANCE


def new_tokens(model, length=3):
    return model.generate(
        random_ids(2, length)[:1], max_new_tokens=12, do_sample=False, eos_token_id=None
    ).tolist()


def check_equal(stock, ours):
    """Check that logits are equal, and the tokens of one row, which a CPU computes by the kernels for few rows."""
    check_logits(stock, ours)
    assert new_tokens(ours) == new_tokens(stock)


def reorder_lists(config, order):
    """Change the lists of a config that have an entry for each layer, as layers were put into this order."""
    if getattr(config, "no_rope_layers", None):
        config.no_rope_layers = [config.no_rope_layers[i] for i in order]
        config.moe_layers = [place for place, i in enumerate(order) if i in config.moe_layers]
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in order]


@pytest.mark.parametrize("family", FAMILIES)
def test_added_layers_are_saved(family, tmp_path):
    stock, ours = pair(family)
    for model in (stock, ours):
        layers, last = model.model.layers, len(model.model.layers)
        added = copy.deepcopy(layers[last - 1])
        added.self_attn.layer_idx = last
        layers.append(added)
    # The configs do not count the new layer yet.
    check_logits(stock, ours)
    for model in (stock, ours):
        last = model.config.num_hidden_layers
        model.config.num_hidden_layers += 1
        reorder_lists(model.config, [*range(last), last - 1])
    check_equal(stock, ours)
    ours.save_pretrained(tmp_path)
    back = type(ours).from_pretrained(tmp_path).eval()
    assert (
        max_abs(run(back, input_ids=random_ids(2, LENGTH)), run(ours, input_ids=random_ids(2, LENGTH)))
        < TOLERANCE
    )


@pytest.mark.parametrize("family", ["Ministral", "Llama4"])
def test_an_added_layer_needs_a_type(family):
    _, ours = pair(family)
    ours.model.layers.append(copy.deepcopy(ours.model.layers[0]))
    ours.config.num_hidden_layers += 1
    with pytest.raises(ValueError, match="shorter"):
        ours(input_ids=random_ids(2, LENGTH))


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_layers_run(family):
    models = pair(family)
    for model in models:
        new_tokens(model)
        del model.model.layers[1]
        for place, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = place
        # Users remove the layer's entry from each list, too.
        reorder_lists(model.config, [i for i in range(model.config.num_hidden_layers) if i != 1])
    check_logits(*models)
    for model in models:
        model.config.num_hidden_layers -= 1
    check_equal(*models)
    for model in models:
        model.config.num_hidden_layers -= 1
    check_equal(*models)


# A family, fields of its config when the model is made, and fields that are changed later.
SIZES = [
    ("Mistral", {}, {"sliding_window": None}),
    ("Mistral", {}, {"sliding_window": 3}),
    ("Mistral", {"sliding_window": None}, {"sliding_window": 3}),
    ("Ministral", {}, {"sliding_window": 3}),
    ("Ministral", {}, {"layer_types": MIXED[::-1][1:] + MIXED[:1], "sliding_window": 4}),
    ("Mixtral", {}, {"sliding_window": None}),
    ("Mixtral", {"sliding_window": None}, {"sliding_window": 3}),
    ("Llama4", {}, {"attention_chunk_size": 3}),
    ("Llama4", {}, {"layer_types": ["full_attention"] * 4 + ["chunked_attention"]}),
    ("Llama4", {"layer_types": ["full_attention"] * 5}, {"layer_types": ["chunked_attention"] * 5}),
]


@pytest.mark.parametrize(
    ("case", "implementation"),
    in_turn(SIZES, ["sdpa", "flex_attention", "flash_attention_2"]),
    indirect=["implementation"],
)
def test_windows_are_read_in_each_forward(case, implementation):
    family, fields, changes = case
    stock, ours = pair(family, **fields)
    stock.set_attn_implementation("eager")
    new_tokens(ours)
    for model in (stock, ours):
        for name, value in changes.items():
            setattr(model.config, name, value)
    assert new_tokens(ours) == new_tokens(stock)
    ours.set_attn_implementation(implementation)
    check_logits(stock, ours)
    check_logits(stock, ours, use_cache=False)


@pytest.mark.parametrize(
    ("family", "name"), [("Ministral", "sliding_window"), ("Llama4", "attention_chunk_size")]
)
def test_a_type_without_a_size_is_refused(family, name):
    """Without an error the layers would silently see all tokens."""
    _, ours = pair(family)
    setattr(ours.config, name, None)
    with pytest.raises(ValueError, match=f"{name} = None, but layer_types asks for"):
        ours(input_ids=random_ids(2, LENGTH), use_cache=False)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("where", ["config", "argument", "modules"])
@pytest.mark.parametrize("family", FAMILIES)
def test_later_tokens_are_seen(family, where, implementation):
    models, options = pair(family), {}
    for model in models:
        model.set_attn_implementation(implementation)
        if where == "config":
            model.config.is_causal = False
        elif where == "argument":
            options = {"is_causal": False}
        else:
            for layer in model.model.layers:
                layer.self_attn.is_causal = False
    for length in (WINDOW - 1, WINDOW, LENGTH):
        check_logits(*models, length, **options)
        check_logits(*models, length, use_cache=False, **options)


@pytest.mark.parametrize("fields", [{"is_causal": False}, {"use_cache": False}])
def test_fields_of_a_multimodal_config_reach_its_decoder(fields):
    """transformers' forward reads these fields from the whole model's config, and passes them on to the decoder."""
    ours = MULTIMODAL.make(attn_temperature_tuning=False)
    stock = MULTIMODAL.stock_of(ours)
    inputs = MULTIMODAL.inputs()
    is_real = inputs["attention_mask"] > 0
    before = run(ours, **inputs)
    for model in (ours, stock):
        for name, value in fields.items():
            setattr(model.config, name, value)
    given, expected = (run(model, **inputs) for model in (ours, stock))
    assert max_abs(given[is_real], expected[is_real]) < TOLERANCE
    assert (max_abs(given[is_real], before[is_real]) > 0.1) == ("is_causal" in fields)
    with torch.no_grad():
        assert (ours(**inputs).past_key_values is None) == ("use_cache" in fields)
    tokens = [
        model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=-1)
        for model in (ours, stock)
    ]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_a_window_changes_between_passes_over_one_cache(family):
    """A smaller window has an effect at once, as in transformers; for a larger one the cache has forgotten tokens."""
    name = "attention_chunk_size" if family == "Llama4" else "sliding_window"
    ids, logits, caches = random_ids(2, LENGTH), [], []
    for model in pair(family):
        cache = model(ids[:, :9], use_cache=True).past_key_values
        setattr(model.config, name, WINDOW - 2)
        steps = [ids[:, 9:14], *ids[:, 14:16].split(1, dim=1)]
        logits.append(torch.cat([run(model, input_ids=step, past_key_values=cache) for step in steps], dim=1))
        caches.append(cache)
    assert max_abs(*logits) < TOLERANCE
    setattr(model.config, name, WINDOW + 2)
    with pytest.raises(ValueError, match=f"keeps {WINDOW} tokens; expected: {WINDOW + 2}"):
        model(ids[:, :2], past_key_values=caches[1])
