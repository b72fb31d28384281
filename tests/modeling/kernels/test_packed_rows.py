"""The Triton kernels as far as a machine without a GPU can tell: that they compile for each, and how.

Their numbers are proven by `interpreted_packed` and `interpreted_kernels`, the check before their first use by
`interpreted_check`; `test_under_the_interpreter` starts these.
"""

import ast
import contextlib
import functools
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.few_bits import packed
from support.gpu_compiler import ELEMENTS, SHARED, compile_kernel, programs
from support.tables import in_turn

from llamoe.modeling.formats import Bnb4BitNested, Int4, Int8, Plain, gpu_kernels, plain_format
from llamoe.modeling.formats.format import chunk_of
from llamoe.modeling.kernels import packed_rows
from llamoe.modeling.kernels.limits import TRITON_MAX_ROWS, TRITON_UNSORTED_MAX_ROWS
from llamoe.modeling.kernels.packed_rows import (
    GpuMatrix,
    constants,
    few_rows_limit,
    launch_of,
    row_counts_of_launches,
    rows_of_tile,
    tile_of,
)
from llamoe.modeling.moe import check_kernels
from llamoe.modeling.moe import experts as moe_experts

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
# Scout's down projection.
SIZES = (5120, 8192)
# KB that a multiprocessor must have on their way, so that memory that answers after 600 ns (assumed) delivers all that
# its card can: A100, RTX 3090, RTX 4090, H200, B200 and RTX 5090, by the makers' bandwidths.
IN_FLIGHT = {80: 11.3, 86: 6.8, 89: 4.7, 90: 21.8, 100: 32.5, 120: 6.4}
FORMATS = {
    "int4": Int4(32),
    "int4, 128": Int4(128),
    "int8": Int8(),
    "nf4": Bnb4BitNested(BF16, matrices=2),
    "plain": Plain(BF16),
    "plain, input-first": Plain(BF16, True),
}
PLAIN = ("plain", "plain, input-first")


def test_triton_is_imported_only_when_a_kernel_runs():
    """At the top of the files that hold kernels, and of these nowhere but inside functions."""
    folder = Path(packed_rows.__file__).parents[1]
    for path in folder.rglob("*.py"):
        if not path.stem.endswith("_triton"):
            nodes = ast.parse(path.read_text()).body
            imported = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not [line for line in imported if "triton" in line], path
    assert (folder / "kernels/packed_rows_triton.py").exists()


def matrix_of(form, sizes=SIZES):
    """A stack of 16, without numbers."""
    with torch.device("meta"):
        parts = [torch.empty((16, *shape), dtype=dtype) for shape, dtype in form.parts(sizes)]
        if isinstance(form, Bnb4BitNested):
            codes, scales, nested, offset = parts
            tables = dict(table=torch.empty(16), dynamic=torch.empty(256), nested=nested, offset=offset)
            return GpuMatrix(
                "table", sizes, codes, scales, group=form.blocksize, matrices=form.matrices, **tables
            )
        return form.for_gpu_kernel(parts, sizes)


