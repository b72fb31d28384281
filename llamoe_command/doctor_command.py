"""The command `llamoe doctor`, which shows installed versions, devices, and the kernels that run on them."""

import os
import platform
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Any

from packaging.requirements import Requirement

from .app import app, load
from .options import AsJson, Quiet
from .printing import print_sections, status

EXTRAS = {
    "": "llamoe itself",
    "vision": "pictures and chat templates",
    "tokenizers": "tokenizers of sentencepiece and tiktoken, which LLaMA 1 to 4 have",
    "page": "the page of `llamoe chat`",
    "serve": "`transformers serve`, and a client for it",
    "bitsandbytes": "weights in bitsandbytes' formats (llamoe's own need nothing)",
    "packed": "GGUF files as sources of conversions",
    "evaluate": "evaluating with lm-eval, training with TRL",
}
"""What each group of llamoe's dependencies is for, without the groups for developers; "" is the required group."""
_IMPORTED_AS = {"open-clip-torch": "open_clip", "pillow": "PIL", "protobuf": "google.protobuf"}
_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "CXX", "HF_HUB_OFFLINE", "OMP_NUM_THREADS",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_INTERPRET",
)  # fmt: skip

Rows = list[tuple[str, str]]
_FEW_ROWS = "decoding, int4 and int8"


@app.command()
def doctor(as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Show the installed versions, the devices, and the kernels that multiply matrices on them.

    For each missing package a line says how to install it. The first run compiles and tests the C++ kernels for this
    processor, which takes about half a minute.

        llamoe doctor
    """
    advice: list[str] = []
    sections = {"versions": _versions(advice)}
    try:
        load("llamoe", as_json or quiet)
    # A broken installation of torch may raise any error.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        advice.insert(0, f"llamoe cannot be imported: {reason}")
    else:
        with status("compiling and testing kernels …", as_json or quiet):
            sections["cpu"] = _cpu(advice)
        sections["gpu"] = _gpus(advice)
    names = sorted(name for name in os.environ if name.startswith("LLAMOE_") or name in _VARIABLES)
    sections["environment"] = [(name, os.environ[name]) for name in names]
    content: dict[str, Any] = {title: dict(rows) for title, rows in sections.items()} | {"advice": advice}
    shown = [*sections.items(), ("advice", [("", line) for line in advice or ["nothing is missing"]])]
    print_sections(content, [(title, rows) for title, rows in shown if rows], as_json)


def _versions(advice: list[str]) -> Rows:
    """Return the versions of the packages that llamoe needs or can use; append how to install missing ones to `advice`.

    The packages are not imported.
    """
    rows = [("python", f"{platform.python_version()} ({platform.system()} {platform.machine()})")]
    rows += [("llamoe", version("llamoe"))]
    for requirement in map(Requirement, requires("llamoe") or ()):
        name, bounds, marker = requirement.name.lower(), requirement.specifier, requirement.marker
        extra = next((extra for extra in EXTRAS if marker is None or marker.evaluate({"extra": extra})), None)
        if extra is None or name in dict(rows):
            continue
        purpose, installed = EXTRAS[extra], _version(name)
        rows.append((name, (installed or "missing") + (f": {purpose}" if extra else "")))
        if installed is None:
            install = f"'llamoe[{extra}]'" if extra else f"'{name}{bounds}'"
            advice.append(f"{name} is missing, which is needed for {purpose}: pip install {install}")
        elif not bounds.contains(installed, prereleases=True):
            advice.append(f"{name} is {installed}, llamoe needs {bounds}: pip install '{name}{bounds}'")
    return rows


def _version(name: str) -> str | None:
    """Return the version of a package, or None if it is missing or its module cannot be found."""
    try:
        module = find_spec(_IMPORTED_AS.get(name, name.replace("-", "_")))
        return version(name) if module is not None else None
    except (PackageNotFoundError, ImportError, ValueError):
        return None


def _cpu(advice: list[str]) -> Rows:
    """Return the processor, its memory, and the kernels that multiply a few rows with a matrix on it."""
    import psutil
    import torch

    from llamoe.modeling.checkpoints import in_units
    from llamoe.modeling.kernels import SHORTCUTS_ARE_ON, cpp_instructions, why_no_cpp_kernels

    capabilities, memory = torch.cpu.get_capabilities(), psutil.virtual_memory()
    name = capabilities.get("cpu_name") or platform.machine()
    rows = [
        ("processor", f"{name}, {torch.get_num_threads()} threads"),
        ("memory", f"{in_units(memory.total)}, {in_units(memory.available)} free"),
    ]
    absence = why_no_cpp_kernels()
    if not SHORTCUTS_ARE_ON:
        absence = ("LLAMOE_CPU_SHORTCUTS=0 turns them off", "unset LLAMOE_CPU_SHORTCUTS")
    if absence is None:
        return [*rows, (_FEW_ROWS, f"llamoe's C++ kernels for {cpp_instructions()}, compiled and tested")]
    reason, remedy = absence
    advice.append(f"without C++ kernels int8 models generate 5 times slower, int4 models 15 times: {remedy}")
    return [*rows, (_FEW_ROWS, f"torch's products instead of C++ kernels: {reason}")]


def _gpus(advice: list[str]) -> Rows:
    """Return each GPU, its memory, and the kernel that multiplies a few rows with int4 and int8 weights on it."""
    import torch

    from llamoe.modeling.checkpoints import in_units
    from llamoe.modeling.kernels import why_no_gpu_kernel

    if not torch.cuda.is_available():
        return [("", "torch finds no GPU")]
    rows: Rows = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
        name = f"{properties.name}, capability {properties.major}.{properties.minor}"
        rows.append((str(device), f"{name}, {in_units(total)}, {in_units(free)} free"))
        reason = why_no_gpu_kernel(device)
        kernel = "llamoe's Triton kernel, which each process checks at its first use"
        text = (
            f"torch's products of unpacked weights instead of a Triton kernel: {reason}" if reason else kernel
        )
        rows.append((f"{_FEW_ROWS} on {device}", text))
        if reason and "pip install" in reason:
            advice.append(reason)
    return rows
