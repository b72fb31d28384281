"""Every branch on a library's version, and the few touches of transformers that are not public API.

Supported: torch >= 2.11 and transformers >= 5.17, < 6. The rest of the library is written against what both
ends of that range share.
"""

import inspect
from importlib.metadata import PackageNotFoundError, version
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


def register_text_model_for_composite(auto_class: type, config_class: type, model_class: type) -> None:
    """Make `auto_class` give a text-only model for a multimodal config.

    `auto_class.register` insists that the model's own config class is the key, yet `from_pretrained` of the
    auto classes knows the case (it swaps in the text config when the model's config class is
    `config.sub_configs["text_config"]`): transformers maps `llama4` to `Llama4ForCausalLM` in the same way.
    """
    auto_class._model_mapping.register(config_class, model_class)


def dispatches_whole_models_to_disk() -> bool:
    """Whether accelerate takes a device map in which everything is on disk; up to 1.12 it pointed to `disk_offload`.

    That function cannot be used in its place: it writes the weights to disk once more.
    """
    from accelerate import dispatch_model

    return "trying to offload the whole model" not in inspect.getsource(dispatch_model)


def reads_tied_weights_from_disk() -> bool:
    """Whether accelerate reads tied weights that are on disk.

    Up to 1.12 it knew a tied tensor by the address of its data, which for everything that is on disk is zero, and
    so gave one weight for another.
    """
    from accelerate import dispatch_model

    return 'device.type != "meta"' in inspect.getsource(dispatch_model)