def compile_for(monkeypatch, folder, capability, form, rows, transposed, dtype=BF16, aligned=True):
    """Compile and assemble the kernel as a launch would; gives Triton's result, and what the assembler says of it.

    Without alignment everything that a launch may find to be one is one, and nothing else a multiple of 16.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    from llamoe.modeling.kernels.packed_rows_triton import product_kernel

    matrix = matrix_of(form)
    tile = tile_of(matrix, dtype.itemsize, transposed, rows)
    by = packed_rows._IDS if rows <= 32 else packed_rows._ENDS
    pointers = {"x": dtype, "out": dtype if rows > 32 else torch.float32, "codes": matrix.codes.dtype}
    pointers["groups"] = torch.int64 if by == packed_rows._IDS else torch.int32
    for name in ("scales", "table", "nested", "offset", "dynamic"):
        given = getattr(matrix, name)
        pointers[name] = (matrix.codes if given is None else given).dtype
    strides = zip(("stride_expert", "stride_out", "stride_in"), matrix.strides, strict=True)
    arguments = {name: 1 if stride == 1 or not aligned else "i32!" for name, stride in strides}
    arguments |= dict.fromkeys(("num_out", "num_in", "padded_in", "split_size"), "i32!" if aligned else "i64")
    arguments |= dict.fromkeys(("num_rows", "num_experts"), "i32")
    arguments |= {f"{name}_ptr": f"*{ELEMENTS[kind]}{'!' * aligned}" for name, kind in pointers.items()}
    arguments |= constants(matrix, tile, by, 16, transposed)
    return compile_kernel(monkeypatch, folder, capability, product_kernel, arguments, tile.warps)


def check(monkeypatch, folder, capability, form, rows, transposed):
    compiled, usage = compile_for(monkeypatch, folder, capability, form, rows, transposed)
    # No register is kept in memory.
    assert usage["STACK"] == 0
    shared, matrix = compiled.metadata.shared, matrix_of(form)
    assert shared <= SHARED[capability] * 1024
    if rows <= 32:
        tile = tile_of(matrix, 2, transposed, rows)
        count = programs(capability, shared, usage["REG"], tile.warps)
        step = tile.columns * tile.depth * matrix.codes.element_size() // (1 if matrix.kind == "dense" else 2)
        # One program computes while another waits, and in decoding they ask for enough together.
        assert count >= 2, (usage, shared)
        if not transposed:
            # Looking codes up takes twice the memory's time there (`packed_rows`).
            share = 0.5 if matrix.kind == "table" and capability in (90, 100) else 1.0
            needed = share * IN_FLIGHT[capability] * 1024
            assert count * (tile.stages - 1) * step >= needed, (usage, shared, count)
    ptx = compiled.asm["ptx"]
    assert re.search(r"mma\.sync|wgmma|tcgen05", ptx)
    # Codes are copied 8 or 16 bytes at a time, ahead of their use.
    assert re.search(r"cp\.async\.\w+\.shared\.global[^;]*?, (0x8|0x10)\b", ptx)
    if rows <= 32 and not form.is_packed:
        # Plain weights and their rows 16 alone.
        widths = set(re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?, (0x\w+|\d+)", ptx))
        assert widths == {"0x10"} or widths == {"16"}, widths
    if form.key.startswith("int4") and rows <= 32 and not transposed:
        # Two weights in two multiplications and additions.
        assert "fma.rn.bf16x2" in ptx and "cvt.rn.bf16x2" not in ptx


@pytest.mark.parametrize("capability", SHARED)
def test_int4_compiles_for_few_rows(monkeypatch, tmp_path, capability):
    check(monkeypatch, tmp_path, capability, FORMATS["int4, 128"], 16, False)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_experts_compile_for_few_rows(monkeypatch, tmp_path, name, capability):
    """For a decode step: on tensor cores, with copies of 16 bytes that run ahead, and no register kept in memory."""
    check(monkeypatch, tmp_path, capability, FORMATS[name], 16, False)


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "capability"),
    in_turn(PLAIN, (torch.float16, torch.float32), packed_rows.TILES, SHARED),
    ids=str,
)
def test_plain_experts_compile_in_other_dtypes(monkeypatch, tmp_path, name, dtype, rows, capability):
    """No register is kept in memory in 16 bits; in float32, which has no tensor cores to wait for, up to ten are."""
    form = plain_format(dtype, FORMATS[name].is_input_first)
    compiled, usage = compile_for(monkeypatch, tmp_path, capability, form, rows, False, dtype)
    assert compiled.metadata.shared <= SHARED[capability] * 1024
    assert usage["STACK"] <= (40 if dtype == torch.float32 else 0), (rows, usage)


@pytest.mark.parametrize(
    ("name", "dtype", "aligned"),
    [
        ("plain", torch.float32, True),
        ("plain, input-first", torch.float16, False),
        ("plain, input-first", torch.float32, True),
        ("plain", torch.float16, False),
    ],
    ids=str,
)
def test_other_dtypes_and_alignments_compile_for_hopper(monkeypatch, tmp_path, name, dtype, aligned):
    """In float32 without tensor cores, which would round to TF32; without alignment too."""
    form = plain_format(dtype, FORMATS[name].is_input_first)
    compiled, _ = compile_for(monkeypatch, tmp_path, 90, form, 16, False, dtype, aligned)
    if dtype == torch.float32:
        assert "mma" not in compiled.asm["ptx"] and "fma.rn.f32" in compiled.asm["ptx"]
    else:
        assert "mma.sync" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("name", "rows", "transposed"), [("nf4", 16, False), ("int8", 16, False), ("nf4", 128, True)]
)
def test_other_formats_compile(monkeypatch, tmp_path, name, rows, transposed):
    check(monkeypatch, tmp_path, 90, FORMATS[name], rows, transposed)


@pytest.mark.parametrize(
    ("name", "rows", "transposed", "capability"),
    in_turn(FORMATS, packed_rows.TILES, (False, True), SHARED),
)
def test_everything_compiles(monkeypatch, tmp_path, name, rows, transposed, capability):
    """Each kernel on one card, all cards in turn: what differs between these are limits."""
    check(monkeypatch, tmp_path, capability, FORMATS[name], rows, transposed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_int4_compiles_for_other_dtypes(monkeypatch, tmp_path, dtype):
    """Few rows, whose instructions for bfloat16 do not serve them."""
    compiled, usage = compile_for(monkeypatch, tmp_path, 90, FORMATS["int4, 128"], 16, False, dtype)
    assert "fma.rn.bf16x2" not in compiled.asm["ptx"]
    assert dtype == torch.float32 or usage["STACK"] == 0


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "transposed", "capability"),
    in_turn(FORMATS, (torch.float16, torch.float32), packed_rows.TILES, (False, True), (80, 120)),
    ids=str,
)
def test_other_dtypes_compile(monkeypatch, tmp_path, name, dtype, rows, transposed, capability):
    """For the cards with most and least shared memory: they fit. In float16 up to two registers are kept in memory,
    which int8 needs for 64 rows on 8.0; in float32, as the docstring of `packed_rows` says, any number.
    """
    form = plain_format(dtype, FORMATS[name].is_input_first) if name in PLAIN else FORMATS[name]
    compiled, usage = compile_for(monkeypatch, tmp_path, capability, form, rows, transposed, dtype)
    assert compiled.metadata.shared <= SHARED[capability] * 1024
    if dtype == torch.float16:
        assert usage["STACK"] <= 8, (capability, rows, transposed, usage)


@pytest.mark.parametrize("capability", SHARED)
def test_what_stands_beside_compiles(monkeypatch, tmp_path, capability):
    """The gradient of adapters' factors, and the sum of splits."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from llamoe.modeling.kernels.packed_rows_triton import outer_kernel, sum_splits_kernel

    given = dict(x_ptr="*bf16!", grad_ptr="*bf16!", ends_ptr="*i32!", out_ptr="*bf16!")
    given |= dict(num_in="i32!", num_out="i32!", M=64, ROWS=16, COLUMNS=64, STAGES=3)
    compiled, usage = compile_kernel(monkeypatch, tmp_path, capability, outer_kernel, given, 4)
    assert usage["STACK"] == 0 and compiled.metadata.shared <= SHARED[capability] * 1024
    assert re.search(r"mma\.sync|wgmma|tcgen05", compiled.asm["ptx"])
    given = dict(parts_ptr="*fp32!", out_ptr="*bf16!", num_elements="i32", SPLITS=16, BLOCK=512)
    compiled, usage = compile_kernel(monkeypatch, tmp_path, capability, sum_splits_kernel, given, 4)
    assert usage["STACK"] == 0


