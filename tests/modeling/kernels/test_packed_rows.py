"""What can be tested of the Triton kernels without a GPU: they compile for each, and the machine code is as it should
be.

`support/interpreted_products.py` and `interpreted_checks.py` test the kernels' numbers and the check before their first
use; they run in another process, by Triton's interpreter.
"""

import ast
import contextlib
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.few_bits import packed
from support.paths import ROOT, SUPPORT, environment
from support.tables import in_turn

from llamoe.modeling.formats import Int4, Int8, Plain, has_gpu_kernel
from llamoe.modeling.formats.few_bits import rows_of
from llamoe.modeling.kernels import packed_rows
from llamoe.modeling.kernels.packed_rows import constants, few_rows_limit, rows_of_tile, tile_of
from llamoe.modeling.moe import check_kernels
from llamoe.modeling.moe import experts as moe_experts

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
# Scout's down projection.
SIZES = (5120, 8192)
# KB that a multiprocessor must have requested at any time to use the whole bandwidth of memory, if memory answers after
# 600 ns (assumed): A100, RTX 3090, RTX 4090, H200, B200 and RTX 5090, by NVIDIA's bandwidths.
IN_FLIGHT = {80: 11.3, 86: 6.8, 89: 4.7, 90: 21.8, 100: 32.5, 120: 6.4}
FORMATS = {
    "int4": Int4(32),
    "int4, 128": Int4(128),
    "int8": Int8(),
    "plain": Plain(BF16),
    "plain, input-first": Plain(BF16, True),
}
PLAIN = ("plain", "plain, input-first")
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KB of shared memory that a program may have, by capability; a multiprocessor has one more."""
REGISTERS = 65536
"""Registers of a multiprocessor."""
ELEMENTS = {torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}
ELEMENTS |= {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compile_kernel(
    monkeypatch: Any,
    folder: Path,
    capability: int,
    kernel: Any,
    arguments: dict[str, Any],
    warps: int,
) -> tuple[Any, dict[str, int]]:
    """Compile and assemble a kernel as a launch would.

    Args:
        arguments: by name, the number of a compile-time constant, or the type of another argument as Triton writes it,
            with "!" after it if a launch would see a multiple of 16.

    Returns:
        Triton's result, and by the assembler "REG", registers of a thread, and "STACK", bytes of a thread for which no
        registers were left.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not (tools / "ptxas").exists():
        pytest.skip("this Triton comes without NVIDIA's assembler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        kind = arguments[name]
        if not isinstance(kind, str):
            signature[name], values[place,] = "constexpr", kind
            continue
        signature[name] = kind.rstrip("!")
        if kind.endswith("!"):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [tools / "cuobjdump", "-res-usage", file], capture_output=True, text=True, check=True
    )
    return compiled, {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage.stdout)}


