"""The kernels for packed matrices as far as a machine without a GPU can tell: that they compile for each, and how.

Their numbers are proven by `interpreted_packed`, which `test_under_the_interpreter` starts.
"""

import contextlib
import functools
import re
import subprocess
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.few_bits import packed

from llamoe.modeling.formats import Bnb4BitNested, Int4, Int8, Plain, gpu_kernels
from llamoe.modeling.formats.format import chunk_of
from llamoe.modeling.kernels import packed_rows
from llamoe.modeling.kernels.packed_rows import GpuMatrix, constants, rows_of_tile, tile_of
from llamoe.modeling.moe import dispatch
from llamoe.modeling.moe import experts as moe_experts

BF16 = torch.bfloat16
# Scout's down projection, and the bytes of shared memory that a program may have, by capability.
SIZES = (5120, 8192)
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
FORMATS = {
    "int4": Int4(32),
    "int4, 128": Int4(128),
    "int8": Int8(),
    "nf4": Bnb4BitNested(BF16, matrices=2),
    "plain": Plain(BF16),
}
ELEMENTS = {torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", BF16: "bf16"}
ELEMENTS |= {torch.float32: "fp32"}


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


def compile_for(monkeypatch, folder, capability, form, rows, transposed, by=None):
    """Compile and assemble the kernel as a launch would; gives Triton's result, and what the assembler says of it."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not (tools / "ptxas").exists():
        pytest.skip("this Triton comes without NVIDIA's assembler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from llamoe.modeling.kernels.packed_rows_triton import product_kernel

    matrix = matrix_of(form)
    tile = tile_of(matrix, 2, transposed, rows)
    by = (packed_rows._IDS if rows <= 32 else packed_rows._ENDS) if by is None else by
    fixed = constants(matrix, tile, by, 16, transposed)
    pointers = {
        "x_ptr": BF16,
        "out_ptr": BF16 if rows > 32 else torch.float32,
        "codes_ptr": matrix.codes.dtype,
    }
    pointers["groups_ptr"] = torch.int64 if by == packed_rows._IDS else torch.int32
    for name in ("scales", "table", "nested", "offset", "dynamic"):
        given = getattr(matrix, name)
        pointers[f"{name}_ptr"] = (matrix.codes if given is None else given).dtype
    strides = dict(zip(("stride_expert", "stride_out", "stride_in"), matrix.strides, strict=True))
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(product_kernel.arg_names):
        known = fixed.get(name, 1 if strides.get(name) == 1 else None)
        if known is not None:
            signature[name], values[place,] = "constexpr", known
            continue
        signature[name] = "*" + ELEMENTS[pointers[name]] if name in pointers else "i32"
        if name not in ("num_rows", "num_experts"):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=product_kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": tile.warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [tools / "cuobjdump", "-res-usage", file], capture_output=True, text=True, check=True
    )
    return compiled, {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage.stdout)}


def check(monkeypatch, folder, capability, form, rows, transposed):
    compiled, usage = compile_for(monkeypatch, folder, capability, form, rows, transposed)
    # No register is kept in memory, and several programs of few rows share a multiprocessor.
    assert usage["STACK"] == 0
    assert compiled.metadata.shared <= SHARED[capability] * 1024
    if rows <= 32:
        assert 32 * tile_of(matrix_of(form), 2, transposed, rows).warps * usage["REG"] * 3 <= 65536
        assert 3 * (compiled.metadata.shared + 1024) <= SHARED[capability] * 1024
    ptx = compiled.asm["ptx"]
    assert re.search(r"mma\.sync|wgmma|tcgen05", ptx)
    # Codes are copied 8 or 16 bytes at a time, ahead of their use.
    assert re.search(r"cp\.async\.\w+\.shared\.global[^;]*?, (0x8|0x10)\b", ptx)
    if form.key.startswith("int4") and rows <= 32 and not transposed:
        # Two weights in two multiplications and additions.
        assert "fma.rn.bf16x2" in ptx and "cvt.rn.bf16x2" not in ptx


@pytest.mark.parametrize("capability", SHARED)
def test_int4_compiles_for_few_rows(monkeypatch, tmp_path, capability):
    check(monkeypatch, tmp_path, capability, FORMATS["int4, 128"], 16, False)


@pytest.mark.parametrize(
    ("name", "rows", "transposed"), [("nf4", 16, False), ("int8", 16, False), ("nf4", 128, True)]
)
def test_other_formats_compile(monkeypatch, tmp_path, name, rows, transposed):
    check(monkeypatch, tmp_path, 90, FORMATS[name], rows, transposed)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("name", FORMATS)
def test_everything_compiles_everywhere(monkeypatch, tmp_path, name, capability):
    for rows, transposed in ((16, False), (32, False), (64, False), (128, False), (16, True), (128, True)):
        check(monkeypatch, tmp_path, capability, FORMATS[name], rows, transposed)


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


def test_everything_that_a_step_multiplies_is_checked_before_it(monkeypatch):
    """Layers, experts and the factors of active adapters, so that `generate` may compile what follows."""
    seen = []

    def record(form, parts, sizes, dtype, num_experts, directions, may_check):
        assert may_check and tuple(directions) == (False,) and dtype == BF16
        seen.append((form.key, sizes, num_experts))
        return True

    for module in (dispatch, gpu_kernels):
        monkeypatch.setattr(module, "kernels_are_right", record)
        monkeypatch.setattr(module, "may_have_gpu_kernel", lambda device: True)
        monkeypatch.setattr(module, "why_no_kernel", lambda *_: None)
    monkeypatch.setattr(dispatch, "_is_on_host", lambda weight: False)
    monkeypatch.setattr(moe_experts, "has_gpu", lambda: True)
    targets = [f"feed_forward.experts.{name}_proj" for name in ("gate_up", "down")]
    model = get_peft_model(
        packed("text", "int4"), LoraConfig(r=4, target_modules=[], target_parameters=targets)
    )
    for is_adapted in (True, False):
        seen.clear()
        with contextlib.nullcontext() if is_adapted else model.disable_adapter():
            dispatch.check_kernels(model.get_base_model())
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


def test_a_matrix_is_quantized_at_once_on_a_gpu():
    """Of a Scout's largest matrix one piece; on a processor pieces that its cache holds."""
    assert chunk_of(torch.device("cuda")) >= 16384 * 5120 > 100 * chunk_of(torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "rows"), [((8, 9), 1024), ((9, 0), 512), ((10, 0), 256), ((11, 0), 256)]
)
def test_rows_of_a_matrix_that_kernels_take(monkeypatch, capability, rows):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packed_rows.max_rows_of_matrix(torch.device("cuda")) == rows
