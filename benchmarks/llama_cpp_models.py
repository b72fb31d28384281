"""Run a saved model in llama.cpp, from GGUF files in bfloat16, q8_0, q4_0 and q4_1.

llama.cpp's converter, which makes the files, is in llama.cpp's sources and not in llama-cpp-python. Set the environment
variable `LLAMA_CPP_CONVERTER` to the path of convert_hf_to_gguf.py, beside which the folders gguf-py and conversion
must lie. The head stays in bfloat16 in all types, as in our models; norms and routers stay in float32.
"""

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .harness import LeftOut

VARIABLE = "LLAMA_CPP_CONVERTER"
TYPES = ("bf16", "q8_0", "q4_0", "q4_1")
CONTEXT = 4096


def find_converter() -> Path:
    """Return the path of llama.cpp's converter.

    Raises:
        LeftOut: it or llama-cpp-python is missing.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise LeftOut("llama-cpp-python is not installed")
    path = os.environ.get(VARIABLE, "")
    if not Path(path).is_file():
        raise LeftOut(f"{VARIABLE}={path!r} is not the path of llama.cpp's convert_hf_to_gguf.py")
    return Path(path).absolute()


def make_files(model: Path) -> dict[str, Path]:
    """Convert a model's folder to GGUF files beside it, and return their paths by type.

    Raises:
        LeftOut: llama.cpp is missing or cannot convert the model.
    """
    converter = find_converter()
    files = {kind: model.with_name(f"{model.name}-{kind}.gguf") for kind in TYPES}
    script = Path(__file__).with_name("gguf_converter.py")
    words = [script, converter, model, "--outfile", files["bf16"], "--outtype", "bf16"]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LeftOut(
            f"llama.cpp's converter failed: {(done.stderr.strip().splitlines() or ['it ended'])[-1]}"
        )
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread, options.quantize_output_tensor = 1, False
    for kind in TYPES[1:]:
        options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
        names = str(files["bf16"]).encode(), str(files[kind]).encode()
        if status := llama_cpp.llama_model_quantize(*names, ctypes.byref(options)):
            raise LeftOut(f"llama.cpp's quantizer failed with status {status}")
    return files


class LlamaCppModel:
    """A model in llama.cpp, loaded from a GGUF file; all runs are in a thread of its own.

    In the main thread torch's oneDNN would release the AMX registers, which llama.cpp sets up only once in each thread.
    """

    def __init__(self, path: Path):
        import llama_cpp

        sizes = dict(n_ctx=CONTEXT, n_batch=CONTEXT, n_ubatch=512)
        threads = dict(n_threads=1, n_threads_batch=1)
        self.model = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **sizes, **threads)
        self._thread = ThreadPoolExecutor(1)

    def token(self, ids: list[int], steps: int) -> Callable[[], None]:
        """Return a function that decodes `steps` tokens after `ids`, which are cached only once."""
        self._thread.submit(self._read, ids).result()

        def run() -> None:
            self.model.n_tokens = len(ids)
            for _ in range(steps):
                self.model.eval(ids[:1])

        return lambda: self._thread.submit(run).result()

    def prompt(self, ids: list[int]) -> Callable[[], None]:
        """Return a function that computes the logits of all tokens of a prompt."""
        return lambda: self._thread.submit(self._read, ids).result()

    def _read(self, ids: list[int]) -> None:
        self.model.reset()
        self.model.eval(ids)
