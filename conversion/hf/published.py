"""View weights that another program has packed, as lazy tensors.

`modeling.formats.packed` says what the bits mean. As in `from_pretrained`, a function of `modeling.quantization` finds
the packed tensors of each weight, and the layers that their author left in 16 bits.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...configuration import QuantizationConfig
from ...configuration.base import LlamoeBaseConfig
from ...modeling.formats.packed import Layout
from ...modeling.moe import Experts
from ...modeling.quantization import LlamoeQuantizer, by_expert, of_stack, own_config
from ...modeling.registration import empty_model
from ..io import LazyTensor, PackedMatrix, join, stack


def unpack_published(
    tensors: Mapping[str, LazyTensor], config: LlamoeBaseConfig, layout: Layout, files: list[Path]
) -> tuple[dict[str, LazyTensor], list[str], QuantizationConfig]:
    """View the dequantized tensors of a folder that another program quantized.

    Args:
        tensors: of the files, by name.
        config: of the model.
        layout: of the packed matrices.
        files: of the checkpoint.

    Returns:
        the tensors: dequantized ones by their names in the model, with stacked experts, plain ones by their names in
        the files; the names of ignored tensors; and an int4 config for the modules that were packed.

    Raises:
        CheckpointError: a bias that the model does not have is not 0.
    """
    model: Any = empty_model(config)
    quantizer = LlamoeQuantizer(own_config(layout), pre_quantized=True)
    matrices = quantizer.read_published(model, map(str, files), layout)
    dtype = config.dtype if config.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    plain = dict(tensors)
    unpacked: dict[str, LazyTensor] = {}
    for weight, layers in matrices.items():
        packed = {
            layer: {kind: plain.pop(stored.name) for kind, stored in kinds.items()}
            for layer, kinds in layers.items()
        }
        path, _, name = weight.rpartition(".")
        module = model.get_submodule(path)
        if not isinstance(module, Experts):
            unpacked[weight] = PackedMatrix(layout, [*packed.values()], module.weight.shape, dtype)
            continue
        experts, (num_out, num_in) = _experts(packed, module, name, layout), module.sizes_of(name)
        unpacked[weight] = stack(
            [
                PackedMatrix(layout, linears, (num_out // len(linears), num_in), dtype, module.is_transposed)
                for linears in experts
            ]
        )
    # Keys of biases that are 0, and of scales of activations, which the model does not use.
    ignored = {*model._keys_passed_over}
    unused = [name for name in plain if f"^{re.escape(name)}$" in ignored]
    return (
        {name: plain[name] for name in plain if name not in unused} | unpacked,
        unused,
        quantizer.quantization_config,
    )


def _experts(
    packed: Mapping[str, dict[str, LazyTensor]], module: Experts, name: str, layout: Layout
) -> list[list[dict[str, LazyTensor]]]:
    """Return the tensors of each expert's linear layers; if scales are stacked, gate and up are one layer."""
    experts, stacked = by_expert(packed), of_stack(packed)
    if not stacked:
        return experts
    names = {name + suffix: kind for suffix, kind in zip(layout.in_stacks, layout.kinds, strict=True)}
    joined = []
    for number in range(module.num_experts):
        tensors = {names[name]: tensor.row(number) for name, tensor in stacked.items()}
        if module.is_transposed:
            tensors = {kind: tensor.transpose() for kind, tensor in tensors.items()}
        if experts:
            tensors["weight"] = join([linear["weight"] for linear in experts[number]], 0)
        joined.append([tensors])
    return joined
