"""Every branch on a library's version, and the few touches of transformers that are not public API.

Supported: torch >= 2.11 and transformers >= 5.17, < 6. The rest of the library is written against what both
ends of that range share.
"""

import sys
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIN_TRANSFORMERS = (5, 17)
NEXT_TRANSFORMERS_MAJOR = 6


def require_supported_transformers() -> None:
    """Refuse a transformers that llamoe was not written for, before anything of it is used.

    Raises:
        ImportError: the installed transformers is absent, older than 5.17, or 6 and newer.
    """
    wanted = f"transformers>={MIN_TRANSFORMERS[0]}.{MIN_TRANSFORMERS[1]},<{NEXT_TRANSFORMERS_MAJOR}"
    try:
        import transformers

        found = transformers.__version__
    except ImportError:
        found = _metadata_version("transformers")
    release = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not MIN_TRANSFORMERS <= release < (NEXT_TRANSFORMERS_MAJOR,):
        raise ImportError(
            f'llamoe needs {wanted}, but transformers {found} is installed: pip install "{wanted}".'
        )


def _metadata_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(none)"


def grouped_mm_exists(device: "torch.device") -> bool:
    """Whether `torch.nn.functional.grouped_mm` has a kernel for a device: the CPU, and CUDA from Ampere on."""
    import torch

    if not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type in ("cpu", "meta")


def register_model(auto_class: type, config_class: type, model_class: type) -> None:
    """Make `auto_class` give `model_class` for a config of ours.

    Past `auto_class.register`, for two reasons. It insists that the model's own config class is the key, yet the auto
    classes know text models of multimodal configs (transformers maps `llama4` to `Llama4ForCausalLM`). And it leaves
    out the table of names by model type, in which `transformers serve`, Trainer's label smoothing and lm-eval look up
    what a language model is.
    """
    mapping = auto_class._model_mapping
    mapping.register(config_class, model_class)
    mapping._model_mapping[config_class.model_type] = model_class.__name__


def publish(model_classes: Iterable[type]) -> None:
    """Make classes attributes of the module `transformers`.

    `transformers serve` and vLLM look there, and nowhere else, for what config.json calls the architecture. The module
    is two: transformers puts a second one into `sys.modules` while it is being imported, and who came earlier keeps
    the first.
    """
    bound = [getattr(module, "__dict__", {}).get("transformers") for module in list(sys.modules.values())]
    for module in [sys.modules["transformers"], *bound]:
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            for model_class in model_classes:
                setattr(module, model_class.__name__, model_class)


_ABSENT = object()


def point_at(auto_class: type, config_class: type, model_class: type) -> Callable[[], None]:
    """Make `auto_class` give `model_class` for a stock config; transformers offers no public way.

    Returns:
        what undoes it. It leaves an entry alone that somebody else has made since.
    """
    entries = auto_class._model_mapping._extra_content
    before = entries.get(config_class, _ABSENT)
    entries[config_class] = model_class

    def undo() -> None:
        if entries.get(config_class) is not model_class:
            return
        if before is _ABSENT:
            del entries[config_class]
        else:
            entries[config_class] = before

    return undo
