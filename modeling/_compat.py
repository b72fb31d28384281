"""Every branch on a library's version, and the few touches of transformers that are not public API.

Supported: torch >= 2.11 and transformers >= 5.17, < 6. The rest of the library is written against what both
ends of that range share.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

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


def register_parallel_style(name: str, style: object) -> None:
    """Add a parallel style to transformers' registry where the release has none of that name.

    `ep_dispatch_experts` came with 5.19. The registry stayed importable from here when it moved to another file.
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    if name not in ALL_PARALLEL_STYLES:
        ALL_PARALLEL_STYLES.register(name, style)


def parallel_sizes(distributed_config: Any) -> tuple[int, int]:
    """Give the devices that share attention heads, and those that share experts; 1 where they are not shared.

    Releases before `ep_size` have a flag instead; with it the tensor-parallel devices share the experts only. Later
    ones set that flag, too, but share what both plans name, unless the tensor-parallel plan is given as empty.
    """
    tp_size = distributed_config.tp_size or 1
    if hasattr(distributed_config, "ep_size"):
        return 1 if distributed_config.tp_plan == {} else tp_size, distributed_config.ep_size or 1
    return (1, tp_size) if distributed_config.enable_expert_parallel else (tp_size, 1)


def is_tensor_parallel_only(distributed_config: Any) -> bool:
    """Whether a model is sharded by tensor or expert parallelism and not by FSDP2 besides.

    A model that was not loaded into shards has no such configuration; sizes that are not asked for are None or 1.
    """
    tp_size, *others = (
        getattr(distributed_config, name, None) or 1 for name in ("tp_size", "fsdp_size", "dp_replicate_size")
    )
    return tp_size > 1 and others == [1, 1]


def shards_unevenly() -> bool:
    """Whether a layer may be split into parts that differ in size.

    Not so in 5.17, which takes every device's part to be as large as its own. The releases that can are known by a
    class that came with it.
    """
    from transformers.distributed import tensor_parallel

    return hasattr(tensor_parallel, "EmbeddingParallel")


def gather(tensor: "torch.Tensor") -> "torch.Tensor":
    """Join a tensor that is sharded over one line of devices; others are given back as they are.

    torch 2.11's `full_tensor` refuses packed columns (gate and up, each split by itself), whatever made them.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    try:
        return tensor.full_tensor()
    except ValueError:
        placement: Any = tensor.placements[0]
        mesh = tensor.device_mesh
        if tensor.shape[placement.dim] % (mesh.size() * placement.split_factor):
            raise
        local = tensor.to_local().contiguous()
        shards = [local.new_empty(local.shape) for _ in range(mesh.size())]
        dist.all_gather(shards, local, group=mesh.get_group())
        pieces = [shard.chunk(placement.split_factor, placement.dim) for shard in shards]
        return torch.cat([shard[i] for i in range(placement.split_factor) for shard in pieces], placement.dim)
