"""Test the numbers of the Triton kernels, in products and in experts, against float64.

The matrix of int4 codes is decoded here, by the description of the layout.
"""

import pytest
import torch

from llamoe.modeling.formats import Bnb, Int4, Int8, Plain, format, has_gpu_kernel
from llamoe.modeling.kernels import packed_product, packed_rows, packed_rows_triton
from llamoe.modeling.moe import ExpertsLora, LowRank, products
from llamoe.modeling.moe.products import plain_stack
from llamoe.modeling.quantization import QuantizedLinear

from .interpreted import BF16, CLOSE, FP16, FP32, SIZES, distance, make_packed
from .mixtures import by_hand, forced, make_experts, make_rows

# Formats with the sizes (outputs, inputs) of their matrices. int4's outputs are a block of 64 and 16, 48, 32 or 64
# more; some of its inputs are padded to whole groups.
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


def draw_stack(form, sizes, num_experts):
    """Draw matrices whose outputs differ in scale, quantize them, and return the stacked parts of the format."""
    num_out, num_in = sizes
    spread = torch.linspace(0.5, 2, num_out)[:, None] / num_in**0.5
    matrices = torch.randn(num_experts, num_out, num_in) * spread + 0.02
    quantized = [form.quantize(matrix.contiguous()) for matrix in matrices]
    return [torch.stack(part) for part in zip(*quantized, strict=True)]


def truth_of(form, parts, sizes):
    """Dequantize a matrix to float64, `[out, in]`."""
    if isinstance(form, Int4):
        return decode_int4(*parts, form.group_size)[:, : sizes[1]]
    return form.matrix(parts, sizes, FP32).double()


def decode_int4(codes, scales, group_size):
    """Decode int4 byte by byte, by the description of the layout: blocks of 64 outputs, two codes a byte."""
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
    """Compare a grouped product with float64.

    Half of the rows have the last of four experts. No row has the second, whose weights are NaN. Rows with an id beyond
    the experts are NaN too, and must give zeros.
    """
    parts, num_experts = draw_stack(form, sizes, 4), 4
    for part in parts:
        if part.is_floating_point():
            part[1] = float("nan")
    x = torch.randn(num_rows, sizes[0 if transposed else 1]).to(form.compute_dtype)
    ids = torch.tensor([3, 0, 3, 2, 3, 0]).repeat(num_rows)[:num_rows]
    # Some rows get ids of no expert. The number of rows decides whether ids are int32 or int64.
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
    """Compare with the product in float64, allowing the roundings of weights, result and sums in float32.

    Each weight and the result may be rounded by half an epsilon of their dtype.
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
    """Rows of the last expert fill more than one tile."""
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
    """Test sums that several programs compute in parts, each in float32."""
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
    """Only one program for each chosen expert, or for each tile of its rows, reads weights; the rest do nothing."""
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
    """The operator passes torch's checks. With unsorted rows, a gradient of the weights is refused."""
    stack, x, ids = plain_stack(torch.randn(3, 52, 72)), torch.randn(5, 52), torch.randint(3, (5,))
    inputs = x, list(stack.parts), stack.form.key, list(stack.sizes), ids, False, True
    checked = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(products.device_operator, inputs, test_utils=checked)
    stack = plain_stack(torch.randn(3, 52, 72, requires_grad=True))
    with pytest.raises(AssertionError, match="gradients of weights need sorted rows"):
        products.multiply_on_device(x, stack, ids, by_id=True).sum().backward()


@torch.no_grad()
@pytest.mark.parametrize("is_output_first", [False, True])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (13, 1), (9, 2), (23, 2), (64, 2)])
def test_plain_experts(num_tokens, top_k, is_output_first, launches, monkeypatch):
    """Take rows, ids and stacks with any strides; without a compiler, call the kernel and not torch's operator."""
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
    """The kernels round where separate operations do; sums are exact in any order, so that results must be equal."""
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


@torch.no_grad()
@pytest.mark.parametrize(("weights", "is_output_first", "top_k"), [("int4", True, 2), ("int8", False, 1)])
def test_packed_experts(weights, is_output_first, top_k, on_a_gpu, no_counting, launches):
    packed, plain = make_packed(weights, is_output_first)
    for num_tokens in (3, 21):
        x, ids, scores = make_rows(packed, num_tokens, top_k, BF16, past_the_end=True)
        given = packed(x, ids, scores)
        assert distance(given, plain.loop_over_experts(x.double(), ids, scores.double())) < CLOSE
        assert launches[-2:] == [num_tokens * top_k] * 2


def low_rank(num_out, num_in):
    """Draw a pair of LoRA factors of three experts, with rank 4, in peft's shapes."""
    a, b = torch.randn(3, num_in, 4) / num_in**0.5, torch.randn(num_out, 4, 3) / 2
    return LowRank(a.requires_grad_(), b.requires_grad_(), 0.5, torch.nn.Identity())


def lora_of_both():
    """Draw LoRA factors for both stacks of `make_packed`."""
    return ExpertsLora((low_rank(128, 96),), (low_rank(96, 64),))


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_adapters_train_on_packed_experts(weights, on_a_gpu):
    """Compare outputs, and gradients of the rows and of all factors, with autograd in float64."""
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
        # Gradients are rounded twice as often.
        assert distance(given, truth) < 2 * CLOSE
    with torch.no_grad():
        assert distance(packed(x, ids, scores, ours), results[0][0]) < CLOSE


@torch.no_grad()
@pytest.mark.parametrize(("num_tokens", "top_k", "factor"), [(5, 2, 1), (20, 2, 1), (3, 1, 0)])
def test_adapters_on_plain_experts(num_tokens, top_k, factor, on_a_gpu, no_counting):
    """Compare with merged weights in float64, for few rows by ids and more sorted rows; `factor` 0 is a new adapter."""
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
    # Kernels were checked for two stacks, and for two factors of each.
    assert list(packed_rows._FAILURES.values()) == [""] * 6


def test_linear_layers(on_a_gpu, launches, monkeypatch):
    """Few rows take the kernel, more rows the dequantized matrix; so do the gradients of these rows."""
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
        # Each of the two products is checked first, with two tiles.
        assert launches == ([37, 69, num_rows] * 2 if is_kernel else [])


def test_formats_without_a_kernel():
    sizes = 64, 32
    for form, dtype in ((Bnb(BF16, "nf4"), BF16), (Int4(32), torch.float64), (Plain(BF16), FP32)):
        parts = [torch.zeros(shape, dtype=part_dtype) for shape, part_dtype in form.parts(sizes)]
        assert not has_gpu_kernel(form, parts, sizes, dtype)
