"""`init_lora_weights` on stacks of experts, against peft's own linear layer over each expert's matrix."""

import pytest
import torch
from peft import EvaConfig, LoraConfig, LoraGAConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear
from support.models import SHALLOW_MODELS, max_abs, run
from support.tables import in_turn
from torch import nn

import llamoe
from llamoe.modeling.moe import Experts

CASES = [
    case
    for case in SHALLOW_MODELS
    if case.is_head and case.name in ("LlamoeMixtralForCausalLM", "LlamoeForCausalLM")
]
MULTIMODAL = next(case for case in SHALLOW_MODELS if case.name == "LlamoeForConditionalGeneration")
for_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def begun(model, begin, **options):
    """An adapter of the experts alone."""
    config = LoraConfig(
        target_modules=[], target_parameters=STACKS, r=2, lora_alpha=6, init_lora_weights=begin, **options
    )
    torch.manual_seed(5)
    return get_peft_model(model, config).eval()


def wrappers(model):
    return [module for module in model.modules() if hasattr(module, "parameter_name")]


def factors(wrapper):
    """A as `[E, r, in]` and B as `[E, out, r]`, in peft's order of a stack."""
    a, b = (each["default"].weight.detach() for each in (wrapper.lora_A, wrapper.lora_B))
    return a.unflatten(0, (wrapper.num_experts, -1)), b.unflatten(1, (-1, wrapper.num_experts)).permute(
        2, 0, 1
    )


def matrices(experts, name):
    """Each expert's matrix as a linear layer has it, `[E, out, in]`."""
    stack = experts.stack(name)
    return stack.form.matrix(stack.parts, stack.sizes, experts.dtype).detach().clone()


@pytest.mark.parametrize(
    ("case", "begin", "dtype"),
    in_turn(CASES, ["pissa", "olora"], [torch.float32, torch.bfloat16]),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_each_expert_begins_as_pefts_linear_layer(case, begin, dtype):
    model = case.make().to(dtype)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    before = {
        (module, name): matrices(module, name) for module in experts for name in ("gate_up_proj", "down_proj")
    }
    found = wrappers(begun(model, begin))
    assert len(found) == len(before)
    for wrapper in found:
        module = wrapper.get_base_layer()
        given, left = factors(wrapper), matrices(module, wrapper.parameter_name)
        for expert, matrix in enumerate(before[module, wrapper.parameter_name]):
            linear = nn.Linear(*reversed(matrix.shape), bias=False)
            linear.weight = nn.Parameter(matrix)
            config = LoraConfig(r=2, lora_alpha=6, init_lora_weights=begin)
            peft = Linear(linear, "default", config=config, r=2, lora_alpha=6)
            # The same function on the same numbers.
            assert torch.equal(given[0][expert], peft.lora_A["default"].weight.float())
            assert torch.equal(given[1][expert], peft.lora_B["default"].weight.float())
            assert torch.equal(left[expert], linear.weight)


@pytest.mark.parametrize(
    ("begin", "case"),
    in_turn(["pissa", "pissa_niter_3", "olora", "orthogonal", "gaussian", True], [*CASES, MULTIMODAL]),
    ids=lambda value: getattr(value, "name", value),
)
def test_at_the_start_nothing_is_changed(case, begin, tmp_path):
    model, inputs = case.make(), case.inputs()
    expected = run(model, **inputs)
    before = {name: p.clone() for name, p in model.named_parameters()}
    adapted = begun(model, begin)
    is_changed = [
        name
        for name, p in adapted.get_base_model().named_parameters()
        if ".lora_" not in name and not torch.equal(p, before[name.replace(".base_layer", "")])
    ]
    assert bool(is_changed) == (str(begin)[:5] in ("pissa", "olora"))
    # Sums in another order.
    assert max_abs(run(adapted, **inputs), expected) < 3e-5
    assert max_abs(run(adapted.merge_and_unload(), **inputs), expected) < 3e-5


@for_cases
def test_factors_that_are_drawn(case):
    """As for a linear layer of an expert's sizes, not of the stack's."""
    for wrapper in wrappers(begun(case.make(), False)):
        a, b = factors(wrapper)
        # nn.Linear draws uniformly up to one over the root of its inputs.
        assert 0.9 < a.abs().max() * wrapper.in_features**0.5 <= 1
        assert 0.9 < b.abs().max() * 2**0.5 <= 1
    for wrapper in wrappers(begun(case.make(), "orthogonal")):
        a, b = factors(wrapper)
        assert a.abs().amin((1, 2)).min() > 0 and max_abs(b @ a, torch.zeros(())) < 1e-6
        assert max_abs(a[0], a[1]) > 0.01


@pytest.mark.parametrize(
    ("case", "begin"), in_turn(CASES, ["pissa", "olora"]), ids=lambda value: getattr(value, "name", value)
)
def test_trained_saved_converted_and_loaded(case, begin, tmp_path):
    """As peft writes it, with the base changed again, and as plain LoRA of twice the rank."""
    inputs = case.inputs()
    adapted = begun(case.make(), begin, rank_pattern={"experts.down_proj": 3})
    adapted.save_pretrained(tmp_path / "start")
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    expected = run(adapted, **inputs)
    assert max_abs(expected, run(case.make(), **inputs)) > 0.05
    adapted.save_pretrained(tmp_path / "as_it_is")
    adapted.save_pretrained(
        tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    plain = PeftModel.from_pretrained(case.make(), tmp_path / "plain")
    assert plain.peft_config["default"].init_lora_weights is True and plain.peft_config["default"].r == 4
    assert max_abs(run(plain, **inputs), expected) < 3e-5
    assert (
        max_abs(run(PeftModel.from_pretrained(case.make(), tmp_path / "as_it_is"), **inputs), expected) < 3e-5
    )
    model = case.make()
    model.load_adapter(tmp_path / "plain")
    assert max_abs(run(model, **inputs), expected) < 3e-5


@pytest.mark.parametrize(
    ("begin", "options"),
    [
        ("corda", {}),
        ("eva", {"eva_config": EvaConfig()}),
        ("lora_ga", {"lora_ga_config": LoraGAConfig()}),
        ("mica", {}),
        ("unknown", {}),
    ],
)
def test_what_is_not_for_stacks_is_refused_before_a_layer_is_changed(begin, options):
    model = CASES[0].make()
    config = llamoe.lora_config(model, init_lora_weights=begin, **options)
    with pytest.raises(ValueError, match="init_lora_weights"):
        get_peft_model(model, config)
    assert not any(".lora_" in name for name, _ in model.named_parameters())
    if begin in ("eva", "lora_ga", "mica"):
        get_peft_model(model, llamoe.lora_config(model, experts=False, init_lora_weights=begin, **options))


def test_ranks_beyond_an_experts_own():
    with pytest.raises(ValueError, match="init_lora_weights"):
        begun(CASES[0].make(), "pissa", rank_pattern={"down_proj": 53})
