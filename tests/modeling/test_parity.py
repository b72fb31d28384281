"""Compare models, loaded from stock folders, with transformers' Llama, Mixtral and Llama 4."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers
from support.models import (
    IMAGE_TOKEN,
    ROPES,
    TOKENS_PER_TILE,
    VISION,
    choices,
    deviation_in_range,
    load_whole,
    make_asymmetric,
    max_abs,
    mixtures,
    rms,
    scaled_rope,
    stock_dense_config,
    stock_mixtral_config,
    stock_model,
    stock_multimodal_config,
    stock_text_config,
    text_config,
)
from support.routing import recorded_choices, routed_to
from support.tables import in_turn
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

import llamoe
from llamoe.modeling.moe.layer import MixtureOfExperts

BACKENDS = ["llamoe", "eager", "grouped_mm", "batched_mm"]
# Tokens: more than three chunks or windows of 16, and six steps of the temperature (floor_scale is 8).
LENGTH = 53

SCOUT_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=16.0,
    original_max_position_embeddings=64,
    low_freq_factor=1.0,
    high_freq_factor=1.0,
)
# Except with a derived head_dim, six heads of 20 channels are more than hidden_size, 72.
DENSE = {
    "gqa": dict(),
    "mha": dict(num_key_value_heads=6),
    "mqa": dict(num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "head_dim-derived": dict(head_dim=None, num_key_value_heads=3),
    "gelu-large-eps": dict(hidden_act="gelu", rms_norm_eps=0.05),
}
MIXTRAL = {
    "window": dict(),
    "whole": dict(sliding_window=None),
    "top1": dict(num_experts_per_tok=1),
    "every expert": dict(num_experts_per_tok=5),
    "mha-tied": dict(num_key_value_heads=6, tie_word_embeddings=True),
    "gelu-aligned": dict(hidden_act="gelu", intermediate_size=56, head_dim=None),
}
# By default there are five layers; the second and fourth are mixtures, and the fourth has no positions.
LLAMA4 = {
    "moe-every-second": dict(),
    "moe-every": dict(interleave_moe_layer_step=1),
    "moe-listed": dict(moe_layers=[0, 3]),
    "moe-none": dict(moe_layers=[]),
    "top-2": dict(num_experts_per_tok=2),
    "top-2-every": dict(num_experts_per_tok=2, interleave_moe_layer_step=1),
    "no-qk-norm": dict(use_qk_norm=False),
    "no-qk-norm-every": dict(use_qk_norm=False, interleave_moe_layer_step=1),
    "aligned": dict(num_experts_per_tok=2, interleave_moe_layer_step=1, intermediate_size=56),
    "no-tuning": dict(attn_temperature_tuning=False),
    "strong-tuning": dict(floor_scale=3, attn_scale=0.5),
    "no-rope-listed": dict(no_rope_layers=[0, 1, 1, 0, 1]),
    "rope-everywhere": dict(no_rope_layers=[1] * 5),
    "no-chunks": dict(layer_types=["full_attention"] * 5),
    "chunks-mixed": dict(layer_types=["full_attention", *["chunked_attention"] * 3, "full_attention"]),
    "scout": dict(interleave_moe_layer_step=1, rope_parameters=SCOUT_ROPE),
    "biases": dict(attention_bias=True),
    "mha": dict(num_key_value_heads=6),
    "mqa": dict(num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True),
}
# Rows of a batch for the multimodal model: n means n text tokens, -n an image of n tiles.
PROMPTS = {
    "text-only": [[50], [31]],
    "one-image": [[7, -1, 40]],
    "two-images-in-a-row": [[3, -1, 9, -1, 30]],
    "image-first-and-last": [[-1, 40], [40, -1]],
    "several-tiles": [[5, -3, 31], [20, -2, 7, -1]],
    "rows-without-an-image": [[30], [9, -1, 28], [45]],
}
BEGIN_IMAGE, END_IMAGE, BETWEEN_TILES = 97, 98, 96


def check_bfloat16_errors(given, expected, reference, names: tuple[str, str], record_parity) -> None:
    """Check that the errors of our bfloat16 logits are at most twice those of stock's; `reference` is in float32.

    In a mixture ours and stock must have sent each token to the same experts (`routing`). In float32 a few tokens go to
    other experts; their errors rule the largest and the root mean square error, but not the median over tokens.
    """
    assert given.dtype == expected.dtype == torch.bfloat16
    measures = {
        "logits, largest": lambda error: error.abs().max().item(),
        "logits, largest of the median token": lambda error: error.abs().amax(-1).median().item(),
        "logits, root mean square": rms,
    }
    for note, measure in measures.items():
        error, stock_error = (measure(logits.float() - reference) for logits in (given, expected))
        record_parity(names[0], f"{names[1]} in float32", "bfloat16", error, note)
        record_parity(names[1], "itself in float32", "bfloat16", stock_error, note)
        assert 0 < error <= 2 * stock_error, note


def record_calls(modules: dict) -> dict:
    """Return a dict that hooks fill with the first argument and the result of each module's latest call."""
    calls = {}
    for key, module in modules.items():
        module.register_forward_hook(
            lambda _, inputs, output, key=key: calls.update({key: (inputs[0], output)})
        )
    return calls


