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
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.generation.streamers import BaseStreamer

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


def scaled(output):
    output.last_hidden_state = output.last_hidden_state * torch.linspace(-1, 1, 192)
    return output


class Wrapper(torch.nn.Module):
    """Another decoder around one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return scaled(self.inner(*args, **kwargs))


@contextmanager
def wrapped_forward(model):
    kind, forward = type(model.model), type(model.model).forward

    @functools.wraps(forward)
    def run(*args, **kwargs):
        return scaled(forward(*args, **kwargs))

    kind.forward = run
    try:
        yield
    finally:
        kind.forward = forward


@contextmanager
def subclass_of_the_decoder(model):
    kind = type(model.model)
    model.model.__class__ = type(
        "Sub", (kind,), {"forward": lambda *args, **kw: scaled(kind.forward(*args, **kw))}
    )
    yield


@contextmanager
def wrapped_decoder(model):
    model.model = Wrapper(model.model)
    yield


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
    "forward of the decoder's class": wrapped_forward,
    "a subclass of the decoder": subclass_of_the_decoder,
    "a wrapped decoder": wrapped_decoder,
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


class Changes(StoppingCriteria):
    """Turns a weight round at the fifth token."""

    def __init__(self, model):
        self.weight, self.count = model.lm_head.weight, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.count += 1
        if self.count == 5:
            self.weight.data = -self.weight.data
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_criteria_in_a_list_of_a_list(weights):
    outputs = []
    for model in both(weights):
        criteria = StoppingCriteriaList([StoppingCriteriaList([Changes(model)])])
        outputs.append(model.generate(PROMPT, stopping_criteria=criteria, **OPTIONS))
    assert_same(outputs[1], outputs[0])


def test_a_patched_processor_of_transformers(weights, monkeypatch):
    original, outputs = RepetitionPenaltyLogitsProcessor.__call__, []

    def adds_a_hook_at_the_fourth_token(model):
        def call(self, input_ids, scores):
            if input_ids.shape[1] == 14:
                model.model.layers[1].mlp.register_forward_hook(lambda *given: given[-1] * 3)
            return original(self, input_ids, scores)

        return call

    for model in both(weights):
        monkeypatch.setattr(
            RepetitionPenaltyLogitsProcessor, "__call__", adds_a_hook_at_the_fourth_token(model)
        )
        outputs.append(model.generate(PROMPT, repetition_penalty=1.3, **OPTIONS))
    assert_same(outputs[1], outputs[0])


def test_a_loop_of_ones_own_that_gives_arguments_by_position(weights):
    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)

    outputs = [model.generate(PROMPT, custom_generate=loop, **OPTIONS) for model in both(weights)]
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


class Crops(BaseStreamer):
    """Shortens a cache after the sixth token."""

    def __init__(self, cache):
        self.cache, self.count = cache, 0

    def put(self, value):
        self.count += 1
        if self.count == 6:
            self.cache.crop(-3)

    def end(self):
        pass


def test_a_cache_that_is_shortened_meanwhile(weights):
    outputs = []
    for model in both(weights):
        cache = DynamicCache()
        outputs.append(model.generate(PROMPT, past_key_values=cache, streamer=Crops(cache), **OPTIONS))
    assert_same(outputs[1], outputs[0])


@pytest.mark.parametrize("part", ["keys", "values"])
def test_other_memory_in_a_layer_of_a_cache(part, weights):
    outputs = []
    for model in both(weights):
        first = model.generate(PROMPT, **OPTIONS)
        cache, ids = first.past_key_values, first.sequences
        for layer in cache.layers:
            tensor = getattr(layer, part)
            tensor.data = tensor.data.flip(2).clone()
        outputs.append(model.generate(ids, past_key_values=cache, **OPTIONS))
    assert_same(outputs[1], outputs[0])
