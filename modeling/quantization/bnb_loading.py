"""What a checkpoint of a model that bitsandbytes has packed needs beside its experts."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..checkpoints import WEIGHT, Stored, headers_of, names_in_model, tensors_of
from .bnb_experts import BitsAndBytesExperts
from .bnb_files import parse_router, read_matrix


def packed_experts(model: nn.Module) -> dict[str, BitsAndBytesExperts]:
    """A model's experts in bitsandbytes' formats, by their paths."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BitsAndBytesExperts)}


def unpack_routers(
    model: PreTrainedModel, state_dict: Mapping[str, Any] | None, files: Iterable[str], load_config: Any
) -> Mapping[str, Any] | None:
    """A state dict with routers' weights unpacked: transformers 4 took routers for linear layers.

    Args:
        model: with packed experts; of other models nothing changes.
        state_dict: all tensors of the checkpoint.
        files: those that it was read from, if any.
        load_config: transformers' record of the loading.
    """
    experts = next(iter(packed_experts(model).values()), None)
    if experts is None or state_dict is None:
        return state_dict
    names = names_in_model(model, load_config.weight_mapping)
    routers: dict[str, dict[str, Stored]] = {}
    for stored in headers_of(files) if files else tensors_of(state_dict):
        if parsed := parse_router(names(stored.name)[0]):
            routers.setdefault(parsed[0], {})[parsed[1]] = stored._replace(content=state_dict[stored.name])
    form, result = experts.formats["down_proj"], dict(state_dict)
    sizes = experts.num_experts, experts.sizes["down_proj"][0]
    for kinds in routers.values():
        weight = kinds.get(WEIGHT)
        if weight is not None and (len(kinds) > 1 or not weight.content.is_floating_point()):
            for each in kinds.values():
                del result[each.name]
            parts = read_matrix(form, kinds, sizes)
            result[weight.name] = form.one_matrix(parts, sizes, experts.weight_dtype)
    return result
