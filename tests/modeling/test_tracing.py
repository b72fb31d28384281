"""Traces and graphs are right for other tokens than the example's: they contain no routing, padding or length.

`torch.jit.trace`, `make_fx`, `torch.export` and `torch.compile` run Python with an example. A loop over the experts
that the example's tokens chose would become a part of the program, and be wrong for other inputs in silence.
"""

import pytest
import torch
from support.mixtures import SIZES
from support.models import MODELS, main_output, make_asymmetric, max_abs, run, stock_text_config
from support.tables import in_turn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree
from transformers import DynamicCache
from transformers.integrations.executorch import register_dynamic_cache_export_support

import llamoe
from llamoe.modeling.moe.layer import MixtureOfExperts

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in MODELS}
# The traces of models with a head contain the models without one.
TRACED = [case for case in MODELS if case.is_head or not case.is_text]
# Sums are in another order.
TOLERANCE = 1e-5
# The tracer warns of each value that Python reads; here only checks of inputs do.
quietly = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")


def traced(block, example):
    return torch.jit.trace(block, (example,), check_trace=False)


def exported(block, example):
    rows = {0: torch.export.Dim("rows", min=2, max=90)}
    return torch.export.export(block, (example,), dynamic_shapes=(rows,), strict=False).module()


def compiled(block, example):
    torch._dynamo.reset()
    return torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")


def made_by_fx(block, example):
    return make_fx(block)(example)


def made_of_fakes(block, example):
    parameters = dict(block.named_parameters())
    graph = make_fx(lambda p, x: torch.func.functional_call(block, p, (x,)), tracing_mode="fake")(
        parameters, example
    )
    return lambda x: graph(parameters, x)


FOR_ANY_NUMBER = (traced, exported, compiled)
# Experts implementation, sizes, experts per token.
PATHS = [
    ("llamoe", "odd", 1),
    ("llamoe", "aligned", 2),
    ("grouped_mm", "aligned", 2),
    ("eager", "odd", 2),
    ("batched_mm", "odd", 2),
]


