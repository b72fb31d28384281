"""LoRA computed beside the experts' products equals peft's own way, which adds the update to the weights."""

import copy
from contextlib import nullcontext

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from support.models import (
    MULTIMODAL,
    SHALLOW_MODELS,
    assert_same_gradients,
    loss_and_gradients,
    make_asymmetric,
    max_abs,
    run,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.distributed import DistributedConfig

import llamoe
from llamoe.modeling.formats import Int4
from llamoe.modeling.moe import STACKS as STACK_NAMES
from llamoe.modeling.moe import Experts, ExpertsLora, LowRank, OutputFirstExperts
from llamoe.modeling.quantization import QuantizedExperts

TEXT = next(case for case in SHALLOW_MODELS if case.name == "LlamoeForCausalLM")
STACKS = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
# Sums are in another order.
TOLERANCE = 1e-5


def adapted(implementation="llamoe", **options):
    """Return a model with random factors on all linear layers and both stacks; grouped products cannot take r = 3."""
    model = TEXT.make()
    model.set_experts_implementation(implementation)
    torch.manual_seed(1)
    options = {"target_modules": "all-linear", "target_parameters": STACKS, "r": 3, **options}
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **options)).eval()


def wrappers(model):
    """Return the wrappers of all stacks, two for each mixture."""
    return [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]


def gradients_of(model):
    inputs = TEXT.inputs()
    found = loss_and_gradients(model, inputs, labels=inputs["input_ids"])
    assert any("experts" in name for name in found[1])
    return found


@pytest.fixture(scope="module")
def expected():
    return gradients_of(adapted())


@pytest.mark.parametrize("rank", [3, 8])
def test_it_forms_no_weight(rank, monkeypatch):
    """peft's parametrization, which computes W + BA, is not used."""
    monkeypatch.setattr(nn.utils.parametrize, "register_parametrization", None)
    loss, _ = gradients_of(adapted(r=rank))
    assert loss > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant, expected):
    model = adapted().train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same_gradients(gradients_of(model), expected)


@pytest.mark.slow
def test_one_graph(expected):
    torch._dynamo.reset()
    model = adapted()
    model.get_base_model().model.layers[1].feed_forward.compile(fullgraph=True, backend="eager")
    assert_same_gradients(gradients_of(model), expected)
    torch._dynamo.reset()


def test_dropout(tmp_path):
    """Dropout zeroes inputs of both stacks in training, and none in evaluation."""
    model = adapted(lora_dropout=0.4)
    assert torch.equal(run(model, **TEXT.inputs()), run(adapted(), **TEXT.inputs()))
    seen = []
    for wrapper in wrappers(model):
        dropout = wrapper.lora_dropout["default"]
        assert isinstance(dropout, nn.Dropout) and dropout.p == 0.4
        dropout.register_forward_hook(lambda _, given, result: seen.append((given[0], result)))
    run(model.train(), **TEXT.inputs())
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    sizes = [experts.gate_up_proj.shape[1], experts.down_proj.shape[1]]
    assert [result.shape[1] for _, result in seen] == sizes
    for given, result in seen:
        assert 0.3 < (result == 0).float().mean() < 0.5
        assert max_abs(result, torch.where(result == 0, 0.0, given / 0.6)) < TOLERANCE
    # peft cannot load this file on stock's model.
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(TEXT.make(), tmp_path).eval()
    assert torch.equal(run(again, **TEXT.inputs()), run(model.eval(), **TEXT.inputs()))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_other_ways_of_experts_have_no_place_for_it(implementation):
    """Implementations of transformers refuse active adapters on experts; merged and disabled ones work."""
    model, inputs = adapted(implementation), TEXT.inputs()
    with pytest.raises(
        ValueError, match=f'"{implementation}" cannot compute LoRA on experts: choose "llamoe"'
    ):
        model(**inputs)
    with model.disable_adapter():
        base = run(model, **inputs)
    model.merge_adapter()
    assert max_abs(run(model, **inputs), run(adapted(), **inputs)) < TOLERANCE
    assert max_abs(run(model, **inputs), base) > 0.1


def two_adapters():
    model = adapted()
    torch.manual_seed(2)
    options = dict(target_modules="all-linear", target_parameters=STACKS, init_lora_weights=False)
    model.add_adapter("second", LoraConfig(r=5, lora_alpha=7, **options))
    return model.eval()


