"""Effect of a quantizer on a model: bytes before and after by part, and parts that it left unquantized.

transformers' quantizers replace linear layers. Most skip routed experts, stacks of three axes, in silence, although
these are most of a mixture's weights; llamoe's own and those of bitsandbytes take them.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...configuration.errors import CheckpointError
from ..checkpoints import in_units, sum_by_part
from ..layers import Linear
from ..moe import Experts
from .bnb_quantizers import QuantizesExperts
from .quantizer import LlamoeQuantizer

logger = logging.getLogger("llamoe")

_SAID = {"experts": "routed experts", "feed-forwards": "dense feed-forwards"}


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, with the scales and codes of a quantized one."""
    # torchao, quanto: tensors made of other tensors.
    if flatten := getattr(tensor, "__tensor_flatten__", None):
        return sum(stored_bytes(getattr(tensor, name)) for name in flatten()[0])
    # bitsandbytes, 4 and 8 bit.
    state, scales = getattr(tensor, "quant_state", None), getattr(tensor, "SCB", None)
    parts = [] if state is None else list(state.as_dict(packed=True).values())
    parts += [] if scales is None else [scales]
    return tensor.numel() * tensor.element_size() + sum(stored_bytes(part) for part in parts)


def bytes_by_part(model: nn.Module, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """Bytes of each part of a loaded model before quantization, from `dtype`, and after it; largest first.

    Shared weights count once.
    """
    found = sum_by_part(_before_and_after(model, dtype))
    return dict(sorted(found.items(), key=lambda entry: -entry[1][0]))


def _before_and_after(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, int, int]]:
    for name, parameter in model.named_parameters():
        after = stored_bytes(parameter)
        state = getattr(parameter, "quant_state", None)
        numbers = parameter.numel() if state is None else state.shape.numel()
        before = after if _is_plain(parameter) else numbers * dtype.itemsize
        path, _, own_name = name.rpartition(".")
        module = model.get_submodule(path)
        if getattr(module, "is_packed", False) and own_name in (shapes := module.unpacked_shapes()):
            before = math.prod(shapes[own_name]) * dtype.itemsize
            # The scales.
            after += sum(
                each.nbytes for key, each in module.named_buffers() if key.startswith(f"{own_name}_")
            )
        yield name, before, after


def warn_of_plain_experts(model: PreTrainedModel) -> None:
    """Warn, in one sentence with bytes by part, of experts that a quantized model has in 16 or 32 bits.

    Raises:
        CheckpointError: a linear layer that is not quantized was loaded with a quantized one's numbers.
    """
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Linear) and not module.weight.is_floating_point():
            raise CheckpointError(
                f"{name}.weight holds quantized numbers ({module.weight.dtype}), but this layer is not quantized here. "
                "Quantize the original checkpoint again."
            )
    quantizer, reason = getattr(model, "hf_quantizer", None), "the checkpoint holds them so"
    if not isinstance(quantizer, LlamoeQuantizer | QuantizesExperts):
        method: Any = getattr(model, "quantization_method", None)
        reason = f"{getattr(method, 'value', method)} quantizes linear layers only"
    elif not quantizer.pre_quantized:
        # Somebody has excepted them just now.
        return
    experts = (m for m in model.modules() if isinstance(m, Experts) and not m.is_packed)
    plain = next((m.gate_up_proj for m in experts if _is_plain(m.gate_up_proj)), None)
    if plain is None:
        return
    parts = bytes_by_part(model, plain.dtype)
    parts["in all"] = tuple(map(sum, zip(*parts.values(), strict=True)))
    counted = "; ".join(
        f"{_SAID.get(part, part)} {in_units(before)}, {in_units(after)}"
        for part, (before, after) in parts.items()
    )
    logger.warning(
        "%s: the routed experts stay in %s, since %s (bytes before, after: %s).",
        type(model).__name__,
        str(plain.dtype).removeprefix("torch."),
        reason,
        counted,
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter)
