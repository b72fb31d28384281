"""What stands between a layer's products on a GPU, in Triton's interpreter; `test_under_the_interpreter` starts it.

Truth is transformers' and peft's own modules, and for experts float64.
"""

import contextlib
import logging
import os
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support import decoding, triton_interpreter  # noqa: F401
from support.decoding import STOCK, adapt
from support.few_bits import load, save
from support.models import max_abs, stock_text_config
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import llamoe
from llamoe.modeling.attention.layer import Attention, _scores_by_one_call
from llamoe.modeling.formats import Int4, Int8, gpu_kernels
from llamoe.modeling.kernels import decode, gate_rows, gpu_layer, gpu_layer_check, packed_rows
from llamoe.modeling.layers import FeedForward, L2Norm, RMSNorm, RotaryEmbedding, rotary_tables
from llamoe.modeling.moe import Experts, LowRank, dispatch, few_rows
from llamoe.modeling.moe import experts as moe_experts
from llamoe.modeling.quantization import QuantizedLinear

assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels would need a GPU"

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def launched(monkeypatch):
    """The CPU as a GPU; names of the kernels that are launched, those of checks among them."""
    names = []

    def launch(name, *args, original=gpu_layer.launch, **kwargs):
        names.append(name)
        original(name, *args, **kwargs)

    monkeypatch.setattr(gpu_layer, "launch", launch)
    monkeypatch.setattr(gpu_layer, "is_on_gpu", lambda x: x.device.type == "cpu")
    monkeypatch.setattr(gpu_layer_check, "_FAILURES", {})
    monkeypatch.setattr(decode, "can_use_shortcut", lambda x: False)
    for module in (gpu_kernels, dispatch):
        monkeypatch.setattr(module, "may_have_gpu_kernel", lambda device: True)
    monkeypatch.setattr(dispatch, "_is_on_host", lambda weight: weight.is_meta)
    monkeypatch.setattr(moe_experts, "has_gpu", lambda: True)
    # Products have tests of their own.
    for module in (gpu_kernels, dispatch):
        monkeypatch.setattr(module, "kernels_are_right", lambda *_, **__: True)
    return names


def spacing(x):
    """Distance between a dtype's neighbours of these numbers, at most."""
    return torch.finfo(x.dtype).eps * x.abs().float()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("size", [52, 1000, 4500])
@torch.no_grad()
def test_norm(launched, dtype, size):
    """Transformers' own to the last bit but where the order of a sum decides it."""
    norm, stock = RMSNorm(size, 3e-3).to(dtype), LlamaRMSNorm(size, 3e-3).to(dtype)
    stock.weight.normal_()
    norm.load_state_dict(stock.state_dict())
    x = torch.randn(2, 3, size).mul(torch.linspace(0.01, 3, 6).view(2, 3, 1)).to(dtype)
    found, expected = norm(x), stock(x)
    assert set(launched) == {"rms_norm_kernel"} and found.dtype == dtype
    assert ((found - expected).abs().float() <= spacing(expected)).all()
    assert (found == expected).float().mean() > 0.99
    launched.clear()
    assert torch.equal(norm(x.expand(11, 2, 3, size)), found.expand(11, 2, 3, size)) and len(launched) == 1
    # Strided rows.
    assert torch.equal(norm(x.transpose(0, 1)), found.transpose(0, 1)) and len(launched) == 2
    norm.weight = nn.Parameter(torch.stack((norm.weight, -norm.weight), 1)[:, 0])
    assert torch.equal(norm(x), found) and len(launched) == 2
    with pytest.raises(RuntimeError, match="must match the size"):
        RMSNorm(size + 1).to(dtype)(x)