def test_the_assembler_lines_mean_what_the_interpreter_computes():
    """The interpreter knows no assembler: its lines are computed here, for some words and both signs."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    assert triton
    from llamoe.modeling.kernels import packed_rows_triton

    def halves(bits):
        """The two bfloat16 numbers of a register, in float64."""
        both = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32)
        return (both << 16).view(torch.float32).double()

    words = [0x12345678, 0x9ABCDEF0, 0x0F1E2D3C, 0xFFFFFFFF, 0x88008877]
    scale, offset = torch.tensor([0.0123, -3.4]).to(BF16), torch.tensor([-0.2, 11.0]).to(BF16)
    for byte in range(4):
        lines = getattr(packed_rows_triton, f"_BYTES_{byte}").value
        for pair in zip(words, words[1:], strict=False):
            found = run_lines(lines, pair, scale.double(), offset.double(), halves)
            codes = torch.tensor([(word >> 8 * byte & 15) - 8 for word in pair]).double()
            assert torch.equal(found, (codes * scale.double() + offset.double()).to(BF16).double())


def run_lines(lines, words, scale, offset, halves):
    """What the four instructions of `_PAIRS` give, by their definitions in NVIDIA's PTX manual."""
    known = {"$1": words[0], "$2": words[1], "$3": scale, "$4": offset}
    for line in lines.strip("{} ").split(";"):
        name, *given = re.split(r"[ ,]+", line.strip())
        if name in ("", ".reg"):
            continue
        target, *values = given
        values = [known[each] if each in known else int(each, 16) for each in values]
        if name == "mov.b32":
            [known[target]] = values
        elif name == "prmt.b32":
            eight = (values[1] << 32 | values[0]).to_bytes(8, "little")
            picked = [eight[values[2] >> 4 * place & 7] for place in range(4)]
            known[target] = int.from_bytes(picked, "little")
        elif name == "lop3.b32":
            a, b, c, table = values
            assert table == (0xF0 & 0xCC) | 0xAA
            known[target] = a & b | c
        else:
            assert name == "fma.rn.bf16x2"
            a, b, c = (each if isinstance(each, torch.Tensor) else halves(each) for each in values)
            known[target] = (a * b + c).to(BF16).double()
    return known["$0"]


