"""Layouts of packed weights in published folders, and int4's parts of what they hold.

Reading order: layout (what a layout must say, and int4's parts), then a file each: eight_bits (which int4 does not
hold), compressed_tensors, gptq, awq. A layout's codes are int4's, taken over as they are; only scales are rounded. None
of the packages that wrote the folders is needed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .awq import Awq
from .compressed_tensors import CompressedTensors
from .eight_bits import EightBits, FbgemmFp8, FineGrainedFp8
from .gptq import Gptq
from .layout import Layout, Unpacked, int4_of, int4_parts, weight_of

LAYOUTS: dict[str, Callable[[Mapping[str, Any]], Layout]] = {
    "awq": Awq.from_config,
    "compressed-tensors": CompressedTensors.from_config,
    "fbgemm_fp8": FbgemmFp8.from_config,
    "fp8": FineGrainedFp8.from_config,
    "gptq": Gptq.from_config,
}
"""What makes a layout of the `quantization_config` in a folder's config.json, by its `quant_method`."""
