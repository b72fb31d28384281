"""Linear layers use kernels for few rows on a CPU, with `nn.Linear`'s numbers, but not under tracers or modes."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import MODELS, max_abs
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import llamoe
from llamoe.modeling.kernels import cpp_kernels, cpu, float32_blocks
from llamoe.modeling.layers import Linear

pytestmark = pytest.mark.skipif(
    cpp_kernels.library() is None or not cpu.SHORTCUTS_ARE_ON, reason="needs compiled kernels, and shortcuts"
)


@pytest.fixture
def taken(monkeypatch):
    """Record the shapes of the rows that the compiled kernel multiplies; matrices may have any size."""
    calls, multiply = [], cpp_kernels._multiply
    monkeypatch.setattr(cpu, "_MIN_WEIGHTS", 1)
    monkeypatch.setattr(cpu, "_MIN_INPUTS", 1)

    def count(library, x, matrix):
        calls.append(tuple(x.shape))
        return multiply(library, x, matrix)

    monkeypatch.setattr(cpp_kernels, "_multiply", count)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 1), (1, 2), (3, 1), (0,), (1, 0), (4,), (2, 3), (17,)])
@pytest.mark.parametrize(("num_out", "bias"), [(1, True), (17, False), (34, True), (65, False), (128, True)])
def test_equals_torchs_function(num_out, shape, bias, taken):
    layer, x = Linear(50, num_out, bias), torch.randn(*shape, 50)
    strided = x[..., None].expand(*shape, 50, 2)[..., 1]
    for given in (x, strided):
        out, expected = layer(given), F.linear(given, layer.weight, layer.bias)
        assert out.shape == expected.shape and (not out.numel() or max_abs(out, expected) < 1e-5)
    assert bool(taken) == (shape != (17,))


@torch.no_grad()
def test_transposed_and_sparse_weights(taken):
    layer, x = Linear(50, 34, bias=False), torch.randn(1, 50)
    expected = layer(x)
    layer.weight.data = layer.weight.data.T.contiguous().T
    assert max_abs(layer(x), expected) < 1e-5 and len(taken) == 2
    layer.weight = nn.Parameter(layer.weight.to_sparse_csr(), requires_grad=False)
    assert max_abs(layer(x), expected) < 1e-5 and len(taken) == 2


def test_gradients_autocast_and_other_dtypes_use_torchs_function(taken):
    layer, x = Linear(50, 34), torch.randn(1, 50)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        for dtype in (torch.float16, torch.float64):
            assert layer.to(dtype)(x.to(dtype)).dtype == dtype
    assert not taken


@torch.no_grad()
def test_compilers_see_one_operator_for_all_numbers_of_rows(taken):
    """Exporters and tracers see torch's operator."""
    layer, graphs = Linear(50, 34), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    rows = [torch.randn(n, 50) for n in (3, 40, 2)]
    assert all(max_abs(compiled(x), F.linear(x, layer.weight, layer.bias)) < 1e-5 for x in rows)
    assert len(graphs) == 1 and taken == [(3, 50), (2, 50)]
    assert [node for node in graphs[0].graph.nodes if "llamoe" in str(node.target)]
    for again in (
        torch.jit.trace(layer, rows[0], check_trace=False),
        torch.export.export(layer, (rows[0],), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module(),
    ):
        assert max_abs(again(rows[1]), layer(rows[1])) < 1e-5
    torch.library.opcheck(cpu._operator, (rows[0], layer.weight, layer.bias))


@torch.no_grad()
def test_dual_numbers_and_vmap(taken):
    layer, x, direction = Linear(256, 200), torch.randn(2, 1, 256), torch.randn(2, 1, 256)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    assert max_abs(tangent, F.linear(direction, layer.weight)) < 1e-5
    assert max_abs(torch.func.vmap(layer)(x), F.linear(x, layer.weight, layer.bias)) < 1e-5
    assert not taken


@torch.no_grad()
def test_dispatch_modes_see_torchs_operators(taken):
    """Such as modes that count operations, and modes with fake tensors."""
    layer, x = Linear(50, 34), torch.randn(1, 50)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 50 * 34
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(x)
    assert not taken


@torch.no_grad()
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_all_linear_layers_of_all_models_are_llamoes(case, taken):
    model = case.make()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert layers and all(type(module) is Linear for module in layers)


@torch.no_grad()
def test_models_decode_by_the_kernels_with_and_without_an_adapter(taken):
    model = next(case for case in MODELS if case.name == "LlamoeDenseForCausalLM").make()
    input_ids = torch.tensor([[5]])
    expected = model(input_ids).logits
    count = 7 * model.config.num_hidden_layers + 1
    assert len(taken) == count
    with torch.enable_grad():
        assert max_abs(expected, model(input_ids).logits) < 1e-5
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    # lora_B is zero in a new adapter.
    assert max_abs(adapted(input_ids).logits, expected) < 1e-5
    # Each layer but the head has two factors, whose products use the kernels, too.
    assert len(taken) == 2 * count + 2 * (count - 1)


@pytest.mark.parametrize("method", ["hqq", "gguf", None, "llamoe"])
@pytest.mark.parametrize("as_dict", [True, False])
def test_models_that_another_library_quantizes_have_torchs_layers(method, as_dict):
    """Their quantizers compare classes: they would silently leave a subclass of `nn.Linear` in 16 bits."""

    class Quantization(dict):
        def to_dict(self):
            return dict(self)

    case = copy.copy(next(case for case in MODELS if case.name == "LlamoeForConditionalGeneration"))
    config = case.make().config
    if method is not None:
        config.quantization_config = (dict if as_dict else Quantization)(quant_method=method)
    model = llamoe.LlamoeForConditionalGeneration(config)
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    assert kinds == {Linear if method in (None, "llamoe") else nn.Linear}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_input_first", [False, True])
@pytest.mark.parametrize(("rows", "is_taken"), [(1, False), (4, True), (37, True)])
def test_sixteen_bits_are_multiplied_in_float32_by_blocks(rows, is_taken, is_input_first, dtype, monkeypatch):
    """On a processor without instructions for 16 bits. Sums are rounded once, which torch's in float16 are not."""
    monkeypatch.setattr(float32_blocks, "rows_of_torch", lambda dtype: float32_blocks.DOT_PRODUCT_MAX_ROWS)
    # The last block is not full.
    monkeypatch.setattr(float32_blocks, "BLOCK_WEIGHTS", 70 * 9)
    weight, x = torch.randn(50, 70).to(dtype), torch.randn(rows, 70).to(dtype)
    weight = weight.T.contiguous().T if is_input_first else weight
    found = float32_blocks.in_float32(x, weight)
    # For few rows torch's product is fast only with output-first matrices.
    assert (found is not None) == (is_taken or is_input_first)
    if found is not None:
        expected = (x.double() @ weight.double().T).to(dtype)
        torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
