"""`torch.compile` in one graph, compiled generation that compiles once, and `torch.export`.

Most tests use backends that generate no code (`eager`, `aot_eager`): the model must be one graph, and compute the
same. `test_inductor` generates code.
"""

import copy
import io

import pytest
import torch
from support.models import (
    MODELS,
    assert_same_gradients,
    loss_and_gradients,
    main_output,
    max_abs,
    run,
)
from torch.export import Dim
from transformers import CompileConfig, StaticCache

import llamoe
from llamoe.modeling.moe.layer import MixtureOfExperts

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in MODELS}
DECODERS = pytest.mark.parametrize("name", ["LlamoeDenseForCausalLM", "LlamoeForCausalLM"])
# One chunked layer of Llama 4, where more layers would test nothing else.
CHUNKED = {"num_hidden_layers": 1, "no_rope_layers": [1], "layer_types": ["chunked_attention"]}
# Sums are in another order.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs graphs as they are, and counts the graphs and their calls."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, module, example_inputs, **_):
        self.graphs += 1
        values = [node.meta.get("example_value") for node in module.graph.nodes]
        dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        assert dtypes and not any(dtype.is_complex for dtype in dtypes)

        def counted(*args):
            self.calls += 1
            return module(*args)

        return counted


# Forward; the graphs of models with a head contain the models without one


@pytest.mark.parametrize("name", ["LlamoeForCausalLM", "LlamoeMixtralForCausalLM"])
def test_few_graphs_for_all_lengths(name):
    """The first length has a graph of its own, the second one serves all lengths above a chunk or window.

    Inputs have padding; or positions, which do not depend on the length.
    """
    case = CASES[name]
    fields = CHUNKED if case.is_llama4 else {"num_hidden_layers": 1}
    model, backend = case.make_small(**fields), Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    graphs = []
    for length in (29, 41, 70):
        inputs = case.inputs(padding=(0, 3 * case.is_llama4), length=length)
        if not case.is_llama4:
            inputs = {"input_ids": inputs["input_ids"], "position_ids": torch.arange(length)[None]}
        assert max_abs(run(compiled, **inputs), run(model, **inputs)) < TOLERANCE
        graphs.append(backend.graphs)
    assert graphs[0] == 1 and graphs[1] == graphs[2] <= 2, graphs


# The backward pass


@pytest.mark.parametrize(
    ("name", "is_checkpointed"),
    [
        ("LlamoeDenseForCausalLM", False),
        ("LlamoeForConditionalGeneration", False),
        ("LlamoeForConditionalGeneration", True),
    ],
)
def test_training_is_one_graph(name, is_checkpointed):
    case = CASES[name]
    model, inputs = case.make_small().train(), case.inputs()
    # Otherwise transformers would turn `use_cache` off with a warning, which breaks the graph.
    options = {"labels": inputs["input_ids"], "use_cache": not is_checkpointed}
    expected = loss_and_gradients(model, inputs, **options)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_gradients(loss_and_gradients(model, inputs, compiled, **options), expected)


def test_router_training_is_one_graph():
    """Training with jitter, capacity, both router losses and expert load is one graph; a seed gives the same jitter."""
    case = CASES["LlamoeForCausalLM"]
    layer = dict(num_hidden_layers=1, no_rope_layers=[0], layer_types=["full_attention"], moe_layers=[0])
    model, inputs = case.make_small(**layer).train(), case.inputs()
    config = model.config
    config.router_aux_loss_coef, config.router_z_loss_coef = 0.5, 0.1
    mixture = next(module for module in model.modules() if isinstance(module, MixtureOfExperts))
    mixture.capacity_factor, mixture.router.jitter_noise = 0.8, 0.2
    options = {"labels": inputs["input_ids"], "output_router_logits": True, "output_expert_load": True}
    expected = loss_and_gradients(model, inputs, **options)
    plain = loss_and_gradients(model, inputs, labels=inputs["input_ids"])
    assert abs(expected[0] - plain[0]) > 0.1
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loads = []

    def call(**inputs):
        output = compiled(**inputs)
        loads.append(output.expert_load.sum(-1).tolist())
        return output

    assert_same_gradients(loss_and_gradients(model, inputs, call, **options), expected)
    assert loads == [[config.num_experts_per_tok * inputs["attention_mask"].sum().item()]]


# Generation with a static cache


@pytest.mark.parametrize("name", ["LlamoeDenseForCausalLM", "LlamoeForConditionalGeneration"])
def test_generate_compiles_once_for_prompts_of_differing_lengths(name):
    """After the longest prompt, by which a server would warm up, shorter prompts use its cache and its graph.

    The prefill is not compiled; each step after it runs the one graph. A prompt of eleven tokens fills the window of a
    chunk with its six new tokens; a prompt of 30 has filled it before.
    """
    case = CASES[name]
    model = case.make_small()
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation="static")
    backend = Counting()
    # A function: the config is copied, and a copy of the counter would count apart.
    compiled = CompileConfig(fullgraph=True, backend=lambda *args, **_: backend(*args))
    compiled._compile_all_devices = True  # otherwise only accelerators compile
    for calls, (padding, length) in enumerate(
        [((0, 4), 30), ((2, 0), 11), ((0, 0), 19), ((1, 5), 24), ((1, 5), 24)], start=1
    ):
        inputs = case.inputs(padding=padding, length=length)
        given = model.generate(**inputs, **options, compile_config=compiled)
        expected = model.generate(**inputs, **options, disable_compile=True)
        assert torch.equal(given, expected)
        assert (backend.graphs, backend.calls) == (1, 5 * calls)
    assert model.get_compiled_call(compiled) != model.__call__


