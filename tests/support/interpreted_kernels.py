"""The Triton kernels run by Triton's interpreter: their products, experts by them, the check before their first use.

`test_packed_rows` starts this in a process of its own, as Triton reads TRITON_INTERPRET when it is imported.
Truth is float64: of int4 the layout written out here.
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from support.mixtures import by_hand, forced, make_experts, make_rows
from support.models import MODELS, max_abs
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig
from triton.runtime import interpreter

from llamoe.modeling.formats import Bnb, Int4, Int8, Plain, format, has_gpu_kernel
from llamoe.modeling.kernels import packed_product, packed_rows, packed_rows_triton
from llamoe.modeling.moe import ExpertsLora, LowRank, check_kernels, products
from llamoe.modeling.moe import experts as moe_experts
from llamoe.modeling.moe.products import plain_stack
from llamoe.modeling.quantization import QuantizedExperts, QuantizedLinear

assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels would need a GPU"

# Triton 3.6 keeps scalars as arrays with one element, and asks `int` for the bounds of loops; numpy 2.4 refuses that.
patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_too(tensor, scope):
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.squeeze(self.handle.data)))


vars(interpreter)["_patch_lang_tensor"] = patch_tensor_too

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Outputs that are whole blocks of 64 and a rest of 16, 32 or 48; inputs that are some groups, of int4 with padding.
FORMATS = {
    "int4, 32": (Int4(32), (80, 152)),
    "int4, 64": (Int4(64), (112, 190)),
    "int4, 128": (Int4(128), (96, 256)),
    "int4, 256": (Int4(256), (128, 512)),
    "int8": (Int8(), (75, 96)),
    "plain": (Plain(BF16), (75, 51)),
    "plain, input-first": (Plain(FP32, True), (9, 52)),
    "plain in float32": (Plain(FP32), (75, 300)),
    "plain in float16, input-first": (Plain(FP16, True), (131, 67)),
}
PACKED = {"int4": Int4(32), "int8": Int8()}
# Sizes of experts.
SIZES = dict(hidden_size=40, intermediate_size=24)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Clear the results of kernel checks."""
    monkeypatch.setattr(packed_rows, "_FAILURES", {})


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The CPU as a device that takes kernels, for up to 64 rows; checks try two tiles, as the interpreter is slow."""
    for module in (format, moe_experts):
        monkeypatch.setattr(module, "may_have_gpu_kernel", lambda device: device.type != "meta")
    monkeypatch.setattr(moe_experts, "few_rows_limit", lambda device: 64)
    monkeypatch.setattr(packed_rows, "TILES", (16, 32))


@pytest.fixture
def nobody_counts(monkeypatch):
    """The host may not ask for the rows of each expert."""

    def refuse(*_):
        raise AssertionError("the host counted rows")

    monkeypatch.setattr(products, "groups_between", refuse)


@pytest.fixture
def launches(monkeypatch):
    """Numbers of rows for which kernels were launched."""
    counted = []
    product = packed_rows.packed_product

    def run(x_NC, *args, **kwargs):
        counted.append(len(x_NC))
        return product(x_NC, *args, **kwargs)

    for module in (packed_rows, products, format):
        monkeypatch.setattr(module, "packed_product", run)
    return counted


# Products


def draw_stack(form, sizes, num_experts):
    """The parts of random matrices, each output of another size."""
    num_out, num_in = sizes
    spread = torch.linspace(0.5, 2, num_out)[:, None] / num_in**0.5
    matrices = torch.randn(num_experts, num_out, num_in) * spread + 0.02
    each = [form.quantize(matrix.contiguous()) for matrix in matrices]
    return [torch.stack(part) for part in zip(*each, strict=True)]


def truth_of(form, parts, sizes):
    """The matrix in float64."""
    if isinstance(form, Int4):
        return decode_int4(*parts, form.group_size)[:, : sizes[1]]
    return form.matrix(parts, sizes, FP32).double()


def decode_int4(codes, scales, group_size):
    """Byte by byte, as the layout is described."""
    num_out, num_in = codes.shape[0], codes.shape[1] * 2
    matrix = torch.empty(num_out, num_in, dtype=torch.float64)
    for begin in range(0, num_out, 64):
        size = min(64, num_out - begin)
        bytes_ = codes.reshape(-1)[begin * num_in // 2 :][: size * num_in // 2].view(num_in, size // 2)
        for low in range(size // 2):
            outputs = (low, 32 + low) if size == 64 else (2 * low, 2 * low + 1)
            for output, code in zip(outputs, (bytes_[:, low] % 16, bytes_[:, low] // 16), strict=True):
                matrix[begin + output] = code.double() - 8
    scale, offset = scales.double().repeat_interleave(group_size, 0).unbind(2)
    return matrix * scale.T + offset.T


def check_product(form, sizes, num_rows, by_id=True, transposed=False, tile=None):
    """Compare with float64: half of the rows have the last of four experts, none the second, which is not a number."""
    parts, num_experts = draw_stack(form, sizes, 4), 4
    for part in parts:
        if part.is_floating_point():
            part[1] = float("nan")
    x = torch.randn(num_rows, sizes[0 if transposed else 1]).to(form.compute_dtype)
    ids = torch.tensor([3, 0, 3, 2, 3, 0]).repeat(num_rows)[:num_rows]
    # None of the experts, in numbers of 32 or 64 bits.
    foreign = {4: 4, 7: 2**31 - 1, 9: 6} | ({5: -1} if by_id else {})
    for row, expert in foreign.items():
        ids[row : row + 1] = expert
    ids = ids.int() if by_id and num_rows % 2 else torch.where(ids == 6, 2**32 + 1, ids)
    groups = ids
    if not by_id:
        ids = ids.sort()[0]
        groups = torch.searchsorted(ids, torch.arange(num_experts), right=True, out_int32=True)
    x[ids >= num_experts] = float("nan")
    matrix = form.for_gpu_kernel(parts, sizes)
    given = packed_product(x, matrix, groups, num_experts, by_id, transposed, tile)
    assert given.dtype == x.dtype and given.shape == (num_rows, sizes[1 if transposed else 0])
    assert (given[(ids < 0) | (ids >= num_experts)] == 0).all()
    for expert in (0, 2, 3):
        weight = truth_of(form, [part[expert] for part in parts], sizes)
        check_near(given[ids == expert], x[ids == expert], weight if transposed else weight.T)


def check_near(given, x, weight):
    """Compare with the product in float64.

    Each weight and the result may be rounded by half an epsilon of their dtype; float32 sums add an error of their own.
    """
    truth = x.double() @ weight
    spread = (x.double().square() @ weight.square()).sqrt()
    step = torch.finfo(given.dtype).eps / 2
    allowed = step * truth.abs() + (4 * step + 4 * torch.finfo(FP32).eps * x.shape[1] ** 0.5) * spread
    assert ((given.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_in_any_order(name, transposed):
    for num_rows in (1, 5, 17):
        check_product(*FORMATS[name], num_rows, transposed=transposed)


@pytest.mark.parametrize("tile", packed_rows.TILES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_sorted_rows(name, transposed, tile):
    """The last expert has two tiles of rows."""
    check_product(*FORMATS[name], 2 * tile + 9, by_id=False, transposed=transposed, tile=tile)


@pytest.mark.parametrize("num_rows", [3, 130])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 40), (80, 1), (64, 64), (70, 67)])
def test_sizes_of_every_kind(num_rows, sizes):
    check_product(Plain(FP32, True), sizes, num_rows, by_id=num_rows <= 32)


@pytest.mark.parametrize("num_rows", [1, 11])
@pytest.mark.parametrize(
    ("form", "sizes", "splits"),
    [
        (Int4(32), (64, 2048), 4),
        (Plain(FP32, True), (34, 300), 2),
        (Plain(BF16, True), (34, 1010), 2),
        (Plain(FP32, True), (34, 1010), 4),
    ],
    ids=str,
)
def test_a_long_sum_is_split(form, sizes, splits, num_rows):
    """Into two and more parts, each summed in float32."""
    matrix = form.for_gpu_kernel(draw_stack(form, sizes, 4), sizes)
    itemsize = form.compute_dtype.itemsize
    launch = packed_rows.launch_of(matrix, num_rows, itemsize, torch.device("cpu"), 4, packed_rows._IDS)
    assert -(-sizes[1] // launch.split_size) >= splits
    check_product(form, sizes, num_rows)


def test_one_matrix():
    form, sizes = Int4(32), (64, 2048)
    parts, x = form.quantize(torch.randn(sizes)), torch.randn(1, sizes[1]).to(BF16)
    check_near(packed_product(x, form.for_gpu_kernel(parts, sizes)), x, decode_int4(*parts, 32).T)


@pytest.mark.parametrize("by_id", [True, False])
def test_one_program_a_tile_reads_an_expert(by_id, monkeypatch):
    """Only one program for each hit expert, or for each tile of its rows, reads weights; all others return at once."""
    ids, expected = torch.tensor([2, 0, 2, 7, 2, 0, *[2] * 20, 4, -1]), [0, 2, 4]
    if not by_id:
        ids, expected = ids[:-1].sort()[0], [0, 2, 2, 4]
    form, sizes, read = Int8(), (48, 64), []
    rows_of_program = packed_rows_triton._rows_of_program

    def record(*args):
        expert, rows, exist = rows_of_program(*args)
        read.append(int(expert.handle.data.item()))
        return expert, rows, exist

    monkeypatch.setattr(packed_rows_triton, "_rows_of_program", record)
    groups = ids if by_id else torch.searchsorted(ids, torch.arange(5), right=True, out_int32=True)
    matrix = form.for_gpu_kernel(draw_stack(form, sizes, 5), sizes)
    # All outputs are one tile, and the sum is not split.
    packed_product(
        torch.randn(len(ids), 64).to(BF16), matrix, groups, 5, by_id, tile_rows=32 if by_id else 16
    )
    assert sorted(expert for expert in read if expert < 5) == expected


@pytest.mark.parametrize("by_id", [False, True])
def test_no_rows_and_no_expert(by_id):
    form, sizes = FORMATS["int4, 32"]
    matrix = form.for_gpu_kernel(draw_stack(form, sizes, 3), sizes)
    for ids in (torch.full((0,), 1), torch.full((3,), 3)):
        groups = ids if by_id else torch.zeros(3, dtype=torch.int32)
        given = packed_product(torch.randn(len(ids), sizes[1]).to(BF16), matrix, groups, 3, by_id)
        assert torch.equal(given, torch.zeros(len(ids), sizes[0], dtype=BF16))


def test_it_is_an_operator():
    """Check its fake shapes, that it neither mutates nor aliases inputs, and that weights get no gradient."""
    stack, x, ids = plain_stack(torch.randn(3, 52, 72)), torch.randn(5, 52), torch.randint(3, (5,))
    inputs = x, list(stack.parts), stack.form.key, list(stack.sizes), ids, False, True
    checked = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(products.device_operator, inputs, test_utils=checked)
    stack = plain_stack(torch.randn(3, 52, 72, requires_grad=True))
    with pytest.raises(AssertionError, match="gradients of weights need sorted rows"):
        products.multiply_on_device(x, stack, ids, by_id=True).sum().backward()


# Experts


@torch.no_grad()
@pytest.mark.parametrize("is_output_first", [False, True])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (13, 1), (9, 2), (23, 2), (64, 2)])
def test_plain_experts(num_tokens, top_k, is_output_first, launches, monkeypatch):
    """Rows, ids and stacks in any strides; without a detour by the operator where nobody follows."""
    experts = make_experts(is_output_first=is_output_first)
    for name in ("gate_up_proj", "down_proj"):
        stack = getattr(experts, name)
        wide = torch.full((2 * len(stack), stack.shape[1] + 3, stack.shape[2] + 5), float("nan"))
        wide[1::2, 3:, 5:] = stack
        getattr(experts, name).data = wide[1::2, 3:, 5:]
    x, ids, weights = make_rows(experts, num_tokens, top_k, past_the_end=True)
    expected = by_hand(experts, x, ids, weights)
    monkeypatch.setattr(products, "device_operator", None)
    with forced("kernels"):
        given = experts(x.T.contiguous().T, ids.repeat_interleave(2, 0)[::2], weights)
    assert launches == [num_tokens * top_k] * 2
    # Measured 2e-7 to 8e-7; sums in float32, in another order.
    torch.testing.assert_close(given, expected.float(), rtol=0, atol=3e-6)


@torch.no_grad()
def test_rounding_is_where_separate_operations_round():
    """Whole numbers, whose sums are exact in any order: nothing but the places of rounding could differ."""
    experts = make_experts(SIZES, BF16, num_experts=3)
    experts.gate_up_proj.copy_(torch.randint(-9, 10, experts.gate_up_proj.shape) / 64)
    experts.down_proj.copy_(torch.eye(*experts.down_proj.shape[1:]))
    x, ids, weights = torch.randint(-4, 5, (40, 40)).to(BF16), torch.randint(3, (40, 1)), torch.ones(40, 1)
    for rows in (slice(0, 20), slice(0, 40)):
        inputs = x[rows], ids[rows], weights[rows].to(BF16)
        expected = experts.loop_over_experts(*inputs)
        assert expected.float().std() > 0.5
        with forced("kernels"):
            assert torch.equal(experts(*inputs), expected)


def make_packed(weights, is_output_first=False):
    """Packed experts, and ordinary ones in float64 with the weights that they mean."""
    plain = make_experts(dict(hidden_size=96, intermediate_size=64), FP32, 3, is_output_first)
    packed = QuantizedExperts(plain, PACKED[weights])
    for name in ("gate_up_proj", "down_proj"):
        stack = plain.format.matrix(plain.parts(name), plain.sizes_of(name), FP32).detach()
        each = [packed.formats[name].quantize(matrix.contiguous()) for matrix in stack]
        for part, numbers in zip(packed.parts(name), zip(*each, strict=True), strict=True):
            part.data.copy_(torch.stack(numbers))
    return packed, packed.dequantized(FP32).double().requires_grad_(False)


# Intermediate results of 8 bits differ by a rounding here and there, of the largest result: measured 0.004 to 0.009.
CLOSE = 0.02


def distance(given, truth):
    return ((given.double() - truth).abs().max() / truth.abs().max()).item()


@torch.no_grad()
@pytest.mark.parametrize(("weights", "is_output_first", "top_k"), [("int4", True, 2), ("int8", False, 1)])
def test_packed_experts(weights, is_output_first, top_k, on_a_gpu, nobody_counts, launches):
    packed, plain = make_packed(weights, is_output_first)
    for num_tokens in (3, 21):
        x, ids, scores = make_rows(packed, num_tokens, top_k, BF16, past_the_end=True)
        given = packed(x, ids, scores)
        assert distance(given, plain.loop_over_experts(x.double(), ids, scores.double())) < CLOSE
        assert launches[-2:] == [num_tokens * top_k] * 2


def low_rank(num_out, num_in):
    """A pair of factors as peft has it."""
    a, b = torch.randn(3, num_in, 4) / num_in**0.5, torch.randn(num_out, 4, 3) / 2
    return LowRank(a.requires_grad_(), b.requires_grad_(), 0.5, torch.nn.Identity())


def lora_of_both():
    return ExpertsLora((low_rank(128, 96),), (low_rank(96, 64),))


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_adapters_train_on_packed_experts(weights, on_a_gpu):
    """Outputs, gradients of the rows and of all factors, against autograd in float64."""
    packed, plain = make_packed(weights)
    x, ids, scores = make_rows(packed, 17, 1, BF16, past_the_end=True)
    ours, wide = lora_of_both(), lora_of_both()
    for factor, copied in zip(ours.factors(), wide.factors(), strict=True):
        copied.data = factor.detach().double()
    results = []
    for experts, lora, rows in ((plain, wide, x.double()), (packed, ours, x)):
        rows = rows.detach().requires_grad_()
        way = experts.way(17, True, lora)
        with forced("operators" if experts is plain else way):
            y = experts(rows, ids, scores.to(rows.dtype), lora)
        assert experts is plain or way == "kernels"
        (y.double() * torch.linspace(-1, 2, y.numel()).view_as(y)).sum().backward()
        results.append([y.detach(), rows.grad, *(factor.grad for factor in lora.factors())])
    for truth, given in zip(*results, strict=True):
        # Gradients go through twice as many roundings.
        assert distance(given, truth) < 2 * CLOSE
    with torch.no_grad():
        assert distance(packed(x, ids, scores, ours), results[0][0]) < CLOSE


@torch.no_grad()
@pytest.mark.parametrize(("num_tokens", "top_k", "factor"), [(5, 2, 1), (20, 2, 1), (3, 1, 0)])
def test_adapters_on_plain_experts(num_tokens, top_k, factor, on_a_gpu, nobody_counts):
    """Unsorted and sorted, against merged weights in float64; also with a new adapter, whose second factor is zero."""
    packed, plain = make_packed("int4")
    lora = lora_of_both()
    x, ids, scores = make_rows(packed, num_tokens, top_k, BF16, past_the_end=True)
    weights = {name: parameter.clone() for name, parameter in plain.named_parameters()}
    for name in weights:
        [update] = lora.of(name)
        update.b_OrE.mul_(factor)
        product = torch.einsum("eir,ore->eio", update.a_EIr.double(), update.b_OrE.double())
        getattr(plain, name).add_(update.scale * product)
    expected = plain.loop_over_experts(x.double(), ids, scores.double())
    plain.load_state_dict(weights)
    given = plain.float()(x.float(), ids, scores.float(), lora)
    assert distance(given, expected) < 1e-5
    # Two stacks, and two factors of each.
    assert list(packed_rows._FAILURES.values()) == [""] * 6


def test_linear_layers(on_a_gpu, launches, monkeypatch):
    """Few rows by the kernel, more by an unpacked matrix; the gradient of rows, too."""
    layer = QuantizedLinear(torch.nn.Linear(190, 112, device="meta"), Int4(64))
    for name, part in layer.quantize(torch.randn(112, 190) / 190**0.5, "weight").items():
        getattr(layer, name).data.copy_(part)
    torch.nn.init.normal_(layer.bias)
    truth = layer.dequantized(FP32).double()
    monkeypatch.setattr(format, "max_rows_of_matrix", lambda device: 30)
    for num_rows, is_kernel in ((3, True), (31, False)):
        x = torch.randn(num_rows, 190).to(BF16).requires_grad_()
        wide = x.detach().double().requires_grad_()
        launches.clear()
        y = layer(x)
        y.sum().backward()
        truth(wide).sum().backward()
        assert distance(y.detach(), truth(wide).detach()) < CLOSE
        assert distance(x.grad, wide.grad) < CLOSE
        # Each product is checked first, with two tiles.
        assert launches == ([37, 69, num_rows] * 2 if is_kernel else [])


def test_formats_without_a_kernel():
    sizes = 64, 32
    for form, dtype in ((Bnb(BF16, "nf4"), BF16), (Int4(32), torch.float64), (Plain(BF16), FP32)):
        parts = [torch.zeros(shape, dtype=part_dtype) for shape, part_dtype in form.parts(sizes)]
        assert not has_gpu_kernel(form, parts, sizes, dtype)


# The check before the first use

# How kernels are spoilt: what stands in their source, and what stands there instead. Plain experts show it; the last
# ones are shown by int4.
SPOILT = {
    "last inner column": ("deep < num_terms - begin", "deep < num_terms - begin - 1"),
    "the last row of a second tile": (
        "rows < tl.sum(tl.where(is_mine, ends, 0), axis=0)",
        "rows < tl.sum(tl.where(is_mine, ends - (ends - starts > M), 0), axis=0)",
    ),
    "rows of no expert": ("zeros = tl.zeros((M, COLUMNS),", "zeros = tl.full((M, COLUMNS), 1e-3,"),
    "as with TF32": ("return tl.dot(a, b,", "return tl.dot(a.to(tl.float16).to(tl.float32), b,"),
    "does not compile": (
        "place = tl.program_id(0)",
        'tl.static_assert(M == 0, "no such M"); place = tl.program_id(0)',
    ),
}
SPOILT_INT4 = {
    "code 15": ("codes & 15, bits), words_low[None", "tl.minimum(codes & 15, 14), bits), words_low[None"),
    "the last expert": ("far = expert.to(tl.int64)", "far = tl.minimum(expert, 1).to(tl.int64)"),
    "rows behind a tile": ("is_mine = group == expert", "is_mine = group == tl.minimum(expert, 1)"),
    "high codes of gradients": ("codes >> 4, bits), words_high[:", "codes & 15, bits), words_high[:"),
}


@pytest.mark.parametrize("name", SPOILT | SPOILT_INT4)
def test_a_wrong_kernel_is_not_used_and_said_once(name, on_a_gpu, tmp_path, monkeypatch, caplog):
    old, new = (SPOILT | SPOILT_INT4)[name]
    text = Path(packed_rows_triton.__file__).read_text()
    assert text.count(old) == 1
    (tmp_path / "spoilt.py").write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("spoilt", tmp_path / "spoilt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(packed_rows_triton, "product_kernel", module.product_kernel)

    is_trained = "gradients" in name
    if name in SPOILT:
        experts = make_experts(SIZES, num_experts=3).requires_grad_(False)
        x, ids, scores = make_rows(experts, 6, 1)
        expected, close = by_hand(experts, x, ids, scores), 1e-5
    else:
        experts, plain = make_packed("int4")
        x, ids, scores = make_rows(experts, 6, 1, BF16, past_the_end=True)
        expected, close = plain.loop_over_experts(x.double(), ids, scores.double()), CLOSE
    for _ in range(3):
        with torch.set_grad_enabled(is_trained):
            given = experts(x.requires_grad_(is_trained), ids, scores)
        assert distance(given.detach(), expected) < close
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert 1 <= len(messages) == len(set(messages))
    reason = "no such M" if name == "does not compile" else "numbers are wrong"
    assert all("does not use its Triton kernel" in it and reason in it for it in messages)
    if is_trained:
        failures = {key: failure for (key, _, _), failure in packed_rows._FAILURES.items()}
        assert not any(failure for key, failure in failures.items() if "transposed" not in key)


CHECKED = [37, 69, 13, 29]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_what_weights_hold_condemns_no_kernel(value, on_a_gpu):
    stack = plain_stack(torch.full((2, 24, 40), value, dtype=FP16))
    assert has_gpu_kernel(stack.form, stack.parts, stack.sizes, None, 2)


def test_a_check_holds_for_its_strides(on_a_gpu, launches):
    """Kernels are compiled for them."""
    stack = torch.randn(3, 40, 48)
    wide = torch.full((6, 40, 51), float("nan"))
    wide[::2, :, :48] = stack
    for weight, launched in ((stack, CHECKED), (wide[::2, :, :48], CHECKED), (stack.clone(), [])):
        found = plain_stack(weight)
        assert has_gpu_kernel(found.form, found.parts, found.sizes, None, 3)
        assert launches == launched
        launches.clear()


@pytest.fixture
def experts():
    return make_experts(SIZES, num_experts=3).requires_grad_(False)


@torch.no_grad()
def test_first_use_checks_once(experts, on_a_gpu, launches):
    inputs = make_rows(experts, 70, 1)
    assert max_abs(experts(*inputs), by_hand(experts, *inputs)) < 1e-5
    assert launches == []  # too many rows for it
    for num_rows, top_k in ((5, 1), (1, 1), (64, 1), (32, 2), (65, 1), (33, 2)):
        launches.clear()
        inputs = make_rows(experts, num_rows, top_k)
        assert max_abs(experts(*inputs), by_hand(experts, *inputs)) < 1e-5
        checked = 2 * CHECKED if num_rows == 5 else []
        assert launches == checked + ([num_rows * top_k] * 2 if num_rows * top_k <= 64 else [])


def test_check_kernels_checks_nothing_that_is_not_asked_for(experts, on_a_gpu, launches):
    for name in ("eager", "batched_mm"):
        experts.config._experts_implementation = name
        check_kernels(experts)
    experts.config._experts_implementation = "llamoe"
    check_kernels(experts.to(torch.float64))  # which the kernel does not take
    check_kernels(experts.to("meta"))
    assert launches == []


# Graphs


def recording_backend():
    """A compiler that changes nothing, and the operators of the graphs that it is given."""
    graphs = []

    def backend(module, inputs, **_):
        graphs.append({str(node.target) for node in module.graph.nodes})
        return module

    torch._dynamo.reset()
    return backend, graphs


def has_kernel(graph):
    return "llamoe.device_product.default" in graph and "llamoe.grouped_product.default" not in graph


@torch.no_grad()
def test_a_compiler_is_told_what_is_known(experts, on_a_gpu, launches):
    """While torch.compile traces, no check runs, and the kernel is used only if an earlier check passed."""
    inputs = make_rows(experts, 5, 1)
    for is_known in (False, False, True):
        if is_known:
            check_kernels(experts)
            launches.clear()
        backend, graphs = recording_backend()
        given = torch.compile(experts, fullgraph=True, backend=backend)(*inputs)
        assert max_abs(given, by_hand(experts, *inputs)) < 1e-5
        assert list(map(has_kernel, graphs)) == [is_known] and launches == [5, 5] * is_known


@torch.no_grad()
def test_a_compiler_sees_one_graph_of_packed_experts(on_a_gpu, nobody_counts):
    """With operators that a CUDA graph may hold."""
    packed, plain = make_packed("int4")
    x, ids, scores = make_rows(packed, 5, 2, BF16, past_the_end=True)
    check_kernels(packed)
    backend, graphs = recording_backend()
    given = torch.compile(packed, backend=backend, fullgraph=True)(x, ids, scores)
    assert distance(given, plain.loop_over_experts(x.double(), ids, scores.double())) < CLOSE
    assert list(map(has_kernel, graphs)) == [True]
    assert torch.Tag.cudagraph_unsafe not in torch.ops.llamoe.device_product.default.tags


@torch.no_grad()
def test_sizes_that_a_compiler_leaves_open(experts, on_a_gpu):
    """Experts that are no parameters, as in expert parallelism, and any number of rows."""
    check_kernels(experts)
    for name in ("gate_up_proj", "down_proj"):
        stack = getattr(experts, name).detach()
        delattr(experts, name)
        setattr(experts, name, stack)
    torch._dynamo.reset()
    call = torch.compile(experts, fullgraph=True, dynamic=True, backend="eager")
    for num_rows in (5, 9, 70):
        inputs = make_rows(experts, num_rows, 1)
        assert max_abs(call(*inputs), by_hand(experts, *inputs)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("trace", ["jit", "export", "fake"])
def test_tracers(trace, experts, on_a_gpu, launches):
    """Nothing is tried while they trace; programs for all numbers of rows do without what is known."""
    inputs, weights = make_rows(experts, 5, 1), dict(experts.named_parameters())

    def call(*inputs):
        return torch.func.functional_call(experts, weights, inputs)

    for is_known in (False, True):
        if is_known:
            experts(*inputs)
            launches.clear()
        if trace == "jit":
            program = torch.jit.trace(experts, inputs, check_trace=False)
        elif trace == "export":
            program = torch.export.export(experts, inputs).module()
        else:
            program = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        assert launches == []
        assert max_abs(program(*inputs), by_hand(experts, *inputs)) < 1e-5
        assert launches == [5, 5] * (is_known and trace == "fake")


def test_generate_checks_before_it_compiles(on_a_gpu, launches):
    """Each step of the one graph then runs the kernel, two experts for each of two tokens."""
    case = next(case for case in MODELS if case.name == "LlamoeForCausalLM")
    model = case.make_small(num_local_experts=3, **SIZES)
    inputs = case.inputs(padding=(0, 2), length=70)
    options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation="static")
    backend, graphs = recording_backend()
    compile_config = CompileConfig(fullgraph=True, backend=backend)
    compile_config._compile_all_devices = True
    given = model.generate(**inputs, **options, compile_config=compile_config)
    assert list(map(has_kernel, graphs)) == [True]
    assert launches[-7:] == [29, *[4, 4] * 3]
    model.set_experts_implementation("eager")
    assert torch.equal(given, model.generate(**inputs, **options, disable_compile=True))
