"""Choice of the attention implementation by device.

Flex attention is made for GPUs: on a CPU torch compiles it for half a minute, and again for other sizes, and it has no
backward pass. FlashAttention takes no mask, but chunks need a mask. In these cases `sdpa` is used, with equal results.
"""

import torch
from transformers import PreTrainedConfig
from transformers.utils import is_torchdynamo_compiling, logging

logger = logging.get_logger("llamoe")

# Implementations that are not used on a CPU.
FOR_GPUS = ("flex_attention",)


def implementation_on(device: torch.device, config: PreTrainedConfig) -> str:
    """Return the config's attention implementation, or `sdpa` with one warning if it cannot be used."""
    implementation = config._attn_implementation or "eager"
    # Continuous batching ("paged|…") refuses models with chunks itself.
    is_flash = "flash" in implementation and not implementation.startswith("paged|")
    if implementation in FOR_GPUS and device.type == "cpu":
        reason = "is for GPUs: on the CPU"
    elif is_flash and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        reason = "cannot mask attention chunks: in this decoder"
    else:
        return implementation
    if not is_torchdynamo_compiling():
        logger.warning_once(f"{implementation} {reason} sdpa attention computes the same.")
    return "sdpa"