@DECODERS
def test_steps_with_a_static_cache_compile_once(name):
    """Steps without `generate`, in which the graph makes the masks, too, compile once."""
    case = CASES[name]
    model, backend = case.make_small(**(CHUNKED if case.is_llama4 else {})), Counting()
    inputs = case.inputs(length=20)
    expected = run(model, **inputs)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    past = StaticCache(config=model.config, max_cache_len=40)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 20))
    parts = [run(model, input_ids=inputs["input_ids"][:, :9], attention_mask=mask, past_key_values=past)]
    for i in range(9, 20):
        token = inputs["input_ids"][:, i : i + 1]
        parts.append(run(compiled, input_ids=token, attention_mask=mask, past_key_values=past))
        assert backend.graphs == 1
    difference = (torch.cat(parts, 1) - expected).abs()[inputs["attention_mask"].bool()]
    assert difference.max() < TOLERANCE


def test_rings_leave_other_caches_alone():
    """Layers of a static cache become rings only if they are empty windows, and one of our models gets the cache."""
    case = CASES["LlamoeForCausalLM"]
    config = case.make_config()
    past = StaticCache(config=config, max_cache_len=40)
    kinds = [type(layer).__name__ for layer in past.layers]
    untouched = copy.deepcopy(past)
    run(case.make(), input_ids=case.inputs()["input_ids"][:, :20], past_key_values=past)
    changed = ["RingLayer" if kind == "StaticSlidingWindowLayer" else kind for kind in kinds]
    assert [type(layer).__name__ for layer in past.layers] == changed != kinds
    assert [type(layer).__name__ for layer in untouched.layers] == kinds
    assert past.get_seq_length() == 20 and past.get_max_length() == untouched.get_max_length()


# Export


@pytest.mark.parametrize(
    ("name", "with_mask"),
    [
        ("LlamoeDenseForCausalLM", False),
        ("LlamoeForCausalLM", False),
        ("LlamoeForCausalLM", True),
    ],
)
def test_export_with_dynamic_sizes(name, with_mask):
    """One exported program, saved and loaded, is right for every batch size and length.

    Export is by dynamo (`strict`); without it torch cannot prove that repeated heads stay in order.
    """
    case = CASES[name]
    # Without a mask the number of chunks would depend on the length, which no program can express.
    model = case.make_small(**({**CHUNKED, "moe_layers": [0] if with_mask else []} if case.is_llama4 else {}))

    def inputs_of(padding, length):
        inputs = case.inputs(padding, length)
        return inputs if with_mask else {"input_ids": inputs["input_ids"]}

    inputs = inputs_of((5, 0, 17), 53)
    sizes = {0: Dim("batch", max=64), 1: Dim("tokens", min=2, max=256)}
    program = torch.export.export(
        model,
        (),
        {**inputs, "use_cache": False},
        dynamic_shapes={**dict.fromkeys(inputs, sizes), "use_cache": None},
        strict=True,
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    program = torch.export.load(file).module()
    for padding, length in (((5, 0, 17), 53), ((0, 3), 17), ((0,), 80), ((0, 40, 3, 70), 100)):
        inputs = inputs_of(padding, length)
        expected = run(model, **inputs)
        assert 0.3 < expected.std() < 3
        assert max_abs(main_output(program(**inputs, use_cache=False)), expected) < TOLERANCE


@torch.no_grad()
@DECODERS
def test_hidden_positions_in_a_graph(name):
    """In an exported program, too, padding may have any positions, below zero or above all others."""
    case = CASES[name]
    model, inputs = case.make_small(**(CHUNKED if case.is_llama4 else {})), case.inputs()
    mask = inputs["attention_mask"]
    clean = (mask.cumsum(1) - 1).clamp(min=0)
    expected = run(model, **inputs, position_ids=clean)[mask == 1]
    inputs["position_ids"] = torch.where(mask == 1, clean, torch.tensor([-40, 2**40, -1]).repeat(18)[:53])
    exported = torch.export.export(model, (), {**inputs, "use_cache": False}, strict=True).module()
    assert max_abs(main_output(exported(**inputs, use_cache=False))[mask == 1], expected) < TOLERANCE


@DECODERS
def test_inductor(name):
    """Generated code computes the same logits and gradients, in float32."""
    case = CASES[name]
    model, inputs = case.make_small().train(), case.inputs()
    options = {"labels": inputs["input_ids"]}
    expected = loss_and_gradients(model, inputs, **options)
    compiled = torch.compile(model, fullgraph=True)
    assert_same_gradients(loss_and_gradients(model, inputs, compiled, **options), expected)


def test_no_model_type_is_kept_from_compiling():
    """Model types that contain "llama4" would not be compiled: transformers excludes them in `generate`."""
    for case in MODELS:
        assert "llama4" not in case.make_config().model_type, case.name
    assert llamoe.LlamoeForCausalLM._can_compile_fullgraph