def test_rows_with_adapters_of_their_own():
    """An adapter for each row works on linear layers; with experts or pictures it is refused."""
    names = ["second", "__base__", "default"]
    with pytest.raises(ValueError, match="adapter_names.*experts"):
        two_adapters()(**TEXT.inputs(), adapter_names=names)
    options = dict(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    seen = get_peft_model(MULTIMODAL.make(), LoraConfig(**options))
    with pytest.raises(ValueError, match="adapter_names.*pictures"):
        seen.eval()(**MULTIMODAL.inputs(), adapter_names=["default"] * 3)
    # On linear layers alone, peft computes it.
    model = get_peft_model(TEXT.make(), LoraConfig(**options))
    model.add_adapter("second", LoraConfig(**options))
    together = run(model.eval(), **TEXT.inputs(), adapter_names=names)
    model.set_adapter("second")
    assert max_abs(together[0], run(model, **TEXT.inputs())[0]) < TOLERANCE
    assert max_abs(together[2], run(model, **TEXT.inputs())[2]) > 0.1


def test_a_weighted_sum():
    """A linear combination adds the factors, as peft does for linear layers."""
    model = adapted()
    torch.manual_seed(2)
    model.add_adapter("second", model.peft_config["default"])
    model.add_weighted_adapter(["default", "second"], [0.3, 0.9], "sum", combination_type="linear")
    assert len(wrappers(model)) == 2
    for wrapper in wrappers(model):
        scale = wrapper.scaling["default"]
        a, b = (
            (0.3 * scale) ** 0.5 * getattr(wrapper, x)["default"].weight
            + (0.9 * scale) ** 0.5 * getattr(wrapper, x)["second"].weight
            for x in ("lora_A", "lora_B")
        )
        wanted = torch.einsum(
            "ore,eri->eio",
            b.unflatten(1, (-1, wrapper.num_experts)),
            a.unflatten(0, (wrapper.num_experts, -1)),
        )
        assert max_abs(wrapper.get_delta_weight("sum"), wanted) < TOLERANCE


REFUSED = {
    "the module of experts": (dict(target_modules=["experts"], target_parameters=None), "target_parameters"),
    "dora": (dict(use_dora=True), "use_dora=True"),
    "activated by tokens": (dict(alora_invocation_tokens=[1, 2]), r"alora_invocation_tokens=\[1, 2\]"),
    **{
        begin: (dict(init_lora_weights=begin), f"init_lora_weights='{begin}'")
        for begin in ("pissa", "olora", "orthogonal")
    },
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_is_refused_by_name(kind):
    options, named = REFUSED[kind]
    with pytest.raises(ValueError, match=named):
        get_peft_model(TEXT.make(), LoraConfig(**dict(target_parameters=STACKS) | options))


@pytest.mark.parametrize(
    ("names", "combination", "named"),
    [
        (["default", "second"], "svd", "'svd' for default, second"),
        (["default", "second"], "cat", "'cat' for default, second"),
        (["default", "plain"], "linear", "stacks"),
        (["plain", "default"], "linear", "stacks"),
    ],
)
def test_sums_that_are_refused(names, combination, named):
    model = two_adapters()
    model.add_adapter("plain", LoraConfig(target_modules="all-linear", r=3, init_lora_weights=False))
    with pytest.raises(ValueError, match=named):
        model.add_weighted_adapter(names, [0.3, 0.9], "sum", combination)
    assert set(model.peft_config) == {"default", "second", "plain"}


@pytest.mark.parametrize("experts", [False, True])
def test_a_config_by_parts(experts):
    config = llamoe.lora_config(TEXT.make(), r=5, experts=experts)
    assert type(config) is LoraConfig and (config.r, config.lora_alpha) == (5, 10)
    assert config.target_parameters == (sorted(STACKS) if experts else None)
    model = get_peft_model(TEXT.make(), config)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("experts" in name for name in trained) == experts
    assert not any("router" in name for name in trained)
    assert any("q_proj" in name for name in trained) and any("shared_expert" in name for name in trained)


def test_one_adapter_is_scaled_by_pefts_default():
    model = adapted()
    model.add_weighted_adapter(["default"], [1.0], "same")
    expected = run(model, **TEXT.inputs())
    model.set_adapter("same")
    assert max_abs(run(model, **TEXT.inputs()), expected) < TOLERANCE


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2},
        {"tp_size": 2, "ep_size": 4, "fsdp_size": 2},
        {"tp_size": 2, "ep_size": 2, "fsdp_size": 3},
    ],
)
def test_ways_of_sharing_experts_that_are_refused(sizes):
    """`parallel/test_two_processes.py` tests the way that works: whole experts, and the same batch in all processes."""
    model = TEXT.make()
    model.config.distributed_config = DistributedConfig(**sizes)
    with pytest.raises(ValueError, match="^tp_size = 2.*whole experts"):
        get_peft_model(model, llamoe.lora_config(model))
    get_peft_model(model, llamoe.lora_config(model, experts=False))


def test_a_tower_that_is_not_there():
    with pytest.raises(ValueError, match="has no vision tower"):
        llamoe.lora_config(TEXT.make(), vision=True)


