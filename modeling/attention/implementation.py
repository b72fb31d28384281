"""Which attention implementation computes on a device.

Flex attention is written for GPUs. On a CPU torch compiles it for half a minute, and again for other sizes, and it has
no backward pass. `sdpa` follows the same rules.
"""

import torch
from transformers import PreTrainedConfig
from transformers.utils import is_torchdynamo_compiling, logging

logger = logging.get_logger("llamoe")

# Implementations that are not computed on a CPU.
FOR_GPUS = ("flex_attention",)


def implementation_on(device: torch.device, config: PreTrainedConfig) -> str:
    """The config's attention implementation; on a CPU `sdpa` in place of flex attention, which is told once."""
    implementation = config._attn_implementation or "eager"
    if implementation not in FOR_GPUS or device.type != "cpu":
        return implementation
    if not is_torchdynamo_compiling():
        logger.warning_once(f"{implementation} is for GPUs: on the CPU sdpa attention computes the same.")
    return "sdpa"
