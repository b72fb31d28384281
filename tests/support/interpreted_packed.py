"""The Triton kernels for all formats, run by Triton's interpreter; `test_under_the_interpreter` starts this.

Truth is float64: of int4 the layout written out here.
"""

import contextlib
import os

import pytest
import torch
from support import triton_interpreter
from support.mixtures import forced
from support.models import make_asymmetric, stock_mixtral_config, stock_text_config

import llamoe
from llamoe.modeling.formats import Bnb4Bit, Int4, Int8, Plain, format, knows_gpu_kernel
from llamoe.modeling.kernels import packed_product, packed_rows, packed_rows_triton
from llamoe.modeling.moe import Experts, ExpertsLora, LowRank, OutputFirstExperts, check_kernels, products
from llamoe.modeling.moe import experts as moe_experts
from llamoe.modeling.quantization import QuantizedExperts, QuantizedLinear

assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels would need a GPU"

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


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """A process that checked nothing yet."""
    monkeypatch.setattr(packed_rows, "_FAILURES", {})


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The CPU as a device that takes kernels; checks try a few launches alone, for the interpreter is slow."""
    for module in (format, moe_experts):
        monkeypatch.setattr(module, "may_have_gpu_kernel", lambda device: True)
    monkeypatch.setattr(packed_rows, "TILES", (16, 32))


class _Right(dict):
    """What a process knows that checked everything and found nothing wrong."""

    def __contains__(self, kind):
        return True

    def get(self, kind, default=None):
        return ""

    __getitem__ = get


@pytest.fixture
def checked(on_a_gpu, monkeypatch):
    """A device on which all kernels were checked."""
    monkeypatch.setattr(packed_rows, "_FAILURES", _Right())


@pytest.fixture
def nobody_counts(monkeypatch):
    """The host may not ask for the rows of each expert."""

    def refuse(*_):
        raise AssertionError("the host counted rows")

    monkeypatch.setattr(products, "groups_between", refuse)


def draw_stack(form, sizes, num_experts=3):
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
            places = (low, 32 + low) if size == 64 else (2 * low, 2 * low + 1)
            for place, found in zip(places, (bytes_[:, low] % 16, bytes_[:, low] // 16), strict=True):
                matrix[begin + place] = found.double() - 8
    scale, offset = scales.double().repeat_interleave(group_size, 0).unbind(2)
    return matrix * scale.T + offset.T


def check(form, sizes, num_rows, by_id, transposed, num_experts=3, tile=None):
    """Against float64, with a tolerance for weights and results in the rows' dtype; rows without an expert are zero."""
    parts = draw_stack(form, sizes, num_experts)
    dtype = form.compute_dtype
    x = torch.randn(num_rows, sizes[0 if transposed else 1]).to(dtype)
    ids = torch.randint(num_experts + 1, (num_rows,))
    if num_rows > 4:
        ids[1], ids[3], ids[4] = num_experts + 3, -1 if by_id else 0, 2
    if not by_id:
        ids = ids.sort()[0]
        x[ids >= num_experts] = float("nan")
    groups = ids if by_id else torch.searchsorted(ids, torch.arange(num_experts), right=True, out_int32=True)
    matrix = form.for_gpu_kernel(parts, sizes)
    given = packed_product(x, matrix, groups, num_experts, by_id, transposed, tile)
    assert given.dtype == dtype and given.shape == (num_rows, sizes[1 if transposed else 0])
    has_expert = (ids >= 0) & (ids < num_experts)
    assert (given[~has_expert] == 0).all()
    for expert in range(num_experts):
        weight = truth_of(form, [part[expert] for part in parts], sizes)
        compare(given[ids == expert], x[ids == expert], weight if transposed else weight.T)


