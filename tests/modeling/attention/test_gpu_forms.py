"""Forms of attention that a GPU takes, on a CPU: the numbers are those of `eager`."""

from unittest import mock

import pytest
import torch
from support.models import MODELS, max_abs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import llamoe
from llamoe.modeling.attention import by_sdpa

pytestmark = pytest.mark.slow

TEXT, DENSE = (
    next(case for case in MODELS if case.name == name)
    for name in ("LlamoeForCausalLM", "LlamoeDenseForCausalLM")
)


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("case", [TEXT, DENSE], ids=lambda case: case.name)
def test_prompts_behind_cached_tokens_equal_one_pass(case, kernel, monkeypatch):
    """The last query at the last key by name, and keys repeated where a kernel takes no shared ones; with gradients."""
    ids = torch.randint(3, 90, (2, 90), generator=torch.Generator().manual_seed(3))
    truth, model = case.make(), case.make()
    truth.set_attn_implementation("eager")
    seen, dispatch, forward = [], CausalBias._dispatch, by_sdpa.sdpa_attention_forward

    def by_name(query, key, *args, **kwargs):
        seen.append((True, query.shape[1] // key.shape[1]))
        return dispatch(query, key, *args, **kwargs)

    def without(module, query, key, *args, **kwargs):
        seen.append((False, query.shape[1] // key.shape[1]))
        return forward(module, query, key, *args, **kwargs)

    monkeypatch.setattr(by_sdpa, "fused_kernel", lambda query: kernel)
    monkeypatch.setattr(CausalBias, "_dispatch", staticmethod(by_name))
    monkeypatch.setattr(by_sdpa, "sdpa_attention_forward", without)
    expected = truth(ids).logits[:, 37:]
    cache = DynamicCache(config=model.config)
    model(ids[:, :37], past_key_values=cache)
    seen.clear()
    given = model(ids[:, 37:], past_key_values=cache).logits
    # Sums of a few hundred terms in another order.
    assert max_abs(given, expected) < 1e-4
    assert {is_bias for is_bias, _ in seen} == ({True, False} if case is TEXT else {True})
    assert {groups for _, groups in seen} == ({3} if kernel == "flash" else {1})
    for each, logits in ((truth, expected), (model, given)):
        logits.square().mean().backward()
        assert each.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0
    a, b = (each.model.layers[0].self_attn.v_proj.weight.grad for each in (truth, model))
    assert max_abs(a, b) < 1e-4 * a.abs().max() + 1e-6


@pytest.mark.parametrize("case", [TEXT, DENSE], ids=lambda case: case.name)
def test_a_static_cache_is_filled_with_repeated_keys(case, monkeypatch):
    """Keys of places that are not written yet are not repeated."""
    ids = torch.randint(3, 90, (2, 15), generator=torch.Generator().manual_seed(3))
    model, repeated = case.make(), []
    expected = model(ids).logits

    def repeat(states, *args, original=torch.Tensor.repeat_interleave, **kwargs):
        repeated.append(states.shape[2])
        return original(states, *args, **kwargs)

    monkeypatch.setattr(by_sdpa, "fused_kernel", lambda query: "efficient")
    monkeypatch.setattr(torch.Tensor, "repeat_interleave", repeat)
    given = model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=70)).logits
    assert max_abs(given, expected) < 1e-4 and set(repeated) <= {15, 30}


class Places(TorchDispatchMode):
    """Counts searches for the places of flags, each of which a GPU's host would wait for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("case", [TEXT, DENSE], ids=lambda case: case.name)
def test_flash_looks_for_no_places_under_a_mask_that_hides_nothing(case, flash):
    """As `eager` computes; a mask that hides tokens is followed as before."""
    truth, model = case.make(), case.make()
    truth.set_attn_implementation("eager")
    model.set_attn_implementation("flash_attention_2")
    ids = case.inputs()["input_ids"][1:2].repeat(2, 1)
    for hidden in (0, 5):
        mask = torch.ones_like(ids)
        mask[1, :hidden] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        caches = [DynamicCache(config=each.config) for each in (truth, model)]
        for part in (slice(0, 40), slice(40, 41), slice(41, 42), slice(42, 53)):
            logits, inputs = [], dict(attention_mask=mask[:, : part.stop], position_ids=positions[:, part])
            for each, cache in zip((truth, model), caches, strict=True):
                with Places() as places:
                    logits.append(each(ids[:, part], past_key_values=cache, **inputs).logits)
            assert (places.count == 0) == (hidden == 0)
            is_real = mask[:, part].bool()
            assert max_abs(logits[0][is_real], logits[1][is_real]) < 1e-4


def test_a_compiled_step_packs_heads():
    """On fake CUDA tensors, with a cache of fixed length: one graph, in which keys are not repeated."""
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return graph

    model = llamoe.LlamoeDenseForCausalLM(DENSE.make_config(num_hidden_layers=1)).eval()
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    capable = mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0))
    torch._dynamo.reset()
    with capable, torch.no_grad(), fakes:
        for module in model.modules():
            for name, tensor in [*module._parameters.items()]:
                if tensor is not None:
                    module._parameters[name] = torch.nn.Parameter(torch.empty(tensor.shape, device="cuda"))
            for name, tensor in [*module._buffers.items()]:
                module._buffers[name] = torch.empty(tensor.shape, device="cuda")
        cache = StaticCache(config=model.config, max_cache_len=37)
        model(torch.ones(2, 8, dtype=torch.long, device="cuda"), past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend=record, dynamic=False)
        token, position = (torch.ones(2, 1, dtype=torch.long, device="cuda") for _ in range(2))
        step(token, past_key_values=cache, position_ids=position)
    torch._dynamo.reset()
    calls = [node for node in graphs[0].graph.nodes if "scaled_dot_product" in str(node.target)]
    shapes = [[tuple(each.meta["example_value"].shape) for each in node.args[:3]] for node in calls]
    assert len(graphs) == 1 and shapes == [[(2, 2, 3, 20), (2, 2, 37, 20), (2, 2, 37, 20)]]
