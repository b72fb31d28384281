"""On a processor without instructions for 16 bits all products are in float32, in inference and in training."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import MODELS, shallow
from torch import nn
from torch.profiler import ProfilerActivity, profile

import llamoe
from llamoe.modeling.kernels import cpu, float32_blocks
from llamoe.modeling.layers import Linear

pytestmark = pytest.mark.skipif(not cpu.SHORTCUTS_ARE_ON, reason="LLAMOE_CPU_SHORTCUTS=0")
# Relative error of a result that is rounded to bfloat16 once.
ROUNDED_ONCE = 2**-8
# Torch's basic products; others call these.
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"}
PRODUCTS |= {f"aten::_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")}


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch):
    for module in (float32_blocks, cpu):
        monkeypatch.setattr(module, "rows_of_torch", {torch.bfloat16: 3, torch.float16: 3}.get)
    # The last block is not full.
    monkeypatch.setattr(float32_blocks, "BLOCK_WEIGHTS", 70 * 9)


def products_of_16_bits(work):
    """Return the products that torch computes in 16 bits while `work` runs."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()
    names = {event.name() for event in events}
    assert names & PRODUCTS, "nothing was multiplied"
    slow = [e for e in events if e.name() in PRODUCTS and {"c10::BFloat16", "c10::Half"} & {*e.dtypes()}]
    return [(event.name(), event.shapes()) for event in slow]


def errors(found, expected):
    return [
        ((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 17), (1,), (0,), (5, 1)])
def test_outputs_and_gradients_of_a_layer(shape, dtype):
    layer = Linear(70, 50).to(dtype)
    exact = nn.Linear(70, 50).double()
    exact.load_state_dict(layer.state_dict())
    x, grad = torch.randn(*shape, 70).to(dtype), torch.randn(*shape, 50).to(dtype)
    results = []
    for linear in (layer, exact):
        rows = x.detach().to(linear.weight.dtype, copy=True).requires_grad_()
        y = linear(rows)
        y.backward(grad.to(y.dtype))
        results.append([y, rows.grad, linear.weight.grad, linear.bias.grad])
    assert [tensor.dtype for tensor in results[0]] == 4 * [dtype]
    if x.numel():
        # The output is rounded before and after its bias is added.
        assert max(errors(*results)) < 2 * ROUNDED_ONCE


def test_second_gradients():
    x, weight = torch.randn(7, 70).bfloat16(), torch.randn(50, 70).bfloat16()
    found = []
    for dtype, multiply in (
        (torch.bfloat16, float32_blocks.product_of_16_bits),
        (torch.float64, nn.functional.linear),
    ):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]
        first = torch.autograd.grad(multiply(*inputs).pow(2).sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(gradient.pow(2).sum() for gradient in first), inputs))
    # Three products follow each other, each rounded.
    assert max(errors(*found)) < 4 * ROUNDED_ONCE


def train(model, inputs, is_cast):
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        outputs = model(**inputs)
    found = outputs.loss if "loss" in outputs else outputs[0]
    found.float().square().mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "LoRA", "autocast"])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_no_model_is_trained_by_products_of_16_bits(case, how):
    case = shallow(case)
    model, inputs = case.make().train(), case.inputs()
    if how != "autocast":
        model.bfloat16()
        inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
    if case.is_head:
        inputs["labels"] = inputs["input_ids"]
    if how == "LoRA":
        experts = case.has_experts and ["gate_up_proj", "down_proj"]
        config = llamoe.lora_config(model, r=3) if experts else LoraConfig(r=3, target_modules="all-linear")
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    assert not products_of_16_bits(lambda: train(model, inputs, is_cast=how == "autocast"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and any(it.grad is not None and it.grad.abs().sum() > 0 for it in trained)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", [MODELS[1], MODELS[-1]], ids=lambda case: case.name)
def test_prefill_with_adapters_and_autocast(case, implementation):
    case = shallow(case)
    model = case.make().eval()
    model.set_attn_implementation(implementation)
    model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    inputs = case.inputs()
    with torch.no_grad():
        expected = model(**inputs).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert not products_of_16_bits(lambda: model(**inputs))
            found = [model(**inputs).logits]
        model.bfloat16()
        assert not products_of_16_bits(lambda: model(**inputs))
        found.append(model(**inputs).logits)
    for logits in found:
        # Two layers are in bfloat16, and some tokens of a mixture choose other experts.
        assert (logits - expected).norm(dim=-1).median() < 0.1 * expected.norm(dim=-1).median()


@pytest.mark.slow
def test_compiled_training():
    layer = Linear(70, 50).bfloat16()
    compiled = torch.compile(lambda x: layer(x), fullgraph=True)
    results = []
    for call in (compiled, layer):
        x = torch.randn(20, 70, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        call(x).float().square().sum().backward()
        results.append([x.grad.double(), layer.weight.grad.double()])
        layer.weight.grad = None
    assert max(errors(*results)) < 1e-6


def test_exports_have_torchs_operators():
    layer = Linear(70, 50).bfloat16()
    program = torch.export.export(layer, (torch.randn(20, 70).bfloat16(),))
    assert not [node for node in program.graph.nodes if "llamoe" in str(node.target)]
