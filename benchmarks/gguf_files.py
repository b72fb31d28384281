"""GGUF files of a saved model: float32, bfloat16 and q8_0 by llama.cpp's own converter, q4_0 by its quantizer.

The converter is part of llama.cpp's sources and not of llama-cpp-python: `LLAMA_CPP_CONVERTER` in the environment is
the path of convert_hf_to_gguf.py, which has the folders gguf-py and conversion beside it. It runs in another process.

q8_0 and q4_0 are what llama.cpp makes by default, not `pure`: all matrices have that type, except that the head of q4_0
is q6_K (q8_0 where its rows are not multiples of 256), and that norms and routers stay in float32.
"""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from .harness import LeftOut
from .held import beyond

VARIABLE = "LLAMA_CPP_CONVERTER"
CONVERTED = ("f32", "bf16", "q8_0")
TYPES = (*CONVERTED, "q4_0")
CHILD = str(Path(__file__).with_name("gguf_converter.py"))


_callbacks: list = []


def silence(llama_cpp) -> None:
    """Make llama.cpp's C code print nothing."""
    # C keeps no reference of the function.
    if not _callbacks:
        _callbacks.append(llama_cpp.llama_log_callback(lambda level, text, data: None))
    llama_cpp.llama_log_set(_callbacks[0], None)


def find_converter() -> Path:
    """Return the path of llama.cpp's converter.

    Raises:
        LeftOut: it or llama-cpp-python is missing, or this process is held to less than llama.cpp was built for.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise LeftOut("llama-cpp-python is not installed")
    named = os.environ.get(VARIABLE)
    if not named:
        raise LeftOut(f"{VARIABLE} is not set to the path of llama.cpp's convert_hf_to_gguf.py")
    if not Path(named).is_file():
        raise LeftOut(f"{VARIABLE}={named} is not a file: it must be llama.cpp's convert_hf_to_gguf.py")
    import llama_cpp

    if words := beyond(llama_cpp.llama_print_system_info().decode()):
        raise LeftOut(
            f"llama.cpp was built with {', '.join(words)}: benchmarks/held.py says how to build another"
        )
    return Path(named).absolute()


def make_files(converter: Path, model: Path) -> dict[str, Path]:
    """Convert a saved model into a file of each type beside its folder, unless they are there.

    Args:
        converter: path of llama.cpp's converter.
        model: folder of the saved model.

    Returns:
        the files, by type.

    Raises:
        LeftOut: llama.cpp cannot convert it.
    """
    files = {kind: model.with_name(f"{model.name}-{kind}.gguf") for kind in TYPES}
    for kind, path in files.items():
        if path.exists():
            continue
        unfinished = path.with_suffix(".new")
        if kind in CONVERTED:
            words = [CHILD, str(converter), str(model), "--outfile", str(unfinished), "--outtype", kind]
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                raise LeftOut(f"llama.cpp's converter failed: {lines[-1] if lines else done.returncode}")
        else:
            _quantize(files["f32"], unfinished)
        unfinished.replace(path)
    return files


def _quantize(source: Path, target: Path) -> None:
    import llama_cpp

    silence(llama_cpp)
    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread = 1
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    names = str(source).encode(), str(target).encode()
    if status := llama_cpp.llama_model_quantize(*names, ctypes.byref(options)):
        raise LeftOut(f"llama.cpp's quantizer failed with status {status}")
