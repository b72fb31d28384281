"""CPU shortcuts: linear layers of few rows give `nn.Linear`'s numbers, and plain calls wherever somebody looks."""

import importlib.util

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import MODELS, max_abs
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from llamoe.modeling.kernels import apply_head as apply_to_few
from llamoe.modeling.kernels import cpp_kernels, cpu, float32_blocks
from llamoe.modeling.kernels.cpu import apply_gate
from llamoe.modeling.layers.feed_forward import activation
from llamoe.modeling.layers.normalization import L2Norm


@pytest.fixture
def in_parts(monkeypatch):
    """Counts how often the batched product is taken; on every processor, without compiled kernels, for all sizes."""
    if not cpu.SHORTCUTS_ARE_ON:
        pytest.skip("LLAMOE_CPU_SHORTCUTS=0: the batched product is never taken")
    calls = []
    monkeypatch.setattr(cpp_kernels, "_library", None)
    monkeypatch.setattr(cpu, "_BATCHES_ARE_FASTER", True)
    monkeypatch.setattr(cpu, "_MIN_WEIGHTS", 1)

    def count(x, *args, original=cpu._multiply_in_parts):
        calls.append(tuple(x.shape))
        return original(x, *args)

    monkeypatch.setattr(cpu, "_multiply_in_parts", count)
    return calls


def layer(num_in, num_out, bias=False, dtype=torch.float32):
    return nn.Linear(num_in, num_out, bias, dtype=dtype)


class Head(nn.Module):
    def __init__(self, num_in, num_out):
        super().__init__()
        self.linear = layer(num_in, num_out)

    def forward(self, x):
        return apply_to_few(self.linear, x)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 1), (1, 2), (3, 1), (0,), (1, 0), (4,), (2, 3)])
@pytest.mark.parametrize(("num_out", "bias"), [(1, True), (17, False), (34, True), (65, False), (128, True)])
def test_equals_the_plain_call(num_out, shape, bias, in_parts):
    plain = layer(50, num_out, bias)
    x = torch.randn(*shape, 50)
    strided = x[..., None].expand(*shape, 50, 2)[..., 1]
    for given in (x, strided):
        out = apply_to_few(plain, given)
        assert out.shape == (*shape, num_out)
        torch.testing.assert_close(out, plain(x), rtol=0, atol=1e-5)
    assert len(in_parts) == 2 * (0 < x.numel() <= 150)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_go_the_plain_way(dtype, in_parts):
    plain, x = layer(50, 34, dtype=dtype), torch.randn(1, 50, dtype=dtype)
    assert torch.equal(apply_to_few(plain, x), plain(x)) and not in_parts


def test_gradients_and_autocast_go_the_plain_way(in_parts):
    plain, x = layer(50, 34), torch.randn(1, 50)
    apply_to_few(plain, x).square().sum().backward()
    assert plain.weight.grad.abs().sum() > 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert apply_to_few(plain, x).dtype == torch.bfloat16
    assert not in_parts


@torch.no_grad()
def test_transposed_and_sparse_weights(in_parts):
    plain, x = layer(50, 34), torch.randn(1, 50)
    expected = plain(x)
    plain.weight.data = plain.weight.data.T.contiguous().T
    assert max_abs(apply_to_few(plain, x), expected) < 1e-5
    plain.weight = nn.Parameter(plain.weight.to_sparse_csr(), requires_grad=False)
    assert max_abs(apply_to_few(plain, x), expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("width", [49, 51, 75, 100])
def test_a_wrong_width_is_the_error_that_torch_knows(width, in_parts):
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        apply_to_few(layer(50, 34), torch.randn(1, width))


@torch.no_grad()
def test_hooks_and_replacements_are_called(in_parts):
    """As adapters, offloading and pruning use them."""
    plain, x, calls = layer(50, 34), torch.randn(1, 50), []
    handle = plain.register_forward_hook(lambda *_: calls.append("hook"))
    apply_to_few(plain, x)
    handle.remove()
    handle = plain.register_forward_pre_hook(lambda *_: calls.append("pre-hook"))
    apply_to_few(plain, x)
    handle.remove()
    plain.forward = lambda x: calls.append("forward") or x
    apply_to_few(plain, x)
    assert calls == ["hook", "pre-hook", "forward"] and not in_parts


@torch.no_grad()
def test_compilers_and_tracers_see_plain_layers(in_parts):
    head = Head(50, 34)
    one, three = torch.randn(1, 50), torch.randn(3, 50)
    expected = head(three)
    assert len(in_parts) == 1
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    traced, symbolic = torch.jit.trace(head, one, check_trace=False), torch.fx.symbolic_trace(head)
    for again in (compiled, traced, symbolic):
        assert max_abs(again(three), expected) < 1e-5
    assert len(in_parts) == 1


@torch.no_grad()
def test_models_decode_through_it_with_and_without_an_adapter(in_parts):
    model = next(case for case in MODELS if case.name == "LlamoeDenseForCausalLM").make()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(layers) == 7 * model.config.num_hidden_layers + 1
    input_ids = torch.tensor([[5]])
    expected = model(input_ids).logits
    assert len(in_parts) == len(layers)
    with torch.enable_grad():
        plainly = model(input_ids).logits
    assert max_abs(expected, plainly) < 1e-5
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert max_abs(adapted(input_ids).logits, expected) < 1e-5  # lora_B begins as zero


@torch.no_grad()
def test_dual_numbers_go_the_plain_way(in_parts):
    """Forward derivatives are there without gradients too, but not of every call that is taken for a CPU."""
    head, x, direction = Head(256, 200), torch.randn(2, 1, 256), torch.randn(2, 1, 256)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[0], direction[0])
        tangent = torch.autograd.forward_ad.unpack_dual(head(dual)).tangent
    assert not in_parts
    step = 1e-3 * direction[0]
    below, above = head(x[0] - step), head(x[0] + step)
    assert max_abs(tangent, (above - below) / 2e-3) < 1e-3  # of central differences in float32


