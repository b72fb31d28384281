"""A check that `load_state_dict` gets weights, not the codes of packed weights."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ...configuration.errors import CheckpointError


class TakesWeights(PreTrainedModel):
    """A mixin whose `load_state_dict` refuses codes for plain weights; name it before `PreTrainedModel`."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # Codes have the name of the weight, and torch would cast them to floats. Packed modules check their own.
        for name, own in self.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            given = state_dict.get(name)
            if isinstance(given, torch.Tensor) and own.is_floating_point() and not given.is_floating_point():
                raise CheckpointError(
                    f"{name} has dtype {given.dtype}, where this model has {own.dtype}: weights that are quantized "
                    "load by from_pretrained, or into a model that was loaded from such a folder."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)