def compare(given, x, weight):
    """Each weight and the result are rounded by up to half of e; sums of float32 add the dtype-independent part."""
    truth = x.double() @ weight
    spread = (x.double().square() @ weight.square()).sqrt()
    step = torch.finfo(given.dtype).eps / 2
    allowed = step * truth.abs() + (4 * step + 4 * torch.finfo(FP32).eps * x.shape[1] ** 0.5) * spread
    assert ((given.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_products_equal_float64(name, transposed):
    form, sizes = FORMATS[name]
    check(form, sizes, 5, by_id=True, transposed=transposed)


@pytest.mark.parametrize(("name", "num_rows"), [("int4, 32", 41), ("plain", 37), ("int8", 70)])
def test_sorted_rows(name, num_rows):
    """Several tiles of an expert, and one expert without rows."""
    form, sizes = FORMATS[name]
    check(form, sizes, num_rows, by_id=False, transposed=False, num_experts=4, tile=16)
    check(form, sizes, num_rows, by_id=False, transposed=True, num_experts=4, tile=16)


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("name", ["int4, 32", "int8", "plain"])
def test_experts_without_rows_reach_no_result(name, by_id):
    """Whatever their scales hold."""
    form, sizes = FORMATS[name]
    parts, ids = draw_stack(form, sizes, 4), torch.tensor([0, 3, 3, 0, 4, 3])
    for part in parts:
        if part.is_floating_point():
            part[1:3] = float("nan")
    if not by_id:
        ids = ids.sort()[0]
    x = torch.randn(6, sizes[1]).to(form.compute_dtype)
    groups = ids if by_id else torch.searchsorted(ids, torch.arange(4), right=True, out_int32=True)
    given = packed_product(x, form.for_gpu_kernel(parts, sizes), groups, 4, by_id)
    assert (given[ids == 4] == 0).all()
    for expert in (0, 3):
        compare(
            given[ids == expert], x[ids == expert], truth_of(form, [part[expert] for part in parts], sizes).T
        )


@pytest.mark.parametrize("by_id", [True, False])
def test_one_program_a_tile_reads_an_expert(by_id, monkeypatch):
    """Of all programs, those that work: one for each hit expert, or for each tile of its rows."""
    ids, expected = torch.tensor([2, 0, 2, 7, 2, 0, *[2] * 20, 4, -1]), [0, 2, 4]
    if not by_id:
        ids, expected = ids[:-1].sort()[0], [0, 2, 2, 4]
    form, sizes, found = Int8(), (48, 64), []
    rows_of_program = packed_rows_triton._rows_of_program

    def record(*args):
        expert, rows, exist = rows_of_program(*args)
        found.append(int(expert.handle.data.item()))
        return expert, rows, exist

    monkeypatch.setattr(packed_rows_triton, "_rows_of_program", record)
    groups = ids if by_id else torch.searchsorted(ids, torch.arange(5), right=True, out_int32=True)
    matrix = form.for_gpu_kernel(draw_stack(form, sizes, 5), sizes)
    # All outputs are one tile, and the sum is not split.
    packed_product(
        torch.randn(len(ids), 64).to(BF16), matrix, groups, 5, by_id, tile_rows=32 if by_id else 16
    )
    assert sorted(expert for expert in found if expert < 5) == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32, 33, 64, 65, 129, 130])
@pytest.mark.parametrize("name", FORMATS)
def test_all_numbers_of_rows(name, num_rows):
    form, sizes = FORMATS[name]
    for transposed in (False, True):
        for by_id in (False, True)[: 1 + (num_rows <= 32)]:
            check(form, sizes, num_rows, by_id, transposed, num_experts=7)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_large_tiles(name, tile):
    form, sizes = FORMATS[name]
    for transposed in (False, True):
        check(form, sizes, 150, False, transposed, tile=tile)


@pytest.mark.parametrize("by_id", [False, True])
def test_no_rows_and_no_expert(by_id):
    form, sizes = FORMATS["int4, 32"]
    matrix = form.for_gpu_kernel(draw_stack(form, sizes), sizes)
    for ids in (torch.full((0,), 1), torch.full((3,), 3)):
        groups = ids if by_id else torch.zeros(3, dtype=torch.int32)
        given = packed_product(torch.randn(len(ids), sizes[1]).to(BF16), matrix, groups, 3, by_id)
        assert torch.equal(given, torch.zeros(len(ids), sizes[0], dtype=BF16))


def test_a_long_sum_is_split():
    """One row of a matrix with few outputs: the inner extent in parts, in float32."""
    form, sizes = Int4(32), (64, 2048)
    parts = form.quantize(torch.randn(sizes))
    x = torch.randn(1, sizes[1]).to(BF16)
    tile = packed_rows.tile_of(form.for_gpu_kernel(parts, sizes), 2, False, 16)
    assert packed_rows._split_size(sizes[1], 1, tile, x.device) < sizes[1] // 4
    given = packed_product(x, form.for_gpu_kernel(parts, sizes))
    compare(given, x, decode_int4(*parts, 32).T)