@torch.no_grad()
def test_a_bias_that_is_no_parameter(in_parts):
    plain, x = layer(50, 34, bias=True), torch.randn(1, 50)
    for bias in (None, torch.randn(34)):
        del plain.bias
        if bias is None:
            plain.bias = None
        else:
            plain.register_buffer("bias", bias)
        assert max_abs(apply_to_few(plain, x), nn.functional.linear(x, plain.weight, bias)) < 1e-5
    assert len(in_parts) == 2


@torch.no_grad()
def test_who_looks_on_sees_the_plain_calls(in_parts):
    """Counters of operations, modes that stand for other devices, and hooks on all modules."""
    head, x, seen = Head(50, 34), torch.randn(1, 50), []
    with FlopCounterMode(display=False) as counter:
        head(x)
    assert counter.get_total_flops() == 2 * 50 * 34
    with FakeTensorMode(allow_non_fake_inputs=True):
        L2Norm()(x), head(x)
    assert type(L2Norm()(x)) is torch.Tensor
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    head(x)
    hook.remove()
    assert seen == [head.linear, head] and not in_parts


@pytest.mark.parametrize(
    ("processor", "setting", "is_faster", "is_on"),
    [("AMD EPYC 7763", "1", True, True), ("Intel Xeon 2.50GHz", "1", False, True), ("", "0", False, False)],
)
def test_the_processor_and_the_environment_decide(processor, setting, is_faster, is_on, monkeypatch):
    """MKL's plain product is slow on AMD's processors alone. Both are read at import, so of a module of its own."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": processor})
    monkeypatch.setenv("LLAMOE_CPU_SHORTCUTS", setting)
    spec = importlib.util.find_spec("llamoe.modeling.kernels.cpu")
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    with torch.no_grad():
        found = again._BATCHES_ARE_FASTER, again.can_use_shortcut(torch.ones(1))
    assert found == (is_faster and torch.backends.mkl.is_available(), is_on)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_multiplies_in_place_where_nobody_looks(dtype):
    """To the bit; what goes in stays, and a hook may keep what SiLU returns."""
    act_fn, kept = activation("silu"), []
    gate, up = torch.randn(2, 7, 2 * 5, dtype=dtype).unbind()
    gate, up = gate[:, ::2], up[:, ::2]
    before, expected = gate.clone(), nn.functional.silu(gate) * up
    with torch.no_grad():
        assert torch.equal(apply_gate(act_fn, gate, up), expected) and torch.equal(gate, before)
        act_fn.register_forward_hook(lambda module, args, output: kept.append(output))
        assert torch.equal(apply_gate(act_fn, gate, up), expected)
    assert torch.equal(kept[0], nn.functional.silu(gate))
    # An activation that returns its input.
    with torch.no_grad():
        assert torch.equal(apply_gate(activation("linear"), gate, up), gate * up)
    assert torch.equal(gate, before)


def test_a_gate_has_gradients():
    gate, up = torch.randn(2, 7, 5, dtype=torch.float64).unbind()
    inputs = [gate.requires_grad_(), up.requires_grad_()]
    assert torch.autograd.gradcheck(lambda gate, up: apply_gate(activation("silu"), gate, up), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_input_first", [False, True])
@pytest.mark.parametrize(("rows", "is_taken"), [(1, False), (4, True), (37, True)])
def test_sixteen_bits_go_through_float32_in_blocks(rows, is_taken, is_input_first, dtype, monkeypatch):
    """Where a processor has no instructions for them; sums are rounded once, unlike torch's own of float16."""
    monkeypatch.setattr(float32_blocks, "rows_of_torch", lambda dtype: float32_blocks.DOT_PRODUCT_MAX_ROWS)
    # No whole number of blocks.
    monkeypatch.setattr(float32_blocks, "BLOCK_WEIGHTS", 70 * 9)
    weight, x = torch.randn(50, 70).to(dtype), torch.randn(rows, 70).to(dtype)
    weight = weight.T.contiguous().T if is_input_first else weight
    found = float32_blocks.in_float32(x, weight)
    # Torch's dot products read output-first matrices alone.
    assert (found is not None) == (is_taken or is_input_first)
    if found is not None:
        expected = (x.double() @ weight.double().T).to(dtype)
        torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
