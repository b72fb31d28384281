"""The compiled kernels for a CPU: packed weights against the numbers that they mean, others against plain products."""

import ctypes
import math

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F

from llamoe import LlamoeTextConfig
from llamoe.modeling import kernels
from llamoe.modeling._private_api import compile_cpp
from llamoe.modeling.formats import Int4, Int8, int4
from llamoe.modeling.kernels import cpp_kernels, cpp_layer, decode
from llamoe.modeling.layers import FeedForward, RMSNorm
from llamoe.modeling.moe import Experts, OutputFirstExperts

pytestmark = pytest.mark.skipif(
    cpp_kernels.library() is None, reason="needs a C++ compiler, and a CPU with AVX2, AVX-512 or NEON"
)
FORMATS = [Int4(32), Int4(64, search=False), Int4(128), Int8(), Int8(search=False)]
# Of the largest number: a product is rounded to bfloat16 once, its sum in float32 is nearly exact.
ROUNDED_ONCE = 2**-8


def packed(form, num_out, num_in, scale=1.0):
    weight = torch.randn(num_out, num_in) * scale + 0.1 * torch.randn(num_out, 1) * scale
    parts = form.quantize(weight)
    return form.for_kernel(parts), form.matrix(parts, (num_out, num_in), torch.float32)


def error(found, expected):
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 9])
def test_products_side_by_side(form, num_rows):
    torch.manual_seed(num_rows)
    num_in = 384 if isinstance(form, Int4) else 336
    sizes = (192, 64, 128) if isinstance(form, Int4) else (203, 64, 1)
    matrices, weights = zip(*(packed(form, size, num_in) for size in sizes), strict=True)
    x = torch.randn(num_rows, num_in).bfloat16()
    expected = torch.cat([x.float() @ weight.T for weight in weights], 1)
    found = kernels.cpp_products(x, matrices)
    assert found.shape == expected.shape
    assert not num_rows or error(found, expected) < ROUNDED_ONCE