@pytest.mark.parametrize(("num_rows", "rows"), [(1, 16), (17, 32), (33, 64), (65, 128), (500, 128)])
def test_tiles_hold_all_rows_of_a_matrix(num_rows, rows):
    assert rows_of_tile(num_rows, 1, packed_rows._ONE) == rows
    # Twice the average of 16 experts.
    assert rows_of_tile(8 * num_rows, 16, packed_rows._ENDS) == rows


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "sizes", [(16, 5120, 8192), (128, 5120, 8192), (7, 52, 36), (1, 1024, 512), (64, 768, 64)]
)
def test_every_launch_is_among_those_that_are_checked(sizes, dtype):
    """What is compiled, and how sums are split, for all numbers of rows; of the larger and of the smaller product."""
    num_experts, hidden, intermediate = sizes
    cpu = torch.device("cpu")
    for size in ((2 * intermediate, hidden), (hidden, intermediate)):
        matrix = matrix_of(Plain(dtype, True), size)

        def launch(num_rows, matrix=matrix):
            by = packed_rows._IDS if num_rows <= TRITON_UNSORTED_MAX_ROWS else packed_rows._ENDS
            found = launch_of(matrix, num_rows, dtype.itemsize, cpu, num_experts, by)
            known = constants(matrix, found.tile, by, num_experts, False)
            return tuple(known.items()), found.tile.warps, found.split_size

        counts = row_counts_of_launches(matrix, dtype.itemsize, cpu, num_experts)
        assert counts == sorted(set(counts)) and len(counts) < 25
        assert (counts[0], counts[-1]) == (1, TRITON_MAX_ROWS)
        assert {launch(n) for n in counts} == {launch(n) for n in range(1, TRITON_MAX_ROWS + 1)}
        for before, behind in zip(range(1, TRITON_MAX_ROWS), range(2, TRITON_MAX_ROWS + 1), strict=True):
            assert launch(before) == launch(behind) or {before, behind} <= set(counts)
        launched = list(gpu_kernels._launches(matrix, dtype, cpu, num_experts, False))
        assert launched[: len(counts)] == [(n, None, n <= TRITON_UNSORTED_MAX_ROWS) for n in counts]
        assert [tile for _, tile, _ in launched[len(counts) :]] == list(packed_rows.TILES)


