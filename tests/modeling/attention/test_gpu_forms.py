"""Checks on a CPU of what matters on a GPU: attention does not wait for values, and does not copy keys."""

from unittest import mock

import pytest
import torch
from support.models import MODELS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import llamoe

pytestmark = pytest.mark.slow

DENSE = next(case for case in MODELS if case.name == "LlamoeDenseForCausalLM")


class Places(TorchDispatchMode):
    """Counts calls of `nonzero`: for each, the host of a GPU would wait."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_flash_attention_does_not_wait_if_a_mask_hides_nothing(flash):
    """Only if the mask hides tokens does transformers search for them, by `nonzero`."""
    model = DENSE.make()
    model.set_attn_implementation("flash_attention_2")
    ids = DENSE.inputs()["input_ids"][1:2].repeat(2, 1)
    for hidden in (0, 5):
        mask, cache = torch.ones_like(ids), DynamicCache(config=model.config)
        mask[1, :hidden] = 0
        for part in (slice(0, 40), slice(40, 41), slice(41, 53)):
            with Places() as places:
                model(ids[:, part], past_key_values=cache, attention_mask=mask[:, : part.stop])
            assert (places.count == 0) == (hidden == 0)


def test_a_compiled_step_does_not_repeat_keys():
    """With a static cache, on fake CUDA tensors, a step is one graph in which heads share their keys."""
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
    shapes = [[tuple(it.meta["example_value"].shape) for it in node.args[:3]] for node in calls]
    assert len(graphs) == 1 and shapes == [[(2, 2, 3, 20), (2, 2, 37, 20), (2, 2, 37, 20)]]
