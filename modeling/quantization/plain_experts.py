"""What a quantizer left unquantized: most skip routed experts, stacks of three axes, in silence.

transformers' quantizers replace linear layers, although experts are most of a mixture's weights.
"""

import logging

from torch import nn
from transformers import PreTrainedModel

from ..checkpoints import in_units
from ..moe import STACKS, Experts
from .packed_quantizer import PackedQuantizer

logger = logging.getLogger("llamoe")


def warn_of_plain_experts(model: PreTrainedModel) -> None:
    """Warn, in one sentence with their bytes, of experts that a quantized model has in 16 or 32 bits."""
    quantizer, method = getattr(model, "hf_quantizer", None), getattr(model, "quantization_method", None)
    reason = f"{getattr(method, 'value', method)} quantizes linear layers only"
    if isinstance(quantizer, PackedQuantizer):
        if not quantizer.pre_quantized:
            # Somebody has excepted them just now.
            return
        reason = "the checkpoint holds them so"
    stacks = [
        getattr(module, name)
        for module in model.modules()
        if isinstance(module, Experts) and not module.is_packed
        for name in STACKS
    ]
    # Some quantizers have tensors of their own.
    if stacks and type(stacks[0]) is nn.Parameter:
        dtype = str(stacks[0].dtype).removeprefix("torch.")
        size = in_units(sum(stack.nbytes for stack in stacks))
        logger.warning(
            "%s: the routed experts stay in %s (%s), since %s.", type(model).__name__, dtype, size, reason
        )
