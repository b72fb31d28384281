"""Layouts in which other programs store quantized weights, and the conversion of 4-bit codes to int4.

Reading order: layout (the interface), eight_bits (FP8 and W8A8, which become plain weights), four_bits
(compressed-tensors, GPTQ, AWQ, which become int4 with the same codes). The packages that wrote the folders are not
needed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .eight_bits import fbgemm_fp8, fine_grained_fp8
from .four_bits import awq, compressed_tensors, gptq, pack_for, scales_for
from .layout import Layout

LAYOUTS: dict[str, Callable[[Mapping[str, Any]], Layout]] = {
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": fbgemm_fp8,
    "fp8": fine_grained_fp8,
    "gptq": gptq,
}
"""For each `quant_method`, the function that makes a layout of the `quantization_config` in config.json."""