@torch.no_grad()
def test_exported_programs_serve_all_lengths(launched):
    """Sizes are not compared while something records: a program would hold for few rows alone."""
    layers = nn.Sequential(RMSNorm(52), FeedForward(52, 36, "silu")).to(BF16)
    shapes = {0: torch.export.Dim("length", min=2, max=99)}
    given = (torch.randn(5, 52).to(BF16),)
    program = torch.export.export(layers, given, dynamic_shapes=(shapes,), strict=True).module()
    x = torch.randn(90, 52).to(BF16)
    assert launched == []
    with without_kernels():
        assert torch.equal(program(x), layers(x))


@contextlib.contextmanager
def without_kernels():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_layer, "is_on_gpu", lambda x: False)
        for module in (gpu_kernels, dispatch):
            patched.setattr(module, "may_have_gpu_kernel", lambda device: False)
        yield


@torch.no_grad()
def token_of(model):
    """Logits of two rows, one token each, behind a prompt that modules compute, since the interpreter is slow."""
    tokens = torch.randint(3, 101, (2, 19), generator=torch.Generator().manual_seed(5))
    with without_kernels():
        cache = model(tokens[:, :18], use_cache=True).past_key_values
    return model(tokens[:, 18:], past_key_values=cache).logits


@pytest.mark.parametrize("make", STOCK, ids=lambda make: make.__name__)
def test_tokens_are_those_of_stock_and_peft(launched, make, tmp_path):
    """Of Llama 4 with norms of heads, and a temperature that has grown."""
    fields, rank = dict(num_hidden_layers=2), dict(r=3, lora_alpha=9)
    if make is decoding.dense:
        # peft has none for stacks.
        rank.update(r=16, use_rslora=True, lora_dropout=0.2)
    if make is decoding.text:
        fields.update(floor_scale=3, attn_scale=0.3, no_rope_layers=[1, 0])
    ours = make(**fields)
    stock = STOCK[make](STOCK[make].config_class(**llamoe.to_stock(ours.config))).eval()
    stock.load_state_dict(ours.state_dict())
    trained = adapt(stock, **rank)
    trained.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(ours, tmp_path)
    expected = token_of(trained)
    launched.clear()
    found = token_of(loaded)
    assert set(launched) == {"thin_kernel", "update_kernel", "gate_kernel", "rotate_kernel"}
    # Sums in another order.
    assert max_abs(found, expected) < 5e-5


@pytest.mark.parametrize(("weights", "is_adapted"), [("int4", True), ("bfloat16", True), ("bfloat16", False)])
def test_sixteen_and_fewer_bits(launched, weights, is_adapted):
    """As near to what modules give as these are to float32."""
    sizes = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_hidden_layers=2)
    model = decoding.text(**sizes).bfloat16()
    if weights == "int4":
        model = load(save(model), weights)
    if is_adapted:
        model = adapt(model, r=4)
    with without_kernels():
        expected = token_of(model)
    launched.clear()
    found = token_of(model)
    wanted = {"rms_norm_kernel", "rotate_kernel", "gate_kernel"}
    assert set(launched) == wanted | ({"thin_kernel", "update_kernel"} if is_adapted else set())
    assert max_abs(found, expected) < 0.05 * expected.float().std()


@pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    ("rows", "use_rope", "has_norm", "is_tuned"),
    [
        ((1, 1), True, False, False),
        ((2, 3), True, True, False),
        ((3, 1), False, False, True),
        ((2, 5), False, True, True),
        ((1, 37), True, True, True),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@torch.no_grad()
def test_queries_and_keys(launched, rows, use_rope, has_norm, is_tuned, is_interleaved, dtype):
    """Each position by its own angle and temperature, whatever heads there are; positions of all rows, or of each."""
    config = decoding.text(
        num_hidden_layers=1, floor_scale=3, attn_scale=0.7, rope_interleave=is_interleaved
    ).config
    attention = Attention(config, 0)
    attention.use_rope, attention.use_temperature_tuning = use_rope, is_tuned
    attention.qk_norm = L2Norm(0.1) if has_norm else None
    batch, length = rows
    query, key = (torch.randn(batch, length, heads, 80).to(dtype) for heads in (6, 3))
    for shared in (True, False):
        positions = torch.randint(50, (1 if shared else batch, length))
        tables = rotary_tables(*RotaryEmbedding(config)(query, positions), is_interleaved)
        given = query, key, tables, positions
        with without_kernels():
            expected = attention._turn(*given)
        launched.clear()
        found = attention._turn(*given)
        assert set(launched) == {"rotate_kernel"}
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == dtype and one.shape == other.shape
            # Float32 in another order may round to the neighbour.
            allowed = 2 * spacing(other) + 4e-7 * (dtype == FP32)
            assert ((one - other).abs().float() <= allowed).all()
            assert (one == other).float().mean() > 0.98 or dtype == FP32


@torch.no_grad()
def test_other_norms_of_heads_are_called(launched):
    """One with a weight, or of a subclass; where there is nothing to do, nothing is launched."""

    class Doubled(L2Norm):
        def forward(self, x):
            return super().forward(x) * 2

    config = decoding.text(num_hidden_layers=1, floor_scale=3).config
    attention, positions = Attention(config, 0), torch.arange(3)[None]
    query, key = torch.randn(1, 3, 6, 80), torch.randn(1, 3, 3, 80)
    tables = rotary_tables(*RotaryEmbedding(config)(query, positions), config.rope_interleave)
    norm = RMSNorm(80)
    norm.weight.normal_()
    for attention.qk_norm in (norm, Doubled()):
        given = query, key, tables, positions
        with without_kernels():
            expected = attention._turn(*given)
        assert all(map(torch.equal, attention._turn(*given), expected)) and launched == []
    attention.qk_norm, attention.use_rope, attention.use_temperature_tuning = None, False, False
    assert attention._turn(query, key, tables, positions) == (query, key) and launched == []


class Layers(nn.Module):
    """Three layers that are given the same rows, one with a bias."""

    def __init__(self, sizes=(75, 40, 91), num_in=52):
        super().__init__()
        for name, size in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True):
            self.add_module(name, nn.Linear(num_in, size, bias=name == "k_proj"))

    def forward(self, x):
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]


def adapted_layers(layers, dtype=FP32, name="default", **fields):
    """Layers with an adapter of some of them; peft's factors are float32 beside 16 bits."""
    fields = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], **fields}
    adapted = get_peft_model(layers.to(dtype), LoraConfig(**fields), name)
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            parameter.data.normal_().mul_(0.2)
    return adapted.eval()