@torch.no_grad()
@pytest.mark.parametrize(
    ("implementation", "sizes", "top_k", "trace"),
    [(*path, trace) for path in PATHS for trace in (traced, made_by_fx, made_of_fakes, exported, compiled)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_other_tokens_go_to_their_own_experts(implementation, sizes, top_k, trace):
    if trace is made_of_fakes and implementation == "grouped_mm" and sizes == "aligned":
        pytest.skip("before torch 2.15 fake tensors of the grouped product are of bfloat16 only; it says so")
    config = llamoe.from_stock(stock_text_config(num_experts_per_tok=top_k, **SIZES[sizes]))
    block = make_asymmetric(MixtureOfExperts(config))
    block.experts.config._experts_implementation = implementation
    generator = torch.Generator().manual_seed(top_k)
    example, *others = (
        torch.randn(number, config.hidden_size, generator=generator) for number in (7, 7, 2, 5, 66)
    )
    program = trace(block, example)
    chosen = [block.router(x)[2].sort(0).values for x in (example, others[0])]
    assert not torch.equal(*chosen)
    for x in others if trace in FOR_ANY_NUMBER else others[:1]:
        assert max_abs(program(x), block(x)) < TOLERANCE


@pytest.mark.parametrize("trace", [traced, compiled])
def test_a_trace_with_gradients_is_right_for_other_tokens(trace):
    config = llamoe.from_stock(stock_text_config(**SIZES["odd"]))
    for implementation in ("llamoe", "eager"):
        block = make_asymmetric(MixtureOfExperts(config))
        block.experts.config._experts_implementation = implementation
        example, other = torch.randn(2, 7, 70, generator=torch.Generator().manual_seed(1))
        program = trace(block, example)
        gradients = []
        for call in (program, block):
            block.zero_grad()
            x = other.clone().requires_grad_()
            call(x).square().sum().backward()
            gradients.append([x.grad, *(parameter.grad for parameter in block.parameters())])
        for given, expected in zip(*gradients, strict=True):
            assert max_abs(given, expected) < 1e-4 * expected.abs().max()


class Call(torch.nn.Module):
    """Calls a model with positional arguments and returns one tensor, as tracers need it."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values):
        options = {"use_cache": False} if "input_ids" in self.names else {}
        return main_output(self.model(**dict(zip(self.names, values, strict=True)), **options))


@quietly
@pytest.mark.parametrize(
    ("case", "attention"), in_turn(TRACED, ["eager", "sdpa"]), ids=lambda value: getattr(value, "name", value)
)
def test_a_traced_model_is_right_for_other_inputs(case, attention):
    """Outputs are right with other tokens, padding, places of images, numbers of rows, and other lengths of text."""
    overrides = {"intermediate_size": 51} if case.has_experts else {}
    for implementation in ("llamoe", "eager") if case.has_experts else ("llamoe",):
        model = case.make_small(**overrides)
        model.set_attn_implementation(attention)
        if case.has_experts:
            model.set_experts_implementation(implementation)
        example = case.inputs()
        names = list(example)
        with torch.no_grad():
            program = torch.jit.trace(Call(model, names), tuple(example.values()), check_trace=False)
        others = [dict(example, **{name: value.flip(0) for name, value in example.items()})]
        if case.is_text:
            shapes = [((0, 9, 2), 53)] if case.has_images else [((0, 9, 2), 53), ((0, 4), 9), ((3,), 70)]
            others = [case.inputs(*shape) for shape in shapes]
            for other in others:
                tokens = other["input_ids"]
                other["input_ids"] = torch.where((tokens > 2) & (tokens < 90), 92 - tokens, tokens)
        for other in others:
            with torch.no_grad():
                given = program(*other.values())
            difference = (given - run(model, **other)).abs()
            if case.is_text:
                difference = difference[other["attention_mask"] == 1]
            assert difference.max() < TOLERANCE


@pytest.fixture
def exportable_caches():
    register_dynamic_cache_export_support()
    yield
    _pytree._deregister_pytree_node(DynamicCache)


# In the first all layers have windows; in the second one layer has chunks, one has none.
LOCAL = [CASES["LlamoeMixtralForCausalLM"], CASES["LlamoeForCausalLM"]]


@torch.no_grad()
@pytest.mark.parametrize("case", LOCAL, ids=lambda case: case.name)
def test_an_exported_cache_keeps_its_tokens(case, exportable_caches):
    """A program returns keys and values, but not how many tokens a window has dropped; the cache still works."""
    model = case.make_small(**({} if case.is_llama4 else {"num_hidden_layers": 1}))
    ids = case.inputs(padding=(0, 0))["input_ids"]
    options = {"use_cache": True, "past_key_values": DynamicCache(config=model.config)}
    shapes = {"input_ids": {1: torch.export.Dim.AUTO}, "use_cache": None, "past_key_values": [[], []]}
    example = {"input_ids": ids[:, :20], **options}
    program = torch.export.export(model, (), example, dynamic_shapes=shapes, strict=False).module()
    expected = run(model, input_ids=ids)
    output = program(input_ids=ids[:, :37], **options)
    assert max_abs(output.logits, expected[:, :37]) < TOLERANCE
    past = output.past_key_values
    assert max_abs(run(model, input_ids=ids[:, 37:], past_key_values=past), expected[:, 37:]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("case", LOCAL, ids=lambda case: case.name)
def test_a_cache_that_has_forgotten_tokens_is_not_exported(case, exportable_caches):
    model, ids = case.make_small(), case.inputs(padding=(0, 0))["input_ids"]
    past = DynamicCache(config=model.config)
    run(model, input_ids=ids[:, :20], past_key_values=past)
    with pytest.raises(ValueError, match="past_key_values"):
        torch.export.export(model, (ids[:, 20:26],), {"past_key_values": past}, strict=False)