def programs(capability: int, shared: int, registers: int, warps: int) -> int:
    """Return how many programs run on a multiprocessor at once; registers are allocated in units of eight."""
    by_registers = REGISTERS // (32 * warps * -(-registers // 8) * 8)
    return min(by_registers, (SHARED[capability] + 1) * 1024 // (shared + 1024))


def test_triton_is_imported_only_when_a_kernel_runs():
    """Only files with kernels import it at their top; other files import those inside of functions."""
    folder = Path(packed_rows.__file__).parents[1]
    for path in folder.rglob("*.py"):
        if not path.stem.endswith("_triton"):
            nodes = ast.parse(path.read_text()).body
            imported = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not [line for line in imported if "triton" in line], path
    assert (folder / "kernels/packed_rows_triton.py").exists()


def test_under_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "support.interpreted"]
    files = [SUPPORT / f"interpreted_{part}.py" for part in ("products", "checks")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        env=environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in", done.stdout, re.MULTILINE), done.stdout


def matrix_of(form, sizes=SIZES):
    """Return a stack of 16 matrices on the meta device."""
    with torch.device("meta"):
        parts = [torch.empty((16, *shape), dtype=dtype) for shape, dtype in form.parts(sizes)]
        return form.for_gpu_kernel(parts, sizes)


def compile_for(monkeypatch, folder, capability, form, rows, transposed, dtype=BF16, aligned=True):
    """Compile and assemble the kernel as a launch would; return as `compile_kernel`.

    If not `aligned`, arguments that may be one are one, and no other argument is a multiple of 16.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    from llamoe.modeling.kernels.packed_rows_triton import product_kernel

    matrix = matrix_of(form)
    tile = tile_of(matrix, dtype.itemsize, transposed, rows)
    by = packed_rows._IDS if rows <= 32 else packed_rows._ENDS
    pointers = {"x": dtype, "out": dtype if rows > 32 else torch.float32, "codes": matrix.codes.dtype}
    pointers["groups"] = torch.int64 if by == packed_rows._IDS else torch.int32
    pointers["scales"] = (matrix.codes if matrix.scales is None else matrix.scales).dtype
    strides = zip(("stride_expert", "stride_out", "stride_in"), matrix.strides, strict=True)
    arguments = {name: 1 if stride == 1 or not aligned else "i32!" for name, stride in strides}
    arguments |= dict.fromkeys(("num_out", "num_in", "padded_in", "split_size"), "i32!" if aligned else "i64")
    arguments |= dict.fromkeys(("num_rows", "num_experts"), "i32")
    arguments |= {f"{name}_ptr": f"*{ELEMENTS[kind]}{'!' * aligned}" for name, kind in pointers.items()}
    arguments |= constants(matrix, tile, by, 16, transposed)
    return compile_kernel(monkeypatch, folder, capability, product_kernel, arguments, tile.warps)


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
    """In float32 no tensor cores are used: they would round to TF32."""
    form = Plain(dtype, FORMATS[name].is_input_first)
    compiled, _ = compile_for(monkeypatch, tmp_path, 90, form, 16, False, dtype, aligned)
    if dtype == torch.float32:
        assert "mma" not in compiled.asm["ptx"] and "fma.rn.f32" in compiled.asm["ptx"]
    else:
        assert "mma.sync" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("name", "rows", "transposed", "capability"),
    [
        *product(["int4, 128", *PLAIN], [16], [False], SHARED),
        # Each kernel is compiled for one GPU, all GPUs in turn: they differ only in limits.
        *in_turn(FORMATS, packed_rows.TILES, (False, True), SHARED),
    ],
)
def test_everything_compiles(monkeypatch, tmp_path, name, rows, transposed, capability):
    """Kernels use tensor cores, copy 16 bytes at a time ahead of their use, and keep all values in registers."""
    form = FORMATS[name]
    compiled, usage = compile_for(monkeypatch, tmp_path, capability, form, rows, transposed)
    # All values are in registers.
    assert usage["STACK"] == 0
    shared, matrix = compiled.metadata.shared, matrix_of(form)
    assert shared <= SHARED[capability] * 1024
    if rows <= 32:
        tile = tile_of(matrix, 2, transposed, rows)
        count = programs(capability, shared, usage["REG"], tile.warps)
        step = tile.columns * tile.depth * matrix.codes.element_size() // (1 if matrix.kind == "dense" else 2)
        # One program computes while another waits, and together they request enough bytes for decoding.
        assert count >= 2, (usage, shared)
        if not transposed:
            needed = IN_FLIGHT[capability] * 1024
            assert count * (tile.stages - 1) * step >= needed, (usage, shared, count)
    ptx = compiled.asm["ptx"]
    assert re.search(r"mma\.sync|wgmma|tcgen05", ptx)
    # Codes are copied 8 or 16 bytes at a time, ahead of their use.
    assert re.search(r"cp\.async\.\w+\.shared\.global[^;]*?, (0x8|0x10)\b", ptx)
    if rows <= 32 and not form.is_packed:
        # Plain weights and rows are copied only 16 bytes at a time.
        widths = set(re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?, (0x\w+|\d+)", ptx))
        assert widths == {"0x10"} or widths == {"16"}, widths


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "transposed", "capability"),
    in_turn(FORMATS, (torch.float16, torch.float32), packed_rows.TILES, (False, True), (80, 120)),
    ids=str,
)
def test_other_dtypes_compile(monkeypatch, tmp_path, name, dtype, rows, transposed, capability):
    """Kernels fit into the shared memory of the GPUs with most and with least.

    In float16 two registers may be missing, as in int8 for 64 rows on 8.0; in float32 any number.
    """
    form = Plain(dtype, FORMATS[name].is_input_first) if name in PLAIN else FORMATS[name]
    compiled, usage = compile_for(monkeypatch, tmp_path, capability, form, rows, transposed, dtype)
    assert compiled.metadata.shared <= SHARED[capability] * 1024
    if dtype == torch.float16:
        assert usage["STACK"] <= 8, (capability, rows, transposed, usage)


@pytest.mark.parametrize(("num_rows", "rows"), [(1, 16), (17, 32), (33, 64), (65, 128), (500, 128)])
def test_tiles_hold_all_rows_of_a_matrix(num_rows, rows):
    assert rows_of_tile(num_rows, 1, packed_rows._ONE) == rows
    # Twice the average of 16 experts.
    assert rows_of_tile(8 * num_rows, 16, packed_rows._ENDS) == rows


@pytest.mark.parametrize("capability", SHARED)
def test_the_sum_of_splits_compiles(monkeypatch, tmp_path, capability):
    pytest.importorskip("triton", reason="Triton is not installed")
    from llamoe.modeling.kernels.packed_rows_triton import sum_splits_kernel

    given = dict(parts_ptr="*fp32!", out_ptr="*bf16!", num_elements="i32", SPLITS=16, BLOCK=512)
    _, usage = compile_kernel(monkeypatch, tmp_path, capability, sum_splits_kernel, given, 4)
    assert usage["STACK"] == 0


def test_all_kernels_of_a_step_are_checked_before_it(monkeypatch):
    """For layers, experts and the factors of active adapters, so that `generate` can compile the step."""
    seen = []

    def record(form, parts, sizes, dtype=None, num_experts=0, transposed=False, may_check=True):
        assert may_check and not transposed and form.compute_dtype == BF16
        seen.append((form.exact.key, sizes, num_experts))
        return True

    monkeypatch.setattr(moe_experts, "has_gpu_kernel", record)
    monkeypatch.setattr(moe_experts, "may_have_gpu_kernel", lambda device: True)
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


def test_a_check_without_memory_is_repeated(monkeypatch):
    """A kernel is not wrong because memory was full."""
    monkeypatch.setattr(packed_rows, "_FAILURES", {})
    monkeypatch.setattr(packed_rows, "_INTERPRETED", True)
    form, sizes = Int8(), (96, 64)
    parts = form.quantize(torch.randn(sizes))

    def product(x, *_):
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x @ form.matrix(parts, sizes, BF16).T

    full = True
    monkeypatch.setattr(packed_rows, "packed_product", product)
    with pytest.raises(torch.OutOfMemoryError):
        has_gpu_kernel(form, parts, sizes)
    assert packed_rows._FAILURES == {}
    full = False
    assert has_gpu_kernel(form, parts, sizes)


def test_a_matrix_is_quantized_at_once_on_a_gpu():
    """Scout's largest matrix is one piece; on a CPU pieces fit into the cache."""
    assert len(list(rows_of(torch.empty(16384, 5120, device="meta")))) == 1
    assert len(list(rows_of(torch.empty(1024, 5120)))) == 16


@pytest.mark.parametrize(
    ("capability", "of_a_matrix", "of_plain_experts"),
    [((8, 9), 1024, 128), ((9, 0), 512, 64), ((10, 3), 256, 64), ((11, 0), 256, 128)],
)
def test_numbers_of_rows_for_kernels(capability, of_a_matrix, of_plain_experts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packed_rows.max_rows_of_matrix(torch.device("cuda")) == of_a_matrix
    assert few_rows_limit(torch.device("cuda", 0)) == of_plain_experts
