"""`generate` decodes the tokens of one row without a pass for each, and gives what passes give, bit for bit."""

import threading

import pytest
import torch
from support.models import draw, multimodal_config
from transformers import DynamicCache, LogitsProcessor, StaticCache, TextStreamer
from transformers.generation.streamers import BaseStreamer

import llamoe
from llamoe.modeling.kernels import Tokens, cpu
from llamoe.modeling.kernels.cpp_kernels import why_no_cpp_kernels

pytestmark = [
    pytest.mark.skipif(why_no_cpp_kernels() is not None, reason="there are no compiled kernels here"),
    pytest.mark.slow,
]

SIZES = dict(
    vocab_size=331, hidden_size=192, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=3
)
DENSE = llamoe.LlamoeDenseConfig(**SIZES, intermediate_size=320)
WINDOWED = llamoe.LlamoeDenseConfig(
    **SIZES, intermediate_size=320, sliding_window=24,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)  # fmt: skip
MIXTRAL = llamoe.LlamoeMixtralConfig(**SIZES, intermediate_size=256, num_local_experts=5)
CHUNKED = llamoe.LlamoeTextConfig(
    **SIZES, head_dim=32, intermediate_size=128, intermediate_size_mlp=320, num_local_experts=5,
    interleave_moe_layer_step=2, attention_chunk_size=32, no_rope_layers=[1, 0, 1], attn_temperature_tuning=True,
    floor_scale=4,
)  # fmt: skip
FAMILIES = {
    "dense": (llamoe.LlamoeDenseForCausalLM, DENSE),
    "mixtral": (llamoe.LlamoeMixtralForCausalLM, MIXTRAL),
    "llama 4": (llamoe.LlamoeForCausalLM, CHUNKED),
}
PROMPT = torch.arange(3, 14)[None]
OPTIONS = dict(max_new_tokens=17, do_sample=False, pad_token_id=0, eos_token_id=None)
WHOLE = dict(return_dict_in_generate=True, output_logits=True)


def made(family: str = "dense", dtype: torch.dtype = torch.float32):
    """A model with weights that no axis can swap."""
    return draw(*FAMILIES[family]).to(dtype)


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    """Compiled kernels take small matrices, too."""
    monkeypatch.setattr(cpu, "_MIN_WEIGHTS", 0)


@pytest.fixture
def steps(monkeypatch):
    """The number of tokens that took no pass of their own."""
    counts, step = [0], Tokens.step

    def count(tokens, x):
        counts[0] += 1
        return step(tokens, x)

    monkeypatch.setattr(Tokens, "step", count)
    return counts