def test_gradients_of_rows_unpack_by_the_kernel(monkeypatch):
    """By torch's calls a matrix of a trained mixture takes 16 times as long; by neither way is it rounded twice."""
    form, num_out, num_in = Int4(64), 192, 320
    parts = form.quantize(torch.randn(num_out, num_in))
    weight = form.matrix(parts, (num_out, num_in), torch.float32)
    x = torch.randn(7, num_out).bfloat16()
    for is_cast in (False, True):
        monkeypatch.setattr(int4, "needs_float32", lambda rows, is_cast=is_cast: is_cast)
        monkeypatch.setattr(int4, "unpack", lambda *_: pytest.fail("unpacked by torch"))
        found = form.multiply_transposed(x, parts, (num_out, num_in))
        # The matrix is rounded, too, where products are in bfloat16.
        assert error(found, x.float() @ weight) < 2 * ROUNDED_ONCE


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_threads_change_nothing(form):
    torch.manual_seed(3)
    matrix, _ = packed(form, 320, 256)
    x = torch.randn(5, 256).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = kernels.cpp_products(x, [matrix])
        torch.set_num_threads(2)
        assert torch.equal(kernels.cpp_products(x, [matrix]), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("is_joined", [True, False])
def test_feed_forward(form, is_joined):
    """Rounded where separate operations round: after gate, up, the activation and their product."""
    torch.manual_seed(5)
    # 192 hidden channels are padded where a group has 128.
    hidden, inner = 256, 192
    gate, gate_weight = packed(form, inner, hidden, 0.1)
    up, up_weight = packed(form, inner, hidden, 0.1)
    down, down_weight = packed(form, hidden, inner, 0.1)
    if is_joined:
        both = torch.cat([gate_weight, up_weight])
        gate, both = packed_like(form, both)
        gate_weight, up_weight = both.chunk(2)
    x = torch.randn(3, hidden).bfloat16()

    def rounded(y):
        return y.bfloat16().float()

    activated = rounded(F.silu(rounded(x.float() @ gate_weight.T)))
    expected = rounded(activated * rounded(x.float() @ up_weight.T)) @ down_weight.T
    found = kernels.cpp_feed_forward(x, gate, None if is_joined else up, down)
    # A number on the border between two rounds to either of them.
    assert error(found, expected) < 2 * ROUNDED_ONCE


def packed_like(form, weight):
    parts = form.quantize(weight)
    return form.for_kernel(parts), form.matrix(parts, weight.shape, torch.float32)


def test_norm_is_the_formula():
    torch.manual_seed(7)
    x = (3 * torch.randn(2, 5, 4, 80)).bfloat16()[:, 1:, ::2]
    weight = torch.randn(80).bfloat16()
    expected = F.rms_norm(x, (80,), None, 1e-5) * weight
    found = cpp_layer.rms_norm(x, weight.data_ptr(), 1e-5)
    assert found.shape == x.shape
    # Sums in another order; a quotient on the border between two numbers rounds to either of them.
    assert (found != expected).float().mean() < 0.01
    assert error(found, expected.float()) < ROUNDED_ONCE


def test_what_is_no_number_stays_so():
    matrix, _ = packed(Int4(32), 64, 64)
    x = torch.zeros(2, 64).bfloat16()
    x[1, 5] = float("nan")
    found = kernels.cpp_products(x, [matrix])
    assert (found[0] == 0).all()
    assert found[1].isnan().all()


@pytest.fixture
def first_use(monkeypatch):
    """What is known of the kernels before they are first needed."""
    for name, value in (
        ("_library", False), ("_why_none", ("", "")), ("_reasons", []),
    ):  # fmt: skip
        monkeypatch.setattr(cpp_kernels, name, value)


@pytest.mark.parametrize("is_off", [True, False])
def test_without_kernels_torch_computes(is_off, first_use, tmp_path, monkeypatch, caplog):
    """Turned off, or without a compiler: said once, and the numbers are the same."""
    monkeypatch.setenv("LLAMOE_CPP_KERNELS", str(int(not is_off)))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    parts = Int4(32).quantize(torch.randn(128, 64))
    with inductor_config.patch({"cpp.cxx": (None, "/bin/false")}):
        for num_rows in (1, 3, 100):
            x = torch.randn(num_rows, 64).bfloat16()
            y = Int4(32).multiply(x, parts, (128, 64))
            assert error(y, x.float() @ Int4(32).matrix(parts, (128, 64), torch.float32).T) < 0.01
        assert cpp_kernels.library() is None
    assert caplog.text.count("were not compiled") == (not is_off)


def products_without_kernels():
    """Errors of products with packed weights, for few rows and many."""
    parts = Int4(32).quantize(torch.randn(128, 64))
    expected = Int4(32).matrix(parts, (128, 64), torch.float32).T
    rows = [torch.randn(num_rows, 64).bfloat16() for num_rows in (1, 3, 100)]
    return [error(Int4(32, in_bytes=True).multiply(x, parts, (128, 64)), x.float() @ expected) for x in rows]


def test_kernels_with_a_wrong_number_are_not_used(first_use, monkeypatch, caplog):
    """One number of one product has the other sign: the check at the first use tells, once."""
    right = cpp_kernels.compiled(cpp_kernels.flags_of_processor())

    class Wrong:
        def products(self, x, y, *others):
            right.products(x, y, *others)
            number = ctypes.c_uint16.from_address(y)
            number.value ^= 0x8000

    monkeypatch.setattr(cpp_kernels, "compiled", lambda flags: Wrong())
    assert max(products_without_kernels()) < 0.01
    assert cpp_kernels.why_no_cpp_kernels()[0] == "their results are wrong on this machine"
    assert caplog.text.count("their results are wrong on this machine") == 1


def test_a_folder_that_cannot_be_written_is_told(first_use, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file/below"))
    assert max(products_without_kernels()) < 0.01
    why, remedy = cpp_kernels.why_no_cpp_kernels()
    assert str(tmp_path / "file") in why and "TORCHINDUCTOR_CACHE_DIR" in remedy
    assert caplog.text.count("were not compiled") == 1


def test_another_processor_finds_kernels_of_its_own(tmp_path, monkeypatch):
    """The same folder, as of a cluster's machines: what one compiled another does not load."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def file_here():
        return compile_cpp('extern "C" int f() { return 7; }', cpp_kernels.flags_of_processor())._name

    here, can = file_here(), torch.cpu.get_capabilities()
    assert file_here() == here
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**can, "a_later_instruction": True})
    assert file_here() != here


# Of the largest number, by dtype: sums are float32, in another order; bfloat16 rounds once.
PLAIN = {torch.float32: 2e-6, torch.bfloat16: ROUNDED_ONCE}
for_plain = pytest.mark.parametrize("dtype", PLAIN, ids=["float32", "bfloat16"])


def placed(shape, dtype, offset):
    """Random numbers that begin `offset` bytes after a multiple of 64, between others that are not numbers."""
    size = math.prod(shape)
    room = torch.full((size + 192,), torch.nan, dtype=dtype)
    start = (-room.data_ptr() % 64 + offset) // dtype.itemsize + 64 // dtype.itemsize
    found = room[start : start + size].view(shape)
    return found.copy_(torch.randn(shape)) if size else found


@for_plain
@pytest.mark.parametrize(
    ("num_in", "offset"), [(1, 0), (15, 4), (64, 56), (130, 0), (333, 4), (333, 56), (1024, 0), (1024, 4)]
)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 7])
def test_plain_products(dtype, offset, num_in, num_rows):
    torch.manual_seed(num_in)
    weights = [placed((num_out, num_in), dtype, offset) for num_out in (1, 67, 20)]
    x = placed((num_rows, num_in), dtype, 8)
    expected = torch.cat([x.double() @ weight.double().T for weight in weights], 1)
    found = kernels.cpp_products(x, [kernels.plain_matrix(weight) for weight in weights])
    assert found.dtype == dtype and found.shape == expected.shape
    assert not num_rows or error(found, expected) < PLAIN[dtype]


@for_plain
@pytest.mark.parametrize("is_input_first", [True, False])
@pytest.mark.parametrize("is_joined", [True, False])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (37, 51), (301, 2100), (2100, 9)])
def test_plain_feed_forward(dtype, is_input_first, is_joined, hidden, inner):
    torch.manual_seed(inner)

    def weight(num_out, num_in):
        shape = (num_in, num_out) if is_input_first else (num_out, num_in)
        made = placed(shape, dtype, 56).div_(num_in**0.5)
        return made, made.float() if not is_input_first else made.T.float()

    gate, gate_OI = weight(2 * inner if is_joined else inner, hidden)
    up, up_OI = (None, None) if is_joined else weight(inner, hidden)
    down, down_OI = weight(hidden, inner)
    if is_joined:
        gate_OI, up_OI = gate_OI.chunk(2)
    x = torch.randn(3, hidden).to(dtype)

    def rounded(y):
        return y.to(dtype).float()

    activated = rounded(F.silu(rounded(x.float() @ gate_OI.T)))
    expected = rounded(activated * rounded(x.float() @ up_OI.T)) @ down_OI.T
    matrices = [
        each if each is None else kernels.plain_matrix(each, is_input_first) for each in (gate, up, down)
    ]
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            # A number on the border between two rounds to either of them.
            assert error(kernels.cpp_feed_forward(x, *matrices), expected) < 4 * PLAIN[dtype]
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
@for_plain
@pytest.mark.parametrize("num_rows", [1, 4, 16, 17])
def test_layers_and_experts_take_the_kernels(dtype, num_rows, monkeypatch):
    """For few rows: the same numbers as without them."""
    layer = FeedForward(192, 320, "silu").to(dtype)
    config = LlamoeTextConfig(hidden_size=192, intermediate_size=104, num_local_experts=3)
    experts = [Experts(config).to(dtype), OutputFirstExperts(config).to(dtype)]
    for module in experts:
        module.config = config
        for stack in module.parameters():
            stack.normal_(std=0.1)
    x = torch.randn(num_rows, 192).to(dtype)
    chosen = torch.arange(num_rows)[:, None] % 3
    weights = torch.rand(num_rows, 1).to(dtype)

    def outputs():
        few = decode.FewRows(x, {})
        return [
            few._feed_forward(layer, x),
            *(few._compute_experts(module, x, chosen, weights) for module in experts),
        ]

    found = outputs()
    monkeypatch.setattr(cpp_kernels, "_library", None)
    for ours, expected in zip(found, outputs(), strict=True):
        assert error(ours, expected.float()) < 4 * PLAIN[dtype]


@for_plain
def test_weights_at_odd_addresses_are_left_to_torch(dtype):
    """Tensors of a safetensors file begin wherever its header ends."""
    numbers = torch.randn(7 * 96).to(dtype)
    content = bytearray(b"?") + numbers.view(torch.uint8).numpy().tobytes()
    weight = torch.frombuffer(content, dtype=dtype, offset=1).view(7, 96)
    assert torch.equal(weight.flatten(), numbers)
    if weight.data_ptr() % dtype.itemsize:
        assert kernels.plain_matrix(weight) is None
    x = torch.randn(2, 96).to(dtype)
    assert error(kernels.multiply_rows(x, weight), x.float() @ weight.float().T) < PLAIN[dtype]


def of(num_out, num_in, is_input_first=False):
    shape = (num_in, num_out) if is_input_first else (num_out, num_in)
    return kernels.plain_matrix(torch.randn(shape), is_input_first)


def test_sizes_that_do_not_fit_have_no_kernel():
    """Kernels read by the sizes that they are told; what does not fit is for torch, which raises."""
    x = torch.randn(2, 96)
    assert kernels.cpp_products(x, [of(64, 96), of(64, 80)]) is None
    for gate, up, down in (
        (of(64, 80), of(64, 96), of(96, 64)),
        (of(64, 96), of(64, 80), of(96, 64)),
        (of(64, 96), of(48, 96), of(96, 64)),
        (of(64, 96), of(64, 96), of(96, 48)),
        (of(64, 96), of(64, 96), of(96, 80)),
        (of(64, 96, True), None, of(96, 64, True)),
    ):
        assert kernels.cpp_feed_forward(x, gate, up, down) is None
    few = decode.FewRows(x, {})
    assert few._norm(RMSNorm(96)) is not None
    assert few._norm(RMSNorm(80)) is None and few._norm(nn.RMSNorm(96)) is None
    assert cpp_kernels.prepare([of(96, 96), of(48, 80), of(48, 96)]) is None
    for sizes, output, head_dim, fits in (
        ((96, 48, 48), (96, 96), 24, True),
        ((96, 48, 24), (96, 96), 24, False),
        ((96, 72, 72), (96, 96), 24, False),
        ((96, 48, 48), (96, 96), 36, False),
        ((96, 48, 48), (80, 96), 24, False),
        ((96, 48, 48), (96, 100), 24, False),
    ):
        inputs = cpp_kernels.prepare([of(size, 96) for size in sizes])
        found = cpp_layer.prepare_first_half(
            torch.float32, 0, 1e-5, inputs, cpp_kernels.prepare([of(*output)]), head_dim, 1.0, False, -1.0
        )
        assert (found is not None) == fits
    with torch.no_grad(), pytest.raises(RuntimeError):
        kernels.multiply_rows(x, torch.randn(8, 80))


@torch.no_grad()
@pytest.mark.parametrize("change", ["norm", "down", "up"])
def test_edited_layers_raise_as_torch_does(change):
    layer = FeedForward(192, 320, "silu")
    if change == "down":
        layer.down_proj = nn.Linear(400, 192, bias=False)
    elif change == "up":
        layer.up_proj = nn.Linear(192, 336, bias=False)
    x, norm = torch.randn(1, 1, 192), RMSNorm(256 if change == "norm" else 192)
    with pytest.raises(RuntimeError):
        decode.FewRows(x, {}).feed_forward(norm, layer, x)


@for_plain
def test_silu_of_numbers_of_all_sizes(dtype):
    values = torch.tensor(
        [-3e38, -1e30, -200, -89, -88.5, -88, -20, -1, 0, 1, 5, 88, 89, 200, 1e30, 3e38]
    ).to(dtype)
    x = torch.stack([values, torch.ones_like(values)], 1)
    gate, up, down = (torch.tensor(numbers).to(dtype) for numbers in ([[1.0, 0]], [[0.0, 1]], [[1.0], [0]]))
    found = kernels.cpp_feed_forward(x, *map(kernels.plain_matrix, (gate, up, down)))[:, 0]
    expected = F.silu(values.float())
    # Numbers below 1e-37 may be none.
    assert ((found.float() - expected).abs() <= PLAIN[dtype] * expected.abs() + 1e-36).all()


def test_a_default_device_changes_nothing(first_use):
    """The test before the first use makes its numbers on the CPU."""
    torch.set_default_device("meta")
    try:
        assert cpp_kernels.library() is not None, cpp_kernels.why_no_cpp_kernels()
    finally:
        torch.set_default_device(None)
