"""Batches of all kinds, at once, in pieces with every cache, and in training, by every implementation of attention.

Results are compared with the decoder of `tests/fuzz` in float64, which computes a sequence at a time, without batch,
padding, cache or mask.
"""

import copy
import itertools
import random
from functools import cache

import pytest
import torch
from fuzz.batch import KINDS, check, draw_batch, forward
from fuzz.judge import Judge
from fuzz.kinds.cached import PADDED, borders, join
from fuzz.kinds.training import check_gradients, draw_labels
from fuzz.reference import Decoder
from fuzz.subject import rope_config
from support.models import MODELS
from support.tables import in_turn
from transformers import DynamicCache, StaticCache

import llamoe

CASES = {case.name: case for case in MODELS}
FAMILIES = {
    "llama": ("LlamoeDenseForCausalLM", {}),
    "ministral": (
        "LlamoeDenseForCausalLM",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
    ),
    "mixtral": ("LlamoeMixtralForCausalLM", {}),
    "llama4_text": ("LlamoeForCausalLM", {}),
    # transformers' growing cache keeps all tokens of a window of one, although its `get_mask_sizes` says one.
    "chunks of one token": ("LlamoeForCausalLM", {"attention_chunk_size": 1}),
    "windows of one token": ("LlamoeDenseForCausalLM", {"sliding_window": 1}),
}
IMPLEMENTATIONS = ["sdpa", "eager", "flex_attention", "flash_attention_2"]
CACHES = {
    "windows": lambda config: DynamicCache(config=config),
    "whole": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=60),
}


@cache
def judged(family):
    """Return a model, which tests must not change, its config in stock's fields, and its judge."""
    name, fields = FAMILIES[family]
    model = CASES[name].make_small(**fields)
    fields = llamoe.to_stock(model.config)
    weights = {name: weight.detach().double() for name, weight in model.state_dict().items()}
    return model, fields, Judge(Decoder(weights, fields, rope_config(fields)), torch.float32, seed=0)


def drawn(family, kind, implementation):
    """Return the model, its judge, a batch of several rows, longer than a chunk, and the random numbers behind it."""
    model, fields, judge = judged(family)
    model.set_attn_implementation(implementation)
    rng = random.Random(f"{family}, {kind}")
    torch.manual_seed(rng.randrange(100))
    batch = draw_batch(rng, fields, [kind], 53)
    while batch.shape[0] < 2 or batch.shape[1] < 53:
        batch = draw_batch(rng, fields, [kind], 53)
    return model, judge, batch, rng


def can_compute(family, kind, implementation):
    """Return False for batches that FlashAttention cannot compute: it takes no mask, and windows skip padding."""
    has_windows = family in ("ministral", "mixtral", "windows of one token")
    fits_flash = kind != "mask4d" and not (has_windows and kind == "holes")
    return fits_flash or not implementation.startswith("flash")


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "kind", "implementation"),
    [case for case in itertools.product(FAMILIES, KINDS, IMPLEMENTATIONS) if can_compute(*case)],
    indirect=["implementation"],
)
def test_whole_batches(family, kind, implementation):
    model, judge, batch, _ = drawn(family, kind, implementation)
    options = {}
    if batch.visible is not None:
        lowest = torch.finfo(torch.float32).min
        hidden = torch.zeros(batch.visible.shape).masked_fill(~batch.visible, lowest)
        options["attention_mask"] = hidden[:, None]
    _, fed = forward(model, batch, **options)
    check(fed, judge, implementation)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "cache", "kind", "implementation"),
    [
        (family, cache, kind, implementation)
        for family, cache, kind, implementation in in_turn(FAMILIES, CACHES, PADDED, IMPLEMENTATIONS)
        if can_compute(family, kind, implementation)
        # Most caches refuse padding between tokens of chunked layers: see `test_positions.py`.
        and (
            FAMILIES[family][0] != "LlamoeForCausalLM"
            or kind != "holes"
            or (family, cache) == ("llama4_text", "whole")
        )
    ],
    indirect=["implementation"],
)
def test_pieces_through_caches(family, cache, kind, implementation):
    """Pieces have any size, also one token, and cross borders of chunks and windows."""
    model, judge, batch, rng = drawn(family, kind, implementation)
    past, fed, begin = CACHES[cache](model.config), None, 0
    if batch.position_ids is not None:
        batch.position_ids = batch.position_ids.expand(batch.shape[0], -1)
    for end in borders(rng, batch.shape[1]):
        _, read = forward(model, batch.columns(begin, end), past_key_values=past)
        fed, begin = join(fed, read), end
    check(fed, judge, f"{implementation}, {cache}")


# Options of a loss: coefficients of the router losses, and the number of labels in a larger batch.
LOSSES = {
    "mean": {},
    "share": {"num_items_in_batch": 41},
    "routers": {"aux": 0.7, "z": 0.3},
    "share of routers": {"aux": 0.7, "z": 0.3, "num_items_in_batch": 41},
}


@pytest.mark.parametrize(
    ("family", "kind", "loss", "implementation"),
    # torch has no backward pass of flex attention on the CPU.
    in_turn(
        list(FAMILIES)[:4],
        ["plain", "left", "right", "packed"],
        LOSSES,
        ["sdpa", "eager", "flash_attention_2"],
    ),
    indirect=["implementation"],
)
def test_losses_and_gradients(family, kind, loss, implementation):
    """The loss and the gradient of every weight; with router losses also under gradient checkpointing."""
    model, judge, batch, rng = drawn(family, kind, implementation)
    model, labels, asked = (
        copy.deepcopy(model).train(),
        draw_labels(rng, batch),
        {"aux": 0.0, "z": 0.0, **LOSSES[loss]},
    )
    given = {name: value for name, value in asked.items() if name == "num_items_in_batch"}
    if family in ("mixtral", "llama4_text"):
        model.config.router_aux_loss_coef, model.config.router_z_loss_coef = asked["aux"], asked["z"]
        given["output_router_logits"] = True
    else:
        asked |= {"aux": 0.0, "z": 0.0}
    if "routers" in loss:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    output, fed = forward(model, batch, labels=labels, use_cache=False, **given)
    output.loss.backward()
    check_gradients(judge, model, fed, labels, output.loss, asked)
