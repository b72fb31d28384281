"""A warning of experts that a quantizer has left unquantized.

Most of transformers' quantizers silently skip stacks of experts, although these are most of a mixture's weights.
"""

import logging

from torch import nn
from transformers import PreTrainedModel

from ..checkpoints import in_units
from ..moe import STACKS, Experts
from .packed_quantizer import PackedQuantizer

logger = logging.getLogger("llamoe")


def warn_of_plain_experts(model: PreTrainedModel) -> None:
    """Warn if a quantized model has experts in 16 or 32 bits, with their size in bytes."""
    quantizer, method = getattr(model, "hf_quantizer", None), getattr(model, "quantization_method", None)
    reason = f"{getattr(method, 'value', method)} quantizes linear layers only"
    if isinstance(quantizer, PackedQuantizer):
        if not quantizer.pre_quantized:
            # The user has excluded the experts in this very call.
            return
        reason = "the checkpoint holds them so"
    stacks = [
        getattr(module, name)
        for module in model.modules()
        if isinstance(module, Experts) and not module.is_packed
        for name in STACKS
    ]
    # Some quantizers use subclasses of Tensor.
    if stacks and type(stacks[0]) is nn.Parameter:
        dtype = str(stacks[0].dtype).removeprefix("torch.")
        size = in_units(sum(stack.nbytes for stack in stacks))
        logger.warning(
            "%s: the routed experts stay in %s (%s), since %s.", type(model).__name__, dtype, size, reason
        )
