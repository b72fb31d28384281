"""Every branch on a library's version.

Supported: torch >= 2.11, transformers >= 5.21 and < 6, accelerate >= 1.13, peft >= 0.21.1. All other files use only
what both ends of these ranges share.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

MIN_TRANSFORMERS = (5, 21)
NEXT_TRANSFORMERS_MAJOR = 6


def require_supported_transformers() -> None:
    """Refuse an unsupported transformers, before anything of it is used.

    Raises:
        ImportError: transformers is absent, older than 5.21, or 6 or newer.
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


def offloads_everything() -> bool:
    """Whether accelerate can have a whole model, and tied weights, on disk.

    Before 1.15 it refused a whole model and pointed to `disk_offload`, which writes the weights to disk once more. And
    it identified a tied tensor by the address of its data: on disk every address is zero, so it returned one weight
    for another.
    """
    from accelerate import __version__
    from packaging.version import Version

    return Version(__version__).release >= (1, 15)


def divide_expert_gradients_once(model: "nn.Module", distributed_config: Any) -> None:
    """Let FSDP2 divide the gradients of experts once where no two processes hold the same experts.

    transformers before 5.23 asks for a sum and a division of its own there too. FSDP2 has nothing to sum then, has
    divided already, and the experts would learn from half of their gradient.
    """
    from torch.distributed.fsdp import FSDPModule

    if distributed_config.fsdp_size > 1 and distributed_config.efsdp_size == 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(False)


def splits_packed_columns_unevenly() -> bool:
    """Whether devices can share the columns of gate and up, each split by itself, if their number divides neither.

    torch 2.15 can. In 2.11 saving and the backward pass raise.
    """
    import torch

    return torch.__version__ >= (2, 15)
