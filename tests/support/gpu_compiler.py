"""Triton's compiler and NVIDIA's assembler for cards that are not there."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KB of shared memory that a program may have, by capability; a multiprocessor has one more."""
REGISTERS = 65536
"""Of a multiprocessor."""
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
        arguments: by name a number for what is known to the compiler; otherwise a type as Triton writes it, and "!"
            behind it where a launch finds it to be a multiple of 16.

    Returns:
        Triton's result, and what the assembler says of it: "REG" a thread, and bytes of "STACK" a thread, where
        registers are kept in memory.
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
    """How many programs a multiprocessor holds; registers come in eights."""
    by_registers = REGISTERS // (32 * warps * -(-registers // 8) * 8)
    return min(by_registers, (SHARED[capability] + 1) * 1024 // (shared + 1024))
