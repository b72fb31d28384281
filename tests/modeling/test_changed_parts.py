"""What a user's own code changes in `generate` has the effect that it has with transformers' class."""

import functools
from contextlib import contextmanager

import pytest
import torch
from support.models import draw, max_abs
from torch.overrides import TorchFunctionMode
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer

import llamoe
from llamoe.modeling.kernels import cpu

pytestmark = pytest.mark.slow

SIZES = dict(
    vocab_size=331, hidden_size=192, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=3,
    intermediate_size=320,
)  # fmt: skip
PROMPT = torch.arange(3, 14)[None]
OPTIONS = dict(
    max_new_tokens=17, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True,
    output_logits=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    """Compiled kernels take small matrices, too."""
    monkeypatch.setattr(cpu, "_MIN_WEIGHTS", 0)
    monkeypatch.setattr(cpu, "_MIN_INPUTS", 0)


@pytest.fixture(scope="module")
def weights():
    return draw(llamoe.LlamoeDenseForCausalLM, llamoe.LlamoeDenseConfig(**SIZES)).state_dict()


def both(weights):
    """transformers' model and ours with the same weights."""
    for model in (
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        llamoe.LlamoeDenseForCausalLM(llamoe.LlamoeDenseConfig(**SIZES)),
    ):
        model.load_state_dict(weights)
        yield model.eval()


def assert_same(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    # Sums in another order.
    assert max(map(max_abs, found.logits, expected.logits)) < 1e-4


def patched(owner, name, change):
    """A method whose result is changed."""

    @contextmanager
    def patch(_):
        original = getattr(owner, name)

        @functools.wraps(original)
        def run(*args, **kwargs):
            return change(original(*args, **kwargs))

        setattr(owner, name, run)
        try:
            yield
        finally:
            setattr(owner, name, original)

    return patch


class Doubles(TorchFunctionMode):
    """Doubles what linear layers return."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.nn.functional.linear else found


@contextmanager
def default_device(_):
    with torch.device("meta"):
        yield


CHANGES = {
    "a cache's update": patched(DynamicCache, "update", lambda both: (both[0] * 1.5, both[1])),
    "a cache layer's update": patched(DynamicLayer, "update", lambda both: (both[0], both[1] * 0.5)),
    "forward of linear layers": patched(torch.nn.Linear, "forward", lambda output: output * 1.25),
    "a function mode": lambda _: Doubles(),
    "another default device": default_device,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_in_the_place_of_a_part(change, weights):
    outputs = []
    for model in both(weights):
        with CHANGES[change](model):
            outputs.append(model.generate(PROMPT, **OPTIONS))
    assert_same(outputs[1], outputs[0])


@pytest.mark.parametrize(
    "mask", [torch.full((1, 11), 2), torch.ones(1, 64, dtype=torch.long)], ids=["twos", "longer"]
)
def test_masks_that_say_more_than_that_nothing_is_hidden(mask, weights):
    outputs = []
    for model in both(weights):
        cache = StaticCache(config=model.config, max_cache_len=64) if mask.shape[1] > 11 else None
        outputs.append(model.generate(PROMPT, attention_mask=mask, past_key_values=cache, **OPTIONS))
    assert_same(outputs[1], outputs[0])