def blocks_of(model) -> dict:
    """Return the mixtures of a Llama 4, stock's or ours, by layer; an empty dict for other families."""
    text = getattr(model, "language_model", model)
    return mixtures(text) if text.config.model_type in ("llama4_text", "llamoe_text") else {}


def check_router_logits(given, expected) -> None:
    """Check that two models in bfloat16, with tokens at the same experts, have router logits `[T, E]` that are close.

    Rounding errors of the layers before add up, differently on each processor: up to 0.014 of the logits' root mean
    square is measured. Unrelated logits would differ by 1.4 of it.
    """
    for logits, its_logits in zip(given, expected, strict=True):
        assert rms(logits.float() - its_logits.float()) < 0.06 * rms(its_logits.float())


@dataclass(frozen=True)
class Family:
    name: str
    stock_name: str
    make_config: Callable
    kinds: dict

    def fields(self, kind):
        if self.kinds is PROMPTS:
            return {}
        return self.kinds[kind] if kind in self.kinds else scaled_rope(kind)


FAMILIES = {
    "dense": Family("LlamoeDenseForCausalLM", "LlamaForCausalLM", stock_dense_config, DENSE),
    "mixtral": Family("LlamoeMixtralForCausalLM", "MixtralForCausalLM", stock_mixtral_config, MIXTRAL),
    "llama4": Family("LlamoeForCausalLM", "Llama4ForCausalLM", stock_text_config, LLAMA4),
    "multimodal": Family(
        "LlamoeForConditionalGeneration", "Llama4ForConditionalGeneration", stock_multimodal_config, PROMPTS
    ),
}


def over(**kinds):
    """Parametrize over these kinds of models of each family; None means all kinds."""
    cases = [(family, kind) for family, names in kinds.items() for kind in (names or FAMILIES[family].kinds)]
    return pytest.mark.parametrize(("family", "kind"), cases, ids=str)


def over_in_turn(**kinds):
    """Parametrize as `over` does, with "eager" and "sdpa" attention in turn."""
    cases = [(family, kind) for family, names in kinds.items() for kind in names]
    cases = [(*case, attention) for case, attention in in_turn(cases, ["eager", "sdpa"])]
    return pytest.mark.parametrize(("family", "kind", "attention"), cases, ids=str)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return a function that returns stock's model, ours of its folder, and the folder; do not change these."""

    @functools.cache
    def folder_of(family, kind, exact):
        known = FAMILIES[family]
        stock_class = getattr(transformers, known.stock_name)
        folder = tmp_path_factory.mktemp("stock")
        stock = stock_model(stock_class, known.make_config(**known.fields(kind)), exact_in_bfloat16=exact)
        stock.save_pretrained(folder)
        return stock, folder, load_whole(getattr(llamoe, known.name), folder)

    def pair(family, kind, attention="sdpa", exact=False):
        stock, folder, ours = folder_of(family, "any" if family == "multimodal" else kind, exact)
        for model in (stock, ours):
            model.set_attn_implementation(attention)
            model.zero_grad()
        return stock, ours, folder

    return pair


def ids(length=LENGTH, rows=2):
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(1))


def prompt(name):
    """Return token ids with padding on the right, mask and tiles, as the processor makes them."""
    generator = torch.Generator().manual_seed(2)
    tile = [IMAGE_TOKEN] * TOKENS_PER_TILE
    rows, num_tiles = [], 0
    for pieces in PROMPTS[name]:
        row = []
        for piece in pieces:
            if piece > 0:
                row += torch.randint(1, 96, (piece,), generator=generator).tolist()
            else:
                num_tiles += -piece
                row += [BEGIN_IMAGE, *tile, *([BETWEEN_TILES, *tile] * (-piece - 1)), END_IMAGE]
        rows.append(row)
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    inputs = dict(input_ids=tokens, attention_mask=(tokens != 0).long())
    if num_tiles:
        size = VISION["image_size"]
        # Values rise over the tiles, so that no two parts of a tile, nor two tiles, are alike.
        slope = torch.linspace(-1, 1, num_tiles * 3 * size * size).view(num_tiles, 3, size, size)
        inputs["pixel_values"] = slope + torch.randn(num_tiles, 3, size, size, generator=generator)
    return inputs


