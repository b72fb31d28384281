"""A check that `load_state_dict` gets weights for plain layers, not the integer codes of packed weights."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ...configuration.errors import CheckpointError


class TakesWeights(PreTrainedModel):
    """A mixin whose `load_state_dict` refuses integers for plain weights; name it before `PreTrainedModel`."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # The codes of a packed weight have the name of the weight, and torch would cast them to floats in silence.
        for name, parameter in self.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            value = state_dict.get(name)
            is_code = isinstance(value, torch.Tensor) and not value.is_floating_point()
            if is_code and parameter.is_floating_point():
                raise CheckpointError(
                    f"{name} has dtype {value.dtype}, where this model has {parameter.dtype}. Load quantized weights "
                    "by from_pretrained, or into a model that was loaded from their folder."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)