def test_everything_that_a_step_multiplies_is_checked_before_it(monkeypatch):
    """Layers, experts and the factors of active adapters, so that `generate` may compile what follows."""
    seen = []

    def record(form, parts, sizes, dtype, num_experts, directions, may_check, is_factor=False):
        assert may_check and tuple(directions) == (False,) and dtype == BF16
        assert is_factor == (not form.is_packed)
        seen.append((form.key, sizes, num_experts))
        return True

    for module in (moe_experts, gpu_kernels):
        monkeypatch.setattr(module, "kernels_are_right", record)
        monkeypatch.setattr(module, "may_have_gpu_kernel", lambda device: True)
        monkeypatch.setattr(module, "why_no_kernel", lambda *_: None)
    targets = [f"feed_forward.experts.{name}_proj" for name in ("gate_up", "down")]
    model = get_peft_model(
        packed("text", "int4"), LoraConfig(r=4, target_modules=[], target_parameters=targets)
    )
    for is_adapted in (True, False):
        seen.clear()
        with contextlib.nullcontext() if is_adapted else model.disable_adapter():
            check_kernels(model.get_base_model())
        # q, k, v and o; the mixture's two stacks and its shared expert.
        assert {sizes for key, sizes, count in seen if count == 0} >= {(192, 128), (48, 128), (128, 192)}
        assert {sizes for key, sizes, count in seen if key == "int4:32" and count == 5} == {
            (128, 128),
            (128, 64),
        }
        factors = {sizes for key, sizes, count in seen if key.startswith("plain:bfloat16") and count == 5}
        assert factors == ({(4, 128), (128, 4), (4, 64)} if is_adapted else set())


def test_a_check_without_memory_condemns_no_kernel(monkeypatch):
    """It is said with the bytes, and tried again when there may be room."""
    monkeypatch.setattr(gpu_kernels, "_FAILURES", {})
    form, sizes = Int8(), (96, 64)
    parts = form.quantize(torch.randn(sizes))

    def product(x, matrix, groups, num_experts, by_id, transposed, tile):
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory.\nAnd more lines.")
        return x @ form.matrix(parts, sizes, BF16).T

    full = True
    monkeypatch.setattr(gpu_kernels, "packed_product", product)
    ask = functools.partial(gpu_kernels.kernels_are_right, form, parts, sizes, BF16, 0, (False,), True)
    with pytest.raises(torch.OutOfMemoryError, match=r"^llamoe: cpu has no room .* 339,968 bytes .*\.$"):
        ask()
    assert gpu_kernels._FAILURES == {}
    full = False
    assert ask()


def test_a_check_of_plain_experts_without_memory_condemns_no_kernel(monkeypatch):
    """Likewise, with sentences of their own."""
    monkeypatch.setattr(gpu_kernels, "_FAILURES", {})
    form, sizes = Plain(torch.float32, True), (48, 40)
    stack = torch.randn(3, 40, 48) / 6

    def product(x, matrix, groups, num_experts, by_id, transposed, tile):
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory.\nAnd more lines.")
        ids = groups if by_id else torch.searchsorted(groups, torch.arange(len(x)), right=True)
        weights = torch.cat([stack, torch.zeros(3, 40, 48)])[ids]
        return (x[:, None] @ weights)[:, 0]

    full = True
    monkeypatch.setattr(gpu_kernels, "packed_product", product)
    ask = functools.partial(
        gpu_kernels.kernels_are_right, form, [stack], sizes, torch.float32, 3, (False,), True
    )
    told = r"^llamoe: cpu has no room to check the kernel for few rows .* 180,224 bytes beside the model: leave .*\.$"
    with pytest.raises(torch.OutOfMemoryError, match=told):
        ask()
    assert gpu_kernels._FAILURES == {}
    full = False
    assert ask()


def test_a_matrix_is_quantized_at_once_on_a_gpu():
    """Of a Scout's largest matrix one piece; on a processor pieces that its cache holds."""
    assert chunk_of(torch.device("cuda")) >= 16384 * 5120 > 100 * chunk_of(torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "rows"), [((8, 9), 1024), ((9, 0), 512), ((10, 0), 256), ((11, 0), 256)]
)
def test_rows_of_a_matrix_that_kernels_take(monkeypatch, capability, rows):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packed_rows.max_rows_of_matrix(torch.device("cuda")) == rows


@pytest.mark.parametrize(("capability", "rows"), [((8, 6), 128), ((9, 0), 64), ((10, 3), 64), ((12, 0), 128)])
def test_rows_of_plain_experts_that_kernels_take(capability, rows, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert few_rows_limit(torch.device("cuda", 0)) == rows
