"""What a checkpoint of a model that bitsandbytes has packed needs beside its experts."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from ..checkpoints import WEIGHT, Stored
from .bnb_experts import BitsAndBytesExperts
from .bnb_files import parse_router, read_matrix


def packed_experts(model: nn.Module) -> dict[str, BitsAndBytesExperts]:
    """A model's experts in bitsandbytes' formats, by their paths."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BitsAndBytesExperts)}


def unpack_routers(
    tensors: Mapping[str, Stored],
    names: Callable[[str], Iterable[str]],
    packed: Mapping[str, BitsAndBytesExperts],
) -> dict[str, torch.Tensor]:
    """All tensors by name, with routers' weights unpacked: transformers 4 took routers for linear layers.

    Args:
        tensors: of the checkpoint.
        names: the names that a key may have in the model.
        packed: the model's experts in bitsandbytes' formats; none, if it is in another.
    """
    result: dict[str, torch.Tensor] = {}
    routers: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        if packed and (parsed := parse_router(next(iter(names(name))))):
            routers.setdefault(parsed[0], {})[parsed[1]] = stored
        else:
            result[name] = stored.content
    for kinds in routers.values():
        weight = kinds.get(WEIGHT)
        if weight is not None and (len(kinds) > 1 or not weight.content.is_floating_point()):
            experts = next(iter(packed.values()))
            form = experts.formats["down_proj"]
            sizes = experts.num_experts, experts.sizes["down_proj"][0]
            result[weight.name] = form.one_matrix(
                read_matrix(form, kinds, sizes), sizes, experts.weight_dtype
            )
        else:
            result |= {each.name: each.content for each in kinds.values()}
    return result