@torch.no_grad()
def compare(layers, x, launched, wanted, tolerance):
    """`apply_linears` against peft's modules; the kernels that were launched, without those of checks."""
    linears = [layers.base_model.model.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj")]
    expected = [linear(x) for linear in linears]
    gpu_layer.apply_linears(linears, x)
    launched.clear()
    found = gpu_layer.apply_linears(linears, x)
    assert launched == wanted
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert max_abs(one, other) <= tolerance * other.float().abs().max()


@pytest.mark.parametrize(
    ("rows", "dtype", "tolerance"),
    [((1, 2), BF16, 2**-7), ((2, 3), FP16, 2**-10), ((9,), FP32, 1e-6)],
    ids=str,
)
def test_adapted_layers_are_pefts(launched, rows, dtype, tolerance):
    """One launch for the first factors of all layers, and one for each second; other layers are called."""
    x = torch.randn(*rows, 52).to(dtype)
    two = ["thin_kernel", "update_kernel", "update_kernel"]
    compare(adapted_layers(Layers(), dtype), x, launched, two, tolerance)
    every = dict(r=7, rank_pattern={"k_proj": 1, "v_proj": 20}, use_rslora=True)
    layers = adapted_layers(Layers(), dtype, target_modules=["q_proj", "k_proj", "v_proj"], **every)
    compare(layers, x, launched, [*two, "update_kernel"], tolerance)
    for parameter in layers.parameters():
        parameter.data = parameter.data.to(dtype)
    # Peft rounds both of an adapter's products, and their scaled result.
    compare(layers, x, launched, [*two, "update_kernel"], 3 * tolerance)


def test_what_the_kernels_do_not_add_is_called(launched):
    """Several adapters, variants, high ranks, more rows, gradients, autocast, and what is watched."""
    x = torch.randn(2, 52)
    one = ["thin_kernel", "update_kernel"]
    layers = adapted_layers(Layers())
    compare(layers, torch.randn(33, 52), launched, [], 0)
    layers.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    layers.base_model.set_adapter(["default", "other"])
    compare(layers, x, launched, one, 1e-6)
    with layers.disable_adapter():
        compare(layers, x, launched, [], 0)
    layers.base_model.set_adapter("default")
    compare(layers, x, launched, [*one, "update_kernel"], 1e-6)
    layers.base_model.model.v_proj.lora_A.register_forward_hook(lambda *_: None)
    compare(layers, x, launched, one, 1e-6)
    layers.merge_adapter()
    compare(layers, x, launched, [], 0)
    compare(adapted_layers(Layers(), r=300), x, launched, [], 0)
    compare(adapted_layers(Layers(), use_dora=True), x, launched, [], 0)
    layers = adapted_layers(Layers(), lora_dropout=0.5)
    compare(layers, x, launched, [*one, "update_kernel"], 1e-6)
    layers.base_model.model.q_proj.lora_A.to(BF16)
    layers.base_model.model.q_proj.lora_B.to(BF16)
    compare(layers, x, launched, [], 0)
    layers.base_model.model.q_proj.to(FP32)
    layers.base_model.model.v_proj.train()
    linears = [layers.base_model.model.get_submodule(name) for name in ("q_proj", "v_proj")]
    launched.clear()
    with torch.no_grad():
        gpu_layer.apply_linears(linears, x)
    assert launched == one
    launched.clear()
    gpu_layer.apply_linears(linears, x)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        gpu_layer.apply_linears(linears, x)
    with torch.no_grad(), BaseTorchFunctionMode():
        # A mode sees torch's calls.
        gpu_layer.apply_linears(linears, x)
    assert launched == []
    with torch.no_grad(), torch.device("cpu"):
        # One of a default device changes nothing here.
        gpu_layer.apply_linears(linears, x)
    assert launched == one


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("is_adapted", [True, False], ids=["adapted", "plain"])
@torch.no_grad()
def test_splits_of_packed_layers_are_summed_with_the_update(launched, weights, is_adapted, monkeypatch):
    monkeypatch.setattr(packed_rows, "_multiprocessors", lambda _: 5000)
    form = {"int4": Int4(32), "int8": Int8()}[weights]
    gate, up = (QuantizedLinear(nn.Linear(2080, 80, bias=False, device="meta"), form) for _ in range(2))
    layers = nn.ModuleDict({"gate": gate, "up": up})
    for layer in (gate, up):
        for name, part in layer.quantize(torch.randn(80, 2080) / 45).items():
            setattr(layer, name, nn.Parameter(part, False) if name == "weight" else part)
    if is_adapted:
        adapted_layers(layers, None, target_modules=["gate", "up"])
        gate, up = layers.gate, layers.up
    x, silu = torch.randn(3, 2080).to(BF16), ACT2FN["silu"]
    seen = []
    monkeypatch.setattr(gpu_layer, "gate_rows", lambda *args: seen.extend(args[:2]) or gate_rows(*args))
    with without_kernels():
        expected = [*gpu_layer.apply_linears((gate, up), x), gpu_layer.apply_gated(gate, up, silu, x)]
    found = [*gpu_layer.apply_linears((gate, up), x), gpu_layer.apply_gated(gate, up, silu, x)]
    assert len(seen) == 2 and all(len(each.parts) > 3 and each.parts.dtype == FP32 for each in seen)
    for one, other in zip(found, expected, strict=True):
        # Two roundings of results, and one of each weight.
        assert one.dtype == BF16 and max_abs(one, other) <= 2**-6 * other.float().abs().max()


@pytest.mark.parametrize("act", ["silu", "gelu"])
@torch.no_grad()
def test_experts_with_adapters(launched, act):
    """Against float64; rows without an expert, and an expert that several rows have."""
    num_experts, hidden, size, rank = 5, 52, 36, 3
    experts = Experts(llamoe.from_stock(stock_text_config(hidden_act=act)))
    experts.num_experts = num_experts
    experts.gate_up_proj = nn.Parameter(torch.randn(num_experts, hidden, 2 * size) / 7)
    experts.down_proj = nn.Parameter(torch.randn(num_experts, size, hidden) / 6)
    ids = torch.tensor([4, 0, -1, 4, 7, 2, 4])
    x = torch.randn(7, hidden)
    x[[2, 4]] = torch.nan
    updates, merged = {}, {}
    for name, scale in (("gate_up_proj", 0.7), ("down_proj", -1.3)):
        stack = getattr(experts, name)
        a, b = torch.randn(num_experts, rank, stack.shape[1]), torch.randn(stack.shape[2], rank, num_experts)
        updates[name] = [LowRank(a.transpose(1, 2), b, scale, nn.Identity(), {})]
        merged[name] = stack.double() + scale * torch.einsum("eri,ore->eio", a.double(), b.double())
    found = few_rows.products_of_few_rows(experts, x, ids, updates)
    if act != "silu":
        assert found is None
        return
    assert set(launched) == {"thin_kernel", "gate_kernel", "update_kernel"}
    for row, expert in enumerate(ids.tolist()):
        if not 0 <= expert < num_experts:
            assert not found[row].any()
            continue
        gate, up = (x[row].double() @ merged["gate_up_proj"][expert]).chunk(2)
        expected = (gate * gate.sigmoid() * up) @ merged["down_proj"][expert]
        assert max_abs(found[row], expected) < 2e-5 * expected.abs().max()


def test_they_can_be_turned_off(launched, monkeypatch):
    norm, x = RMSNorm(52).to(BF16), torch.randn(3, 52).to(BF16)
    with torch.no_grad():
        for is_on in (True, False):
            monkeypatch.setattr(gpu_layer, "GPU_SHORTCUTS_ARE_ON", is_on)
            gpu_layer._serves.cache_clear()
            norm(x)
            assert bool(launched) == is_on
            launched.clear()
    gpu_layer._serves.cache_clear()


@pytest.mark.parametrize("fault", ["wrong", "raises"])
@torch.no_grad()
def test_a_kernel_that_is_wrong_is_not_used(launched, fault, monkeypatch, caplog):
    """It is said once, with numbers; modules take its place, and nothing of theirs changes."""
    norm, x = RMSNorm(52).to(BF16), torch.randn(3, 52).to(BF16)
    layers = adapted_layers(Layers())
    expected = norm(x)

    def launch(name, grid, *tensors, original=gpu_layer.launch, **constants):
        if fault == "raises":
            raise RuntimeError("ptxas fatal\nand more")
        original(name, grid, *tensors, **constants)
        written = tensors[{"rms_norm_kernel": 2, "thin_kernel": 5}[name]]
        written.view(-1)[-1] += 0.3

    monkeypatch.setattr(gpu_layer, "launch", launch)
    gpu_layer_check._FAILURES.clear()
    state = torch.random.get_rng_state()
    for _ in range(2):
        assert max_abs(norm(x), expected) <= 2**-7 * expected.float().abs().max()
        compare(layers, torch.randn(2, 52), launched, [], 0)
    assert len(gpu_layer_check._FAILURES) == 2 and all(gpu_layer_check._FAILURES.values())
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2 and all("does not use its kernel" in each for each in told)
    assert "ptxas fatal." in told[0] if fault == "raises" else "1 of 156 numbers are wrong" in told[0]
    assert not torch.equal(torch.random.get_rng_state(), state)


@torch.no_grad()
def test_what_is_watched_is_called_once(launched, monkeypatch):
    """Also where the kernel that gates is wrong."""
    layers = adapted_layers(Layers((40, 40, 40)), target_modules=["q_proj"])
    gate, up = layers.base_model.model.q_proj, layers.base_model.model.k_proj
    calls, silu, x = [], ACT2FN["silu"], torch.randn(2, 52)
    up.register_forward_hook(lambda *_: calls.append(up))
    monkeypatch.setattr(gpu_layer, "gate_rows", lambda *_: None)
    found = gpu_layer.apply_gated(gate, up, silu, x)
    assert len(calls) == 1 and max_abs(found, silu(gate(x)) * up(x)) < 1e-5


@torch.no_grad()
def test_numbers_that_change_little_are_checked(launched, monkeypatch):
    """An eps of few bits, and the temperature of positions that it begins behind."""
    monkeypatch.setattr(
        gpu_layer,
        "launch",
        lambda *args, launch=gpu_layer.launch, **constants: launch(
            *[2 * each if isinstance(each, float) else each for each in args], **constants
        ),
    )
    turn = gpu_layer.Turn(temperature=(torch.arange(3)[None], 8192, 0.1))
    query, key = torch.randn(1, 3, 2, 20).to(BF16), torch.randn(1, 3, 1, 20).to(BF16)
    assert gpu_layer.turn_on_gpu(query, key, turn) is None
    assert gpu_layer.rms_norm_on_gpu(query, torch.ones(20, dtype=BF16), 1e-5) is None
    assert len(gpu_layer_check.failures()) == 2


@torch.no_grad()
def test_large_scales_are_no_fault(launched):
    """Random factors leave float16 under one, which says nothing of the kernel."""
    one, other = (
        gpu_layer.Rows(torch.randn(1, 3, 200).half(), torch.randn(3, 5), torch.randn(1, 200, 5), 256.0)
        for _ in range(2)
    )
    assert gate_rows(one, other, FP16) is not None and gpu_layer_check.failures() == []


def test_nothing_is_checked_during_a_capture(launched, monkeypatch):
    """Only of a CUDA device is that asked: what was checked before serves."""
    kind, given = (
        ("norm", BF16, 52),
        (torch.randn(3, 52, device="meta"), torch.randn(52, device="meta"), 1e-5),
    )
    card = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    rows = gpu_layer.Rows(card)
    assert not gpu_layer_check.is_right(kind, None, rows, *given[1:])
    gpu_layer_check._FAILURES[*kind, card.device] = ""
    assert gpu_layer_check.is_right(kind, None, rows, *given[1:])


@pytest.mark.parametrize(("mask_size", "groups"), [(None, 3), (1, 1), (2, 4)])
def test_scores_by_one_call(mask_size, groups, monkeypatch):
    """Against the formula, with and without a mask of each row."""
    query, key = torch.randn(2, 3, groups, 20), torch.randn(2, 3, 11, 20)
    mask = None if mask_size is None else torch.randn(mask_size, 1, 1, 11)
    expected = query @ key.transpose(2, 3) * 0.3 + (0 if mask is None else mask)
    assert max_abs(_scores_by_one_call(query, key, mask, 0.3), expected) < 1e-6
    # As inductor computes it on a GPU, a factor of zero included.
    monkeypatch.setattr(torch, "baddbmm", lambda c, a, b, beta, alpha: beta * c + alpha * (a @ b))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *size: x.new_full(size, torch.nan), raising=False
    )
    assert max_abs(_scores_by_one_call(query, key, mask, 0.3), expected) < 1e-6
