"""A decode step of one row in a few calls: the modules' numbers; modules are called wherever somebody looks."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.decoding import by_modules, dense, ids, mixtral, steps, text
from support.few_bits import load, save
from support.models import max_abs
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from llamoe.modeling.kernels import (
    SHORTCUTS_ARE_ON,
    FewRows,
    cpp_kernels,
    decode,
    few_rows_pass,
    known_modules,
    second_half,
)

pytestmark = pytest.mark.skipif(
    cpp_kernels.library() is None or not SHORTCUTS_ARE_ON,
    reason="needs a C++ compiler, a CPU with AVX2, AVX-512 or NEON, and shortcuts",
)
CASES = {
    "dense": dense,
    "window": lambda: dense(sliding_window=9, layer_types=["sliding_attention", "full_attention"]),
    "interleaved": lambda: dense(rope_interleave=True),
    "one head": lambda: dense(num_attention_heads=1, num_key_value_heads=1, head_dim=200),
    "llama 4": text,
    "no eps": lambda: text(rms_norm_eps=0.0),
    "temperature": lambda: text(floor_scale=4, attn_scale=0.7, no_rope_layers=[1, 0, 1, 0]),
    "mixtral": mixtral,
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        *((case, torch.bfloat16) for case in ("window", "llama 4", "mixtral")),
    ],
)
def test_steps_are_those_of_the_modules(case, dtype, taken, monkeypatch):
    model = CASES[case]().to(dtype)
    expected = by_modules(model, monkeypatch)
    assert not taken[True]
    found = steps(model)
    num_steps = found.shape[1] * model.config.num_hidden_layers
    assert taken[True] >= num_steps / 2
    if dtype == torch.float32:
        # Sums in another order.
        assert max_abs(found, expected) < 2e-5
    else:
        # Roundings of bfloat16 in another order, which may send a token to another expert: the median token.
        errors = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
        assert errors.median() < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_all_layers_have_the_bits_of_their_halves(case, dtype, taken, monkeypatch):
    model, halves = CASES[case]().to(dtype), []

    def count(*args, original=decode.finish):
        halves.append(args)
        return original(*args)

    monkeypatch.setattr(decode, "finish", count)
    found = steps(model)
    # A full window drops what came first.
    num_layers = 10 * model.config.num_hidden_layers
    assert taken[True] == num_layers and (not halves or case == "window")
    halves.clear()
    monkeypatch.setattr(FewRows, "token", lambda *_: None)
    assert torch.equal(steps(model), found) and len(halves) == num_layers


@pytest.mark.parametrize("case", ["dense", "llama 4"])
def test_a_cache_that_grows_in_one_call_is_the_one_that_concatenates(case, monkeypatch):
    """Over the end of a window of 64, long enough for new memory, and whatever happens to it in between."""
    model, tokens = CASES[case](), ids(300)
    changes = {
        57: lambda cache: cache.crop(-3),
        150: copy.deepcopy,
        200: lambda cache: [setattr(layer, "keys", layer.keys.clone()) for layer in cache.layers],
    }

    @torch.no_grad()
    def run():
        found, cache = [], model(tokens[:, :50], use_cache=True).past_key_values
        for i in range(50, 300):
            if i in changes:
                changed = changes[i](cache)
                cache = changed if isinstance(changed, DynamicCache) else cache
            found.append(model(tokens[:, i : i + 1], past_key_values=cache).logits)
        return torch.cat(found, 1), cache

    found, cache = run()
    monkeypatch.setattr(FewRows, "token", lambda *_: None)
    expected, concatenated = run()
    assert torch.equal(found, expected) and cache.get_seq_length() == concatenated.get_seq_length()
    for layer, its in zip(cache.layers, concatenated.layers, strict=True):
        assert torch.equal(layer.keys, its.keys) and torch.equal(layer.values, its.values)
        assert layer.get_mask_sizes(1) == its.get_mask_sizes(1)


@pytest.mark.parametrize(
    ("case", "weights"), [("dense", "int8"), ("llama 4", "int4"), ("mixtral", "int4"), ("mixtral", "int8")]
)
def test_few_bits(case, weights, taken, monkeypatch):
    sizes = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    model = load(
        save({"dense": dense, "llama 4": text, "mixtral": mixtral}[case](**sizes).bfloat16()), weights
    )
    found = steps(model)
    assert taken[True] > 15
    expected = by_modules(model, monkeypatch)
    errors = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert errors.median() < 0.03


@torch.no_grad()
def test_threads_change_nothing():
    """Of decoding, with a head that is large enough for the kernels: sums of torch's products may differ with them."""
    model, tokens = dense(vocab_size=173), ids(900)
    threads, found = torch.get_num_threads(), []
    with torch.no_grad():
        prompt = model(tokens[:, :896], use_cache=True).past_key_values
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(steps(model, tokens, first=896, cache=copy.deepcopy(prompt)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_threads_that_share_a_model_have_their_own_caches():
    model, prompts = text(), [ids(20)[:, start:] for start in range(4)]
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    expected = [model.generate(prompt, **options) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            found = pool.map(lambda prompt: model.generate(prompt, **options), prompts)
            assert all(map(torch.equal, found, expected))


def test_what_is_no_number_stays_so(taken):
    model = dense()
    with torch.no_grad():
        cache = model(ids(), use_cache=True).past_key_values
        cache.layers[0].keys[0, 1, 3, 5] = torch.nan
        logits = model(ids()[:, :1], past_key_values=cache).logits
    assert taken[True] and logits.isnan().all()


def test_modules_are_called_where_somebody_looks(taken):
    model = text()
    expected = steps(model)
    calls = []
    for name in ("self_attn", "input_layernorm", "self_attn.q_proj", "self_attn.o_proj"):
        changed = copy.deepcopy(model)
        for layer in changed.model.layers:
            layer.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
        found = steps(changed)
        assert len(calls) >= found.shape[1] and max_abs(found, expected) < 2e-5
        calls.clear()
    taken[True] = 0
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"], use_dora=True))
    assert max_abs(steps(adapted), expected) < 2e-5 and not taken[True]
    normed = copy.deepcopy(model)
    for layer in normed.model.layers:
        layer.input_layernorm = nn.LayerNorm(192, bias=False)
    steps(normed)
    assert not taken[True]
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    assert max_abs(steps(eager, output_attentions=True), expected) < 2e-5 and not taken[True]
    with torch.enable_grad():
        tokens = ids(7)
        cache = model(tokens[:, :5], use_cache=True).past_key_values
        model(tokens[:, 5:6], past_key_values=cache).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0 and not taken[True]
    with torch.no_grad():
        batch = ids(8).repeat(2, 1)
        cache = model(batch[:, :5], use_cache=True).past_key_values
        model(batch[:, 5:6], past_key_values=cache)
    assert not taken[True]


@pytest.mark.slow
def test_layers_that_are_compiled_one_by_one_are_called(taken):
    model = dense()
    expected = steps(model, ids(8))
    taken[True] = 0
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    assert max_abs(steps(model, ids(8)), expected) < 2e-5 and not taken[True]


@torch.no_grad()
def test_padding_and_other_caches(taken):
    """A mask, or a cache of fixed length, hides keys."""
    model = dense()
    tokens = ids(9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    expected = model(tokens, attention_mask=mask).logits[:, -1]
    cache = model(tokens[:, :8], attention_mask=mask[:, :8], use_cache=True).past_key_values
    taken[True] = 0
    found = model(tokens[:, 8:], attention_mask=mask, past_key_values=cache).logits[:, -1]
    assert max_abs(found, expected) < 2e-5 and not taken[True]
    greedy = model.generate(tokens, max_new_tokens=6, do_sample=False)
    static = model.generate(tokens, max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(greedy, static)


@torch.no_grad()
def test_hidden_states_and_routers_are_recorded():
    model = text()
    cache = model(ids(5), use_cache=True).past_key_values
    given = dict(output_hidden_states=True, output_router_logits=True)
    first, second = copy.deepcopy(cache), copy.deepcopy(cache)
    recorded = model(ids(6)[:, 5:], past_key_values=first, **given)
    plain = model(ids(6)[:, 5:], past_key_values=second)
    assert max_abs(recorded.logits, plain.logits) < 2e-5
    assert len(recorded.hidden_states) == 5 and len(recorded.router_logits) == len(model.config.moe_layers)


def test_caches_hold_the_same():
    model = text()
    caches = []
    for _ in range(2):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids()[:, :5], past_key_values=cache)
            for i in range(5, 12):
                model(ids()[:, i : i + 1], past_key_values=cache)
        caches.append(cache)
    with torch.no_grad():
        whole = model(ids()[:, :12], use_cache=True).past_key_values
    for ours, expected in zip(caches[0].layers, whole.layers, strict=True):
        assert ours.keys.shape == expected.keys.shape
        assert max_abs(ours.keys, expected.keys) < 2e-5 and max_abs(ours.values, expected.values) < 2e-5


def test_a_saved_model_decodes_the_same(tmp_path):
    """Weights of a mapped file lie across cache lines."""
    model = text()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert max_abs(steps(again), steps(model)) < 2e-5


def doubled(model, name):
    model.model.layers[1].get_submodule(name).register_forward_hook(lambda module, args, output: 2 * output)


def replaced(model, name, module):
    parent, _, child = name.rpartition(".")
    setattr(model.model.layers[1].get_submodule(parent), child, module)


def other_weight(model, name):
    module = model.model.layers[0].get_submodule(name)
    module.weight.data = module.weight.data.flip(0).contiguous()


def adapted(model):
    model = get_peft_model(model, LoraConfig(target_modules=["up_proj"], init_lora_weights=False))
    return model.base_model.model


def replaced_forward(model):
    module = model.model.layers[1].mlp
    module.forward = lambda x, forward=module.forward: -forward(x)


def with_other_pairs(model):
    for module in (model.model.rotary_emb, *(layer.self_attn for layer in model.model.layers)):
        setattr(module, "interleave" if module is model.model.rotary_emb else "rope_interleave", True)


CHANGES = {
    "hook on a linear layer": lambda model: doubled(model, "mlp.down_proj"),
    "hook on a norm": lambda model: doubled(model, "post_attention_layernorm"),
    "hook on the attention's projection": lambda model: doubled(model, "self_attn.v_proj"),
    "hook on the feed-forward": lambda model: doubled(model, "mlp"),
    "hook on the activation": lambda model: doubled(model, "mlp.act_fn"),
    "rows of another stride": lambda model: model.model.layers[0].register_forward_hook(
        lambda module, args, output: torch.stack((2 * output, output), -1)[..., 0]
    ),
    "forward": replaced_forward,
    "linear layer": lambda model: replaced(model, "mlp.up_proj", nn.Linear(192, 320, bias=False)),
    "bias": lambda model: replaced(model, "self_attn.o_proj", nn.Linear(432, 192)),
    "activation": lambda model: replaced(model, "mlp.act_fn", nn.Tanh()),
    "norm's class": lambda model: replaced(model, "input_layernorm", nn.LayerNorm(192)),
    "weight": lambda model: other_weight(model, "mlp.gate_proj"),
    "norm's weight": lambda model: other_weight(model, "input_layernorm"),
    "weight in place": lambda model: model.model.layers[0].self_attn.k_proj.weight.data.neg_(),
    "eps": lambda model: setattr(model.model.layers[0].input_layernorm, "eps", 3.0),
    "second eps": lambda model: setattr(model.model.layers[1].post_attention_layernorm, "eps", 3.0),
    "scaling": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.7),
    "rotated pairs": with_other_pairs,
    "adapter": adapted,
    "casts": lambda model: model.bfloat16().float(),
}


def test_all_layers_are_looked_at_once(monkeypatch):
    """When a pass begins; one by one only after a change, or where something watches one of them."""
    model, tokens, looks = dense(), ids(12), []
    steps(model, tokens)
    for file in (known_modules, few_rows_pass, second_half):
        real = file.has_hooks
        monkeypatch.setattr(file, "has_hooks", lambda module, real=real: looks.append(module) or real(module))
    steps(model, tokens)
    assert looks == []
    model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[1].mlp.up_proj.weight.data.clone()
    steps(model, tokens)
    changed = model.model.layers[1]
    assert looks and set(looks) <= {changed.mlp, changed.post_attention_layernorm}


def test_what_changes_during_a_pass_is_seen(monkeypatch):
    """A hook of a layer may change those after it."""
    model, tokens = dense(), ids(8)
    before = steps(model, tokens)

    def flip(*_):
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data = weight.data.flip(0).contiguous()

    model.model.layers[0].register_forward_hook(flip)
    # Four passes: after them the weight is as it was.
    found = steps(model, tokens)
    assert max_abs(found, by_modules(model, monkeypatch, tokens)) < 2e-5 and max_abs(found, before) > 1e-4


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_passes_is_seen(change):
    model, tokens = dense(), ids(8)
    before = steps(model, tokens)
    changed = CHANGES[change](model)
    model = changed if isinstance(changed, nn.Module) and hasattr(changed, "lm_head") else model
    found = steps(model, tokens)
    with torch.enable_grad():
        expected = model(tokens).logits[:, 5:]
    # Sums in another order; a change that is missed shows.
    assert max_abs(found, expected) < 2e-5 and max_abs(found, before) > 1e-4
