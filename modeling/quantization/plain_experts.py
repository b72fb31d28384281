"""What a quantizer left unquantized: most skip routed experts, stacks of three axes, in silence.

transformers' quantizers replace linear layers, although experts are most of a mixture's weights. llamoe's own and those
of bitsandbytes take them.
"""

import logging

from torch import nn
from transformers import PreTrainedModel

from ...configuration.errors import CheckpointError
from ..checkpoints import in_units
from ..layers import Linear
from ..moe import STACKS, Experts
from .bnb import QuantizesExperts
from .quantizer import LlamoeQuantizer

logger = logging.getLogger("llamoe")


def warn_of_plain_experts(model: PreTrainedModel) -> None:
    """Warn, in one sentence with their bytes, of experts that a quantized model has in 16 or 32 bits.

    Raises:
        CheckpointError: a linear layer that is not quantized was loaded with a quantized one's numbers.
    """
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Linear) and not module.weight.is_floating_point():
            raise CheckpointError(
                f"{name}.weight holds quantized numbers ({module.weight.dtype}), but this layer is not quantized here. "
                "Quantize the original checkpoint again."
            )
    quantizer, method = getattr(model, "hf_quantizer", None), getattr(model, "quantization_method", None)
    reason = f"{getattr(method, 'value', method)} quantizes linear layers only"
    if isinstance(quantizer, LlamoeQuantizer | QuantizesExperts):
        if not quantizer.pre_quantized:
            # Somebody has excepted them just now.
            return
        reason = "the checkpoint holds them so"
    experts = [module for module in model.modules() if isinstance(module, Experts) and not module.is_packed]
    stacks = [getattr(module, name) for module in experts for name in STACKS]
    # Some quantizers have tensors of their own.
    if stacks and type(stacks[0]) is nn.Parameter:
        dtype, size = (
            str(stacks[0].dtype).removeprefix("torch."),
            in_units(sum(each.nbytes for each in stacks)),
        )
        logger.warning(
            "%s: the routed experts stay in %s (%s), since %s.", type(model).__name__, dtype, size, reason
        )