def make_experts(weights, family="text"):
    """Packed experts, and ordinary ones in float64 with the weights that they mean."""
    kinds = {"text": (Experts, stock_text_config), "mixtral": (OutputFirstExperts, stock_mixtral_config)}
    experts_class, stock_config = kinds[family]
    config = llamoe.from_stock(stock_config(num_local_experts=3, hidden_size=96, intermediate_size=64))
    config._experts_implementation = "llamoe"
    plain, form = make_asymmetric(experts_class(config)), PACKED[weights]
    packed = QuantizedExperts(plain, form)
    for name in ("gate_up_proj", "down_proj"):
        stack = plain.format.matrix(plain.parts(name), plain.sizes_of(name), FP32).detach()
        each = [packed.formats[name].quantize(matrix.contiguous()) for matrix in stack]
        for part, found in zip(packed.parts(name), zip(*each, strict=True), strict=True):
            part.data.copy_(torch.stack(found))
    return packed, packed.dequantized(FP32).double().requires_grad_(False)


def rows_for(num_tokens, top_k, num_experts=3):
    ids = torch.stack([torch.randperm(num_experts + 1)[:top_k] for _ in range(num_tokens)])
    return torch.randn(num_tokens, 96).to(BF16), ids, torch.rand(num_tokens, top_k).to(BF16)


# Intermediate results of 8 bits differ by a rounding here and there, of the largest result: measured 0.004 to 0.009.
CLOSE = 0.02


def distance(given, truth):
    return ((given.double() - truth).abs().max() / truth.abs().max()).item()


@pytest.mark.parametrize(("weights", "family", "top_k"), [("int4", "mixtral", 2), ("int8", "text", 1)])
def test_experts_are_computed_without_the_host(weights, family, top_k, on_a_gpu, nobody_counts, monkeypatch):
    packed, plain = make_experts(weights, family)
    launches = []
    product = products.packed_product
    monkeypatch.setattr(
        products,
        "packed_product",
        lambda x, *rest, **kwargs: launches.append(len(x)) or product(x, *rest, **kwargs),
    )
    for num_tokens in (3, 21):
        x, ids, scores = rows_for(num_tokens, top_k)
        with torch.no_grad():
            given = packed(x, ids, scores)
        truth = plain.loop_over_experts(x.double(), ids, scores.double())
        assert distance(given, truth) < CLOSE
    assert launches == [3 * top_k] * 2 + [21 * top_k] * 2


def low_rank(num_out, num_in, dtype):
    """A pair of factors as peft has it."""
    a, b = torch.randn(3, num_in, 4) / num_in**0.5, torch.randn(num_out, 4, 3) / 2
    return LowRank(*(each.to(dtype).requires_grad_() for each in (a, b)), 0.5, torch.nn.Identity())


def lora_of_both():
    return ExpertsLora((low_rank(128, 96, FP32),), (low_rank(96, 64, FP32),))


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_adapters_train_on_packed_experts(weights, checked):
    """Outputs, gradients of the rows and of all factors, against autograd in float64."""
    packed, plain = make_experts(weights)
    x, ids, scores = rows_for(17, 1)
    # Factors are checked, too, with random numbers in their places.
    ours = lora_of_both()
    wide = ExpertsLora(
        *(
            tuple(
                LowRank(
                    *(t.detach().double().requires_grad_() for t in (u.a_EIr, u.b_OrE)), u.scale, u.dropout
                )
                for u in updates
            )
            for updates in (ours.gate_up_proj, ours.down_proj)
        )
    )
    results = []
    for experts, lora, rows in ((plain, wide, x.double()), (packed, ours, x)):
        rows = rows.detach().requires_grad_()
        with contextlib.nullcontext() if experts is packed else forced("operators"):
            y = experts(rows, ids, scores.to(rows.dtype), lora)
        (y.double() * torch.linspace(-1, 2, y.numel()).view_as(y)).sum().backward()
        results.append([y.detach(), rows.grad, *(factor.grad for factor in lora.factors())])
    for truth, given in zip(*results, strict=True):
        # Gradients pass twice as many roundings.
        assert distance(given, truth) < 2 * CLOSE
    with torch.no_grad():
        assert distance(packed(x, ids, scores, ours), results[0][0]) < CLOSE


@torch.no_grad()
@pytest.mark.parametrize("factor", [1, 0])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(5, 2), (20, 2), (3, 1)])
def test_adapters_on_plain_experts(num_tokens, top_k, factor, on_a_gpu, nobody_counts):
    """Unsorted and sorted, against merged weights in float64; also with a new adapter, whose second factor is zero."""
    _, plain = make_experts("int4")
    lora = lora_of_both()
    x, ids, scores = rows_for(num_tokens, top_k)
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