def inputs_of(family, kind=None):
    """Return inputs; Mixtral's have padding on the left, to which stock's other families give other positions."""
    if family == "multimodal":
        return prompt(kind)
    mask = torch.ones_like(ids())
    if family == "mixtral":
        mask[0, :9] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def test_every_scaling_type_of_transformers_is_tried():
    tried = {ROPES[name].get("rope_type", name) for name in ROPES}
    # transformers' table lacks "default", the type without scaling.
    assert tried == {*ROPE_INIT_FUNCTIONS, "default"}


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@over(dense=None, mixtral=None, llama4=None, multimodal=None)
def test_logits_states_and_routing(family, kind, attention, pairs, record_parity):
    known, (stock, ours, _) = FAMILIES[family], pairs(family, kind, attention)
    inputs = inputs_of(family, kind)
    real = inputs["attention_mask"].bool()
    wanted = dict(output_hidden_states=True, output_attentions=attention == "eager")
    ours_too = {} if family == "dense" else {"output_router_logits": True}
    stock_too = ours_too if family == "mixtral" else {}
    calls = record_calls({i: block.router for i, block in blocks_of(stock).items()})
    expected, given = stock(**inputs, **wanted, **stock_too), ours(**inputs, **wanted, **ours_too)
    assert deviation_in_range(expected.logits)
    difference = max_abs(given.logits[real], expected.logits[real])
    record_parity(known.name, known.stock_name, "float32", difference, "logits")
    assert difference <= 1e-4
    config = ours.config.get_text_config()
    layers = config.num_hidden_layers
    assert len(given.hidden_states) == len(expected.hidden_states) == layers + 1
    for mine, its in zip(given.hidden_states, expected.hidden_states, strict=True):
        assert max_abs(mine[real], its[real]) <= 1e-4  # values have a deviation of about 1 to 3
    if attention == "eager":
        assert len(given.attentions) == len(expected.attentions) == layers
        for mine, its in zip(given.attentions, expected.attentions, strict=True):
            seen = real[:, None, :, None].expand_as(its)
            assert mine.shape == its.shape and max_abs(mine[seen], its[seen]) <= 1e-5  # values are at most 1
    if family == "dense":
        return
    if family == "multimodal":
        check_pictures(stock, ours, inputs, given, record_parity)
    if family != "mixtral":
        assert list(calls) == config.moe_layers
        theirs = [its for _, (_, its) in calls.values()]
    else:
        theirs = expected.router_logits
        assert len(theirs) == layers
        assert given.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-5)
    for mine, its in zip(given.router_logits or (), theirs, strict=True):
        mine, its = mine[real.flatten()], its[real.flatten()]
        difference = max_abs(mine, its)
        record_parity(known.name, known.stock_name, "float32", difference, "router logits")
        assert difference <= 1e-4
        assert torch.equal(*(choices(x, config.num_experts_per_tok) for x in (mine, its)))


def check_pictures(stock, ours, inputs, given, record_parity):
    """Check that features of pictures are stock's, and that logits depend on them."""
    pixels = inputs.get("pixel_values")
    if pixels is None:
        assert given.image_hidden_states is None
        return
    assert given.image_hidden_states.shape == (len(pixels), TOKENS_PER_TILE, VISION["vision_output_dim"])
    features = stock.get_image_features(pixel_values=pixels, return_dict=True).last_hidden_state
    difference = max_abs(given.image_hidden_states, features)
    known = FAMILIES["multimodal"]
    record_parity(known.name, known.stock_name, "float32", difference, "image_hidden_states")
    assert difference <= 1e-4
    blank = ours(**{**inputs, "pixel_values": torch.zeros_like(pixels)}).logits
    real = inputs["attention_mask"].bool()
    assert max_abs(blank[real], given.logits[real]) > 0.1


@torch.no_grad()
@over(dense=ROPES, llama4=ROPES)
def test_rope_scaling(family, kind, pairs, record_parity):
    stock, ours, _ = pairs(family, kind, "eager" if family == "dense" else "sdpa")
    unscaled = 10000.0 ** (-torch.arange(10) / 10)  # frequencies of 20 channels
    # The last input is short again: `dynamic` and `longrope` must take back the frequencies of the long one.
    frequencies = []
    for length in (20, LENGTH, 20):
        expected, given = stock(ids(length)).logits, ours(ids(length)).logits
        assert deviation_in_range(expected)
        difference = max_abs(given, expected)
        record_parity(
            FAMILIES[family].name, FAMILIES[family].stock_name, "float32", difference, "logits, scaled rope"
        )
        assert difference <= 1e-4
        if family == "dense":
            frequencies.append(stock.model.rotary_emb.inv_freq.clone())
    if family == "dense":
        assert max_abs(frequencies[1], unscaled) > 1e-3, "these parameters scale nothing"
        if kind in ("dynamic", "longrope"):
            assert max_abs(frequencies[0], frequencies[1]) > 1e-3, "both passes are of one kind"
            assert max_abs(frequencies[0], frequencies[2]) == 0


