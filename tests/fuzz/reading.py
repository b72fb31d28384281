"""Readers of a folder; each must read a damaged folder correctly, or raise an error that names it."""

import copy
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from llamoe.conversion import convert, inspect, verify

from .judge import Wrong
from .originals import Original

# Most memory for reading a folder of some hundred kilobytes, many times what is needed.
MOST_BYTES = 256 * 2**20
MOST_SECONDS = 20.0
# Error types that users may see. CheckpointError is a ValueError and an OSError.
CLEAN = (ValueError, OSError, RuntimeError)
NOT_CLEAN = (RecursionError, NotImplementedError, UnicodeError)
NAMED = re.compile(
    r"Llamoe\w*Config|Llama4\w*Config|LlamaConfig|config\.json|adapter|Lora|quantization config"
    r"|\bhidden_act =|init_lora_weights"
)


class Unclean(Exception):
    """An error that tells a user nothing, or that comes too late."""


def load(original: Original, folder: Path) -> dict[str, torch.Tensor]:
    return original.model_class.from_pretrained(folder, dtype=torch.float32).state_dict()


def load_auto(original: Original, folder: Path) -> dict[str, torch.Tensor]:
    auto = AutoModelForImageTextToText if original.name == "pictures" else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32).state_dict()


def convert_it(original: Original, folder: Path) -> dict[str, torch.Tensor]:
    target = folder.parent / "target"
    try:
        convert(folder, target)
    except Exception:
        if target.exists():
            raise Wrong("convert leaves files behind") from None
        raise
    tensors = {}
    for path in target.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def inspect_it(original: Original, folder: Path) -> None:
    inspect(folder).sections()


def verify_it(original: Original, folder: Path) -> None:
    whole = original.write(folder.parent / "whole", {})
    found = verify(folder, whole, tokens=5, rows=1, logits=False)
    if found.same_weights:
        for name, content in original.files.items():
            is_other = (folder / name).is_file() and (folder / name).read_bytes() != content
            if is_other and name in original.weight_files:
                tensors = (load if original.model_class else convert_it)(original, folder)
                if any(not same_bits(tensors[key], value) for key, value in original.tensors.items()):
                    raise Wrong("verify calls weights the same that are not")


def read_config(original: Original, folder: Path) -> None:
    AutoConfig.from_pretrained(folder)


def peft_model(original: Original, folder: Path) -> dict[str, torch.Tensor]:
    model = PeftModel.from_pretrained(copy.deepcopy(original.base), folder)
    return {key: value for key, value in model.state_dict().items() if ".lora_" in key}


def load_adapter(original: Original, folder: Path) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(original.base)
    model.load_adapter(folder)
    return {f"base_model.model.{key}": value for key, value in model.state_dict().items() if ".lora_" in key}


READERS: dict[str, Callable[[Original, Path], Any]] = {
    "from_pretrained": load,
    "AutoModel": load_auto,
    "convert": convert_it,
    "inspect": inspect_it,
    "verify": verify_it,
    "AutoConfig": read_config,
    "PeftModel": peft_model,
    "load_adapter": load_adapter,
}


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def bounded() -> Iterator[None]:
    """Raise `Unclean` if more memory is used than a small folder can need, and end what hangs."""
    try:
        # Resets the recorded peak.
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + 4 * 2**30, resource.RLIM_INFINITY))
    # Not Linux.
    except (OSError, ValueError):
        before = None

    def end(*_):
        raise Unclean(f"it takes more than {MOST_SECONDS:.0f} s")

    handler = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    except MemoryError as error:
        raise Unclean("it takes all memory") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        if before is not None:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if before is not None and (peak := _memory("VmHWM") - before) > MOST_BYTES:
        raise Unclean(f"it takes {peak / 2**20:.0f} MB")


def check_error(error: Exception, original: Original, folder: Path) -> None:
    """Raise `Unclean` for a programming error, or for an error that does not name its subject."""
    text = str(error)
    if not isinstance(error, CLEAN) or isinstance(error, NOT_CLEAN):
        raise Unclean("no error for users")
    if "CPUAllocator" in text or "allocate memory" in text:
        raise Unclean("it asks for more memory than there is")
    known = [str(folder), *original.files]
    if not any(name in text for name in known) and not NAMED.search(text):
        raise Unclean("names neither file nor field")
    if len(text) > 5000:
        raise Unclean(f"{len(text)} characters")


def check_tensors(
    given: dict[str, torch.Tensor], original: Original, numbers: dict[str, torch.Tensor], is_config: bool
) -> tuple[int, int]:
    """Raise if a tensor is lost, has another shape, or is unknown.

    Args:
        given: what was read.
        original: the undamaged folder.
        numbers: the tensors whose elements were changed in the file.
        is_config: whether the damaged file may describe a model with fewer tensors.

    Returns:
        how many tensors equal those of `numbers`, and how many equal neither these nor the original's.
    """
    expected = original.tensors
    if not is_config and given.keys() != expected.keys():
        raise Wrong(f"tensors are lost or come in: {sorted(given.keys() ^ expected.keys())[:3]}")
    payload = others = 0
    for name, value in given.items():
        if name not in expected:
            raise Wrong(f"{name} comes from nowhere")
        if value.shape != expected[name].shape:
            raise Wrong(f"{name} has shape {list(value.shape)}")
        if same_bits(value, expected[name]):
            continue
        if name in numbers and same_bits(value, numbers[name]):
            payload += 1
        else:
            others += 1
    return payload, others


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit, NaN included."""
    return a.dtype == b.dtype and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