def test_a_compiler_sees_one_graph(checked, nobody_counts):
    """With operators that a CUDA graph may hold."""
    packed, plain = make_experts("int4")
    x, ids, scores = rows_for(5, 2)
    check_kernels(packed)
    used = set()

    def backend(graph, _):
        used.update(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        given = torch.compile(packed, backend=backend, fullgraph=True)(x, ids, scores)
    assert distance(given, plain.loop_over_experts(x.double(), ids, scores.double())) < CLOSE
    assert "llamoe.device_product.default" in used and "llamoe.grouped_product.default" not in used
    assert torch.Tag.cudagraph_unsafe not in torch.ops.llamoe.device_product.default.tags


def test_linear_layers(on_a_gpu, monkeypatch):
    """Few rows by the kernel, more by an unpacked matrix; the gradient of rows, too."""
    form, launches = Int4(64), []
    layer = QuantizedLinear(torch.nn.Linear(190, 112, device="meta"), form)
    weight = torch.randn(112, 190) / 190**0.5
    for name, part in layer.quantize(weight).items():
        getattr(layer, name).data.copy_(part)
    torch.nn.init.normal_(layer.bias)
    for module in (format, packed_rows):
        product = module.packed_product
        monkeypatch.setattr(
            module,
            "packed_product",
            lambda x, *rest, it=product, **kwargs: launches.append(len(x)) or it(x, *rest, **kwargs),
        )
    truth = layer.dequantized(FP32).double()
    monkeypatch.setattr(format, "max_rows_of_matrix", lambda device: 30)
    for num_rows, is_kernel in ((3, True), (31, False)):
        x, wide = (torch.randn(2, num_rows, 190)[1].to(dtype) for dtype in (BF16, BF16))
        wide = x.double().requires_grad_()
        x.requires_grad_()
        launches.clear()
        y = layer(x)
        y.sum().backward()
        truth(wide).sum().backward()
        assert distance(y.detach(), truth(wide).detach()) < CLOSE
        assert distance(x.grad, wide.grad) < CLOSE
        # Each product is checked first, with two tiles.
        assert launches == ([37, 69, num_rows] * 2 if is_kernel else [])


# A line of the kernels' source, what stands there instead, and whether that is wrong for gradients alone.
SPOILT = {
    "code 15": (
        "_int4_weights(_shifted(codes & 15, bits), words_low[None, :]",
        "_int4_weights(_shifted(tl.minimum(codes & 15, 14), bits), words_low[None, :]",
        False,
    ),
    "the last expert": ("far = expert.to(tl.int64)", "far = tl.minimum(expert, 1).to(tl.int64)", False),
    "rows behind a tile": ("is_mine = group == expert", "is_mine = group == tl.minimum(expert, 1)", False),
    "high codes of gradients": (
        "_shifted(codes >> 4, bits), words_high[:, None]",
        "_shifted(codes & 15, bits), words_high[:, None]",
        True,
    ),
    "does not compile": ("place = tl.program_id(0)", 'tl.static_assert(M == 0, "no"); place = 0', False),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_wrong_kernel_is_found_and_not_used(name, on_a_gpu, tmp_path, monkeypatch, caplog):
    old, new, only_gradients = SPOILT[name]
    triton_interpreter.spoil(monkeypatch, tmp_path, old, new)
    packed, plain = make_experts("int4")
    x, ids, scores = rows_for(6, 1)
    with torch.set_grad_enabled(only_gradients):
        given = packed(x.requires_grad_(only_gradients), ids, scores)
    assert (
        distance(given.detach(), plain.loop_over_experts(x.double(), ids, scores.double()).detach()) < CLOSE
    )
    [*_, record] = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "does not use its Triton kernel for int4:32" in record.message
    if only_gradients:
        known = {name: failure for (name, _, _), failure in packed_rows._FAILURES.items()}
        assert not any(failure for name, failure in known.items() if "transposed" not in name)


def test_formats_without_a_kernel():
    assert knows_gpu_kernel(Int4(32), FP32) and knows_gpu_kernel(Plain(BF16), BF16)
    for form, dtype in ((Bnb4Bit(BF16), BF16), (Int4(32), torch.float64), (Plain(BF16), FP32)):
        assert not knows_gpu_kernel(form, dtype)