@torch.no_grad()
@over_in_turn(
    dense="gqa mha mqa tied biases llama3 longrope".split(),
    mixtral=["window", "top1", "every expert"],
    llama4=["moe-every-second", "scout", "aligned", "no-qk-norm-every"],
    multimodal=["text-only", "several-tiles", "rows-without-an-image"],
)
def test_bfloat16(family, kind, attention, pairs, record_parity):
    """Errors are like stock's with each experts implementation that takes the sizes."""
    known = FAMILIES[family]
    reference_model, _, folder = pairs(family, kind, attention, exact=True)
    options = dict(attn_implementation=attention, dtype=torch.bfloat16)
    ours = load_whole(getattr(llamoe, known.name), folder, **options)
    # Stock's grouped product does not take rows of 52 numbers.
    eager = {"experts_implementation": "eager"} if family == "mixtral" else {}
    stock = load_whole(getattr(transformers, known.stock_name), folder, **options, **eager)
    # Mixtures get 12 rows: a few tokens go to other experts than in float32, by chance more of ours or of stock's.
    inputs = (
        prompt(kind) if family == "multimodal" else {"input_ids": ids(rows=2 if family == "dense" else 12)}
    )
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    inputs_16 = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
    inputs |= {name: x.float() for name, x in inputs_16.items() if x.is_floating_point()}
    reference = reference_model(**inputs).logits[real]
    assert deviation_in_range(reference)
    calls = record_calls(blocks_of(stock))
    with recorded_choices(stock) as chosen:
        expected = stock(**inputs_16).logits[real]
    for backend in backends_for(family, kind):
        if backend is not None:
            ours.set_experts_implementation(backend)
        with routed_to(ours, chosen):
            given = ours(**inputs_16, **({} if family == "dense" else {"output_router_logits": True}))
        names = known.name, known.stock_name
        check_bfloat16_errors(given.logits[real], expected, reference, names, record_parity)
        if calls:
            check_blocks(blocks_of(ours), calls)
            its_logits = [logits[real.flatten()] for _, (_, logits) in calls.values()]
            check_router_logits([logits[real.flatten()] for logits in given.router_logits], its_logits)


def backends_for(family, kind):
    """Return the experts implementations that take a kind's sizes: grouped products need rows of 16-byte multiples."""
    if family == "dense":
        return [None]
    return BACKENDS if kind == "aligned" else [name for name in BACKENDS if name != "grouped_mm"]


def check_blocks(blocks, calls) -> None:
    """Check mixtures on the same bfloat16 input: router logits, the experts chosen by equal logits, and outputs."""
    assert blocks.keys() == calls.keys()
    for i, (hidden_states, (its_output, its_logits)) in calls.items():
        tokens, router = hidden_states.flatten(0, 1), blocks[i].router
        logits, _, _ = router(tokens)
        # Sums in float32, in two orders, are rounded once.
        assert ((logits - its_logits).abs() <= 2**-7 * its_logits.abs() + 1e-5).all()
        _, chosen = router.choose(its_logits)
        assert torch.equal(chosen.sort(-1).values, choices(its_logits, router.top_k))
        # Each of three products is rounded to bfloat16, by 2**-9 at most, in another order on each processor.
        assert rms(blocks[i](tokens).float() - its_output.float()) < 2**-8 * rms(its_output.float())


def test_only_chosen_experts_are_computed():
    """For a token stock multiplies by 13 experts and the shared one, ours by one expert and the shared one."""
    sizes = dict(num_local_experts=13, num_experts_per_tok=1)
    stock, ours = Llama4TextMoe(stock_text_config(**sizes)), MixtureOfExperts(text_config(**sizes))
    ours.load_state_dict(make_asymmetric(stock).state_dict())
    x, counts, outputs = torch.randn(1, 57, ours.router.weight.shape[1]), [], []
    for block in (stock, ours.eval()):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            output = block(x)
        counts.append(counter.get_total_flops() - 2 * 57 * ours.router.weight.numel())
        outputs.append((output[0] if isinstance(output, tuple) else output).view(x.shape))
    assert counts[0] == pytest.approx(counts[1] * 14 / 2, rel=1e-6)
    assert max_abs(*outputs) < 1e-5 * outputs[0].std()