def by_passes(model, *args, **kwargs):
    """`generate` with a pass for each token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokens, "can_go_on", lambda tokens, cache: False)
        return model.generate(*args, **kwargs)


def assert_equal(one, two):
    """Tokens, logits and caches have the same bits."""
    assert torch.equal(one.sequences, two.sequences)
    assert all(map(torch.equal, one.logits, two.logits))
    for its, other in zip(one.past_key_values.layers, two.past_key_values.layers, strict=True):
        assert torch.equal(its.keys, other.keys) and torch.equal(its.values, other.values)
    assert one.past_key_values.get_seq_length() == two.past_key_values.get_seq_length()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("given", [{}, {"attention_mask": torch.ones_like(PROMPT)}, {"do_sample": True}])
def test_tokens_logits_and_caches_are_those_of_passes(family, dtype, given, steps):
    model, options = made(family, dtype), {**OPTIONS, **WHOLE, **given}
    torch.manual_seed(6)
    found = model.generate(PROMPT, **options)
    assert steps == [16]
    torch.manual_seed(6)
    assert_equal(found, by_passes(model, PROMPT, **options))


@pytest.mark.parametrize(
    "bits", [{"weights": "int8"}, {"weights": "int4", "group_size": 32}], ids=["int8", "int4"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_models(bits, family, steps, tmp_path):
    made(family, torch.bfloat16).save_pretrained(tmp_path)
    quantization = llamoe.QuantizationConfig(**bits)
    model = FAMILIES[family][0].from_pretrained(tmp_path, quantization_config=quantization)
    found = model.generate(PROMPT, **OPTIONS, **WHOLE)
    assert steps == [16]
    assert_equal(found, by_passes(model, PROMPT, **OPTIONS, **WHOLE))


@pytest.mark.parametrize(
    ("model_class", "config", "local"),
    [(llamoe.LlamoeDenseForCausalLM, WINDOWED, 24), (llamoe.LlamoeForCausalLM, CHUNKED, 32)],
    ids=["window", "chunk"],
)
@pytest.mark.parametrize("knows_layers", [True, False])
def test_tokens_that_do_not_see_all_before_take_passes(model_class, config, local, knows_layers, steps):
    model = draw(model_class, config)
    caches = [DynamicCache(config=config) if knows_layers else DynamicCache() for _ in range(2)]
    options = {**OPTIONS, **WHOLE, "max_new_tokens": 40}
    found = model.generate(PROMPT, past_key_values=caches[0], **options)
    # A cache drops a token of a full window for the next one.
    assert steps[0] in (local - 11, local - 11 - 1)
    assert_equal(found, by_passes(model, PROMPT, past_key_values=caches[1], **options))


def test_more_tokens_than_are_prepared_at_once(steps, monkeypatch):
    monkeypatch.setattr(f"{Tokens.__module__}._AHEAD", 5)
    model = made()
    found = model.generate(PROMPT, **OPTIONS, **WHOLE)
    assert steps == [16]
    assert_equal(found, by_passes(model, PROMPT, **OPTIONS, **WHOLE))


def test_a_conversation_goes_on_behind_its_cache(steps):
    model, caches = made("mixtral"), [DynamicCache(), DynamicCache()]
    ids = [PROMPT, PROMPT]
    for turn in range(3):
        question = torch.full((1, 2), 40 + turn)
        ids = [torch.cat([each, question], dim=1) for each in ids]
        found = model.generate(ids[0], past_key_values=caches[0], **OPTIONS, **WHOLE)
        other = by_passes(model, ids[1], past_key_values=caches[1], **OPTIONS, **WHOLE)
        assert_equal(found, other)
        ids = [found.sequences, other.sequences]
    assert steps == [48]


def test_pictures(steps):
    config = multimodal_config()
    model = draw(llamoe.LlamoeForConditionalGeneration, config)
    vision = config.vision_config
    pixels = torch.randn(1, vision.num_channels, vision.image_size, vision.image_size)
    picture = torch.full((1, vision.tokens_per_tile), config.image_token_index)
    ids = torch.cat([torch.tensor([[3]]), picture, torch.tensor([[4, 5]])], dim=1)
    options = {**OPTIONS, **WHOLE, "max_new_tokens": 6}
    found = model.generate(ids, pixel_values=pixels, **options)
    assert steps == [5]
    assert_equal(found, by_passes(model, ids, pixel_values=pixels, **options))


@pytest.mark.parametrize(
    "given",
    [
        {"inputs": PROMPT.repeat(2, 1)},
        {"attention_mask": (PROMPT > 5).long()},
        {"num_beams": 3},
        {"use_cache": False},
        {"past_key_values": "static"},
        {"prompt_lookup_num_tokens": 3},
        {"output_hidden_states": True, **WHOLE},
        {"prefill_chunk_size": 4, "past_key_values": "dynamic"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_else_is_generated_takes_passes(given, steps):
    model = made()
    caches = {"static": lambda: StaticCache(config=model.config, max_cache_len=64), "dynamic": DynamicCache}

    def answer(generate):
        its = {"inputs": PROMPT, **OPTIONS, **given}
        if "past_key_values" in its:
            its["past_key_values"] = caches[its["past_key_values"]]()
        return generate(**its)

    found, other = answer(model.generate), answer(lambda **its: by_passes(model, **its))
    assert steps == [0]
    one, two = (each if isinstance(each, torch.Tensor) else each.sequences for each in (found, other))
    assert torch.equal(one, two)


def test_modules_that_are_watched_are_called(steps):
    model, seen = made(), []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    model.generate(PROMPT, **OPTIONS)
    assert steps == [0] and len(seen) == 17


def test_a_subclass_computes_what_it_says(steps):
    class Other(llamoe.LlamoeDenseForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits[..., 7] = 1e3
            return output

    assert draw(Other, DENSE).generate(PROMPT, **OPTIONS)[0, 11:].eq(7).all()
    assert steps == [0]


class _Acts(BaseStreamer):
    """Calls a function behind so many tokens."""

    def __init__(self, after: int, act):
        self.left, self.act = after, act

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            self.act()

    def end(self):
        pass


def test_changes_between_tokens_are_seen(steps):
    """By a streamer, which is given the prompt first: the change holds from the fourth token on."""

    def answer(generate):
        model = made()

        def change():
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
                    -model.model.layers[0].mlp.up_proj.weight
                )

        return generate(model, PROMPT, streamer=_Acts(4, change), **OPTIONS, **WHOLE)

    found = answer(lambda model, *args, **kwargs: model.generate(*args, **kwargs))
    assert steps == [16]
    assert_equal(found, answer(by_passes))
    assert not torch.equal(found.logits[-1], by_passes(made(), PROMPT, **OPTIONS, **WHOLE).logits[-1])


def test_a_hook_that_is_added_between_tokens_is_called(steps):
    model, seen = made(), []

    def watch():
        model.model.layers[2].self_attn.register_forward_hook(lambda *_: seen.append(1))

    model.generate(PROMPT, streamer=_Acts(5, watch), **OPTIONS)
    assert steps == [3] and len(seen) == 13


def test_functions_within_transformers_own_processors_may_look_at_the_cache():
    model, cache, lengths = made(), DynamicCache(), []

    def allowed(_, ids):
        lengths.append((len(ids), cache.get_seq_length()))
        return [7, 8]

    found = model.generate(PROMPT, past_key_values=cache, prefix_allowed_tokens_fn=allowed, **OPTIONS)
    assert lengths == [(length, length) for length in range(11, 28)]
    assert set(found[0, 11:].tolist()) <= {7, 8}


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_cache_has_all_tokens_that_were_decoded_when_generate_is_interrupted(
    is_watched, monkeypatch, steps
):
    model, cache = made(), DynamicCache()

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    if is_watched:
        given = {"streamer": _Acts(6, stop)}
    else:
        given, step = {}, Tokens.step

        def stopping(tokens, x):
            logits = step(tokens, x)
            if steps[0] == 4:
                raise Stop
            return logits

        monkeypatch.setattr(Tokens, "step", stopping)
    with pytest.raises(Stop):
        model.generate(PROMPT, past_key_values=cache, **given, **OPTIONS)
    assert steps == [4] and cache.get_seq_length() == 15
    tokens = by_passes(model, PROMPT, **OPTIONS)
    expected = DynamicCache()
    with torch.no_grad():
        model(tokens[:, :11], past_key_values=expected)
        for token in tokens[0, 11:15]:
            model(token.view(1, 1), past_key_values=expected)
    for one, two in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(one.keys, two.keys) and torch.equal(one.values, two.values)


@pytest.mark.parametrize("family", ["dense", "mixtral"])
def test_hidden_states_that_were_asked_for_before_slow_nothing_down(family, steps):
    """transformers leaves the hooks that recorded them on the layers."""
    model = made(family)
    expected = model.generate(PROMPT, **OPTIONS, **WHOLE)
    asked = {"output_hidden_states": True} | ({"output_router_logits": True} if family == "mixtral" else {})
    with torch.no_grad():
        recorded = model(PROMPT[:, :1], **asked)
        assert len(recorded.hidden_states) == 4 and any(module._forward_hooks for module in model.modules())
        steps[0] = 0
        assert_equal(model.generate(PROMPT, **OPTIONS, **WHOLE), expected)
        assert steps == [16]
        again = model(PROMPT[:, :1], **asked)
    assert all(map(torch.equal, again.hidden_states, recorded.hidden_states))
    if family == "mixtral":
        assert len(again.router_logits) == 3


def test_transformers_own_streamers_and_processors_leave_tokens_unwatched(monkeypatch):
    kinds, begin = [], Tokens.__init__

    def note(tokens, model, length, limit, is_watched):
        kinds.append(is_watched)
        begin(tokens, model, length, limit, is_watched)

    monkeypatch.setattr(Tokens, "__init__", note)

    class Own(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    class Words:
        def decode(self, ids, **_):
            return " ".join(map(str, ids))

    model = made()
    model.generate(PROMPT, streamer=TextStreamer(Words()), repetition_penalty=1.3, **OPTIONS)
    model.generate(PROMPT, logits_processor=[Own()], **OPTIONS)
    assert kinds == [False, True]


def test_threads_that_share_a_model_have_their_own_tokens():
    model = made("mixtral")
    prompts = [PROMPT + shift for shift in range(4)]
    expected = [by_passes(model, prompt, **OPTIONS) for prompt in prompts]
    found: dict[int, list[torch.Tensor]] = {number: [] for number in range(4)}

    def work(number):
        for _ in range(5):
            found[number].append(model.generate(prompts[number], **OPTIONS))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, answers in found.items():
        assert len(answers) == 5 and all(torch.equal(answer, expected[number]) for answer in answers)
