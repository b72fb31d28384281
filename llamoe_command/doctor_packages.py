"""Which packages are installed, in which versions, and what is missing for what.

llamoe's own metadata says what it needs, and what each extra adds. Nothing of it is imported: a wrong or missing torch
must be told, too.
"""

import contextlib
import importlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement

# What the extras are for. Those of developers are not named here.
EXTRAS = {
    "vision": "pictures and chat templates",
    "tokenizers": "tokenizers of sentencepiece and tiktoken, which LLaMA 1 to 4 have",
    "page": "the page of `llamoe chat`",
    "serve": "`transformers serve`, and a client for it",
    "bitsandbytes": "weights in 4 and 8 bits in bitsandbytes' formats (llamoe's own need nothing)",
    "evaluate": "evaluating with lm-eval, training with TRL",
    "bench": "the figure of `make bench`",
}
_NEEDED = "llamoe itself"
# Packages for GPUs that llamoe uses where they are, but does not ask for: what for, and how they are installed.
OTHERS = {
    "triton": ("the kernel for few rows of experts", "pip install triton"),
    "flash-attn": ("attn_implementation='flash_attention_2'", "pip install flash-attn --no-build-isolation"),
    "kernels": ("FlashAttention without a compiler, from the Hub", "pip install kernels"),
    "vllm": (
        "serving with vLLM",
        "pip install vllm, then llamoe anew, since vLLM takes an older transformers",
    ),
}
# Packages that are imported by another name.
_MODULES = {
    "flash-attn": "flash_attn",
    "open-clip-torch": "open_clip",
    "pillow": "PIL",
    "protobuf": "google.protobuf",
}
# Importing it takes a minute.
_NOT_TRIED = ("vllm",)


@dataclass
class Package:
    """A package that llamoe can use.

    Attributes:
        name: by which it is installed.
        version: None where it is missing.
        wanted: bounds of the version, such as ">=2.11.0"; "" for none.
        purpose: what it is for.
        is_needed: whether llamoe does not run without it.
        needs_gpu: whether it serves GPUs alone.
        advice: what to do about it; None where there is nothing to do.
    """

    name: str
    version: str | None
    wanted: str
    purpose: str
    is_needed: bool
    needs_gpu: bool = False
    advice: str | None = None


def find_packages(try_imports: bool = False) -> list[Package]:
    """All packages that llamoe can use, those that it needs first.

    Args:
        try_imports: whether to import each, which takes seconds, rather than only to look for it.
    """
    found: dict[str, Package] = {}
    for extra in (None, *EXTRAS):
        for requirement in _requirements_of("llamoe", extra):
            name, wanted = requirement.name.lower().replace("_", "-"), requirement.specifier
            if name in found:
                continue
            purpose = _NEEDED if extra is None else EXTRAS[extra]
            package = found[name] = Package(
                name, _version(name), str(wanted), purpose, is_needed=extra is None
            )
            install = f"pip install '{name}{wanted}'"
            if package.version is not None and not wanted.contains(package.version, prereleases=True):
                package.advice = f"{name} is {package.version}, llamoe needs {wanted}: {install}"
            else:
                _advise(package, f"pip install 'llamoe[{extra}]'" if extra else install, try_imports)
    for name, (purpose, install) in OTHERS.items():
        if name not in found:
            found[name] = Package(name, _version(name), "", purpose, is_needed=False, needs_gpu=True)
            _advise(found[name], install, try_imports and name not in _NOT_TRIED)
    return list(found.values())


def _requirements_of(distribution: str, extra: str | None) -> Iterator[Requirement]:
    with contextlib.suppress(PackageNotFoundError):
        for text in requires(distribution) or ():
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra or ""})
            # What applies without the extra, too, is not the extra's.
            is_general = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and is_general == (extra is None):
                # An extra of llamoe's may ask for another one.
                if requirement.name != "llamoe":
                    yield requirement
                for inner in sorted(requirement.extras):
                    yield from _requirements_of(requirement.name, inner)


def _advise(package: Package, install: str, try_import: bool) -> None:
    if package.version is None:
        package.advice = f"{package.name} is missing, for {package.purpose}: {install}"
    elif try_import:
        try:
            importlib.import_module(_module(package.name))
        # Broken packages raise whatever their code meets.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            package.advice = (
                f"{package.name} {package.version} is installed, but cannot be imported ({reason}): {install}"
            )


def _module(name: str) -> str:
    return _MODULES.get(name, name.replace("-", "_"))


def _version(name: str) -> str | None:
    """The version of a package that is installed and can be found by an import."""
    try:
        return version(name) if find_spec(_module(name)) is not None else None
    except (PackageNotFoundError, ImportError, ValueError):
        return None


def versions() -> dict[str, str]:
    """The versions of what everything runs on: Python, and llamoe."""
    return {
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "llamoe": version("llamoe"),
    }


def environment() -> dict[str, str]:
    """The variables that are set and change what is served."""
    others = (
        "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "CXX", "HF_HUB_OFFLINE", "OMP_NUM_THREADS",
        "TORCHINDUCTOR_CACHE_DIR", "TRITON_INTERPRET", "XDG_CACHE_HOME",
    )  # fmt: skip
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("LLAMOE_") or name in others
    }
