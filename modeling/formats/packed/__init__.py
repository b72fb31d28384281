"""Layouts of quantized weights in published folders, and their conversion to int4.

Reading order: layout (the interface, and the conversion), eight_bits (which become plain weights), four_bits
(compressed-tensors, GPTQ, AWQ). 4-bit codes are kept as they are; only scales are rounded. The packages that wrote the
folders are not needed.
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
"""Functions from the `quantization_config` in a folder's config.json to its layout, by `quant_method`."""