def stacks_with_factors(layout, weights, dtype):
    """Return experts, plain or packed, and LoRA's factors of each stack: leaves `[E, r, I]` and `[O, r, E]`."""
    fields = dict(num_local_experts=3, hidden_size=64, intermediate_size=96)
    experts = (Experts if layout == "llama4" else OutputFirstExperts)(transformers.MixtralConfig(**fields))
    experts.config._experts_implementation = "llamoe"
    make_asymmetric(experts).to(weights).requires_grad_(False)
    if layout == "int4":
        packed = QuantizedExperts(experts, Int4(32))
        for name in STACK_NAMES:
            found = [packed.format.quantize(matrix.T) for matrix in experts.stack(name).matrices()]
            for part, each in zip(packed.parts(name), zip(*found, strict=True), strict=True):
                part.data.copy_(torch.stack(each))
        experts = packed
    generator, leaves = torch.Generator().manual_seed(1), {}
    for name, size_in, size_out in zip(STACK_NAMES, (64, 96), (192, 64), strict=True):
        # Grouped products can take this rank in each dtype.
        factors = (
            torch.randn(*shape, generator=generator) / 8 for shape in ((3, 8, size_in), (size_out, 8, 3))
        )
        leaves[name] = [factor.to(dtype).requires_grad_() for factor in factors]
    return experts, leaves


def outputs_and_gradients(compute, leaves, num_tokens, dtype, context=None):
    """Return outputs with 2 experts a token, and the factors' gradients; `context` surrounds the forward pass alone."""
    generator = torch.Generator().manual_seed(num_tokens)
    x, weights = (
        torch.randn(num_tokens, 64, generator=generator),
        torch.rand(num_tokens, 2, generator=generator),
    )
    ids = torch.rand(num_tokens, 3, generator=generator).topk(2).indices
    with context or nullcontext():
        y = compute(x.to(dtype), ids, weights.to(dtype))
    flat = [leaf for pair in leaves.values() for leaf in pair]
    return y, torch.autograd.grad(y.double().square().sum(), flat)


def beside(experts, leaves):
    """Return a function that computes the experts with the update beside their weights."""

    def compute(*inputs):
        updates = {
            name: (LowRank(a.transpose(1, 2), b, 0.5, nn.Identity()),) for name, (a, b) in leaves.items()
        }
        return experts(*inputs, lora=ExpertsLora(**updates))

    return compute


def within(experts, leaves):
    """Return a function that adds the update to the weights and computes in float64."""
    whole = Experts(copy.deepcopy(experts.config)).double()

    def compute(x, ids, weights):
        stacks = {}
        for name, (a, b) in leaves.items():
            stack = (
                experts.dequantized_weight(name, torch.float64)
                if experts.is_packed
                else getattr(experts, name)
            )
            stack = stack if experts.is_transposed else stack.transpose(1, 2)
            stacks[name] = stack.double() + 0.5 * torch.einsum("eri,ore->eio", a.double(), b.double())
        return torch.func.functional_call(whole, stacks, (x.double(), ids, weights.double()))

    whole.config._experts_implementation = "eager"
    return compute


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Layout, dtypes of weights and factors, and autocast: off, bfloat16 and float16 in turn.
MIXED = [
    (layout, weights, factors)
    for layout in ("llama4", "mixtral", "int4")
    for weights in (DTYPES if layout != "int4" else DTYPES[1:2])
    for factors in dict.fromkeys((torch.float32, weights, torch.bfloat16))
]
MIXED = [
    (*each, (None, torch.bfloat16, torch.float16)[(number + more) % 3])
    for number, each in enumerate(MIXED)
    for more in range(1 if each[0] != "int4" else 3)
]


@pytest.mark.parametrize(("layout", "weights", "factors", "autocast"), MIXED, ids=str)
def test_dtypes_of_weights_and_factors_may_differ(layout, weights, factors, autocast):
    """Outputs and gradients are right for one token and for many; fake tensors have the same dtypes."""
    experts, leaves = stacks_with_factors(layout, weights, factors)
    # 16 roundings of the coarsest dtype; in float32 the order of some hundred terms matters more.
    taking_part = {weights, factors, autocast or weights, experts.dtype}
    tolerance = max(16 * max(torch.finfo(dtype).eps for dtype in taking_part), TOLERANCE)
    autocasting = torch.autocast("cpu", autocast, enabled=autocast is not None)
    compute = beside(experts, leaves)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes, _ = outputs_and_gradients(compute, leaves, 11, weights, autocasting)
    assert (shapes.dtype, shapes.shape) == (weights, (11, 64))
    for num_tokens in (1, 11):
        y, gradients = outputs_and_gradients(compute, leaves, num_tokens, weights, autocasting)
        assert y.dtype == weights
        expected = outputs_and_gradients(within(experts, leaves), leaves, num_tokens, weights)
        for given, right in zip((y, *gradients), (expected[0], *expected[1]), strict=True):
            assert max_abs(given, right) <= tolerance * right.abs().max()


@pytest.mark.slow
def test_compilers_take_mixed_dtypes():
    """peft gives packed weights, which compute in bfloat16, factors in float32."""
    torch._dynamo.reset()
    experts, leaves = stacks_with_factors("int4", torch.bfloat16, torch.float32)
    compute = beside(experts, leaves)
    y, gradients = outputs_and_gradients(compute, leaves, 11, torch.bfloat16)
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    found = outputs_and_gradients(compiled, leaves, 11, torch.bfloat16)
    for given, right in zip((found[0], *found[1]), (y, *gradients), strict=True):
        # Sums in bfloat16 are in another order.
        assert given.dtype == right.dtype and max_abs(given, right) <= 0.02 * right.abs().max()
    torch._dynamo.reset()
