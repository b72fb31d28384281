"""Rules of transformers' loader for folders in which bitsandbytes has packed each expert as linear layers.

They stand in the place of those that fuse plain experts. Some folders have plain experts in some layers: these are
fused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from ...configuration.errors import CheckpointError
from ..checkpoints import DTYPE_NAMES, WEIGHT, FuseExperts, Stored
from ..moe import PARTS_OF_STACKS
from .bnb_experts import BitsAndBytesExperts

STATE = "quant_state.bitsandbytes__"
_BESIDE_WEIGHT = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", f"{STATE}nf4", f"{STATE}fp4")
# What follows the name of a linear layer, to the kind of the tensor.
_KINDS = {
    "weight": WEIGHT,
    **{f"weight.{kind}": kind for kind in _BESIDE_WEIGHT},
    "SCB": "SCB",
    "weight_format": "weight_format",
}


def reading_rules(is_transposed: bool, hf_quantizer: Any) -> list[WeightConverter]:
    """The rules for the stacks of a family, and for its routers, which transformers 4 took for linear layers.

    Args:
        is_transposed: the family: Llama 4's experts are input-first.
        hf_quantizer: of the load.
    """
    router = ".feed_forward.router" if is_transposed else ".mlp.gate"
    return [
        *(
            WeightConverter(
                [f".experts.*.{part}.{kind}" for part in parts for kind in _KINDS],
                f".experts.{stack}",
                [_ReadExperts(is_transposed, hf_quantizer)],
            )
            for stack, parts in PARTS_OF_STACKS[is_transposed].items()
        ),
        WeightConverter(
            [f"{router}.{kind}" for kind in _KINDS], f"{router}.weight", [_ReadRouter(hf_quantizer)]
        ),
    ]


class _Reads(ConversionOps):
    """An operation on tensors as files have them: transformers casts none if it has `hf_quantizer`."""

    def __init__(self, hf_quantizer: Any):
        self.hf_quantizer = hf_quantizer


def _stored(path: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Stored]:
    """The tensors of one linear layer by their kind."""
    return {
        _KINDS[name]: Stored(
            "checkpoint", f"{path}.{name}", DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor
        )
        for name, tensor in tensors.items()
    }


class _ReadExperts(_Reads):
    """Make the parts of a stack of the linear layers of its experts."""

    def __init__(self, is_transposed: bool, hf_quantizer: Any):
        super().__init__(hf_quantizer)
        self._fuse = FuseExperts(is_transposed)

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """The parts by their names in the model, or the plain stack.

        Raises:
            CheckpointError: an expert lacks a tensor, or one is not what the model needs.
        """
        path, _, stack = full_layer_name.rpartition(".")
        experts = model.get_submodule(path)
        if not isinstance(experts, BitsAndBytesExperts):
            fused = self._fuse.convert(input_dict, source_patterns, target_patterns, full_layer_name, model)
            return {name: tensor.to(experts.dtype) for name, tensor in fused.items()}
        parts = PARTS_OF_STACKS[experts.is_transposed][stack]
        # Beside each weight stand the same kinds; where one is missing, the lists differ in length.
        by_part = [
            {name: found for name in _KINDS if (found := input_dict.get(f".experts.*.{part}.{name}"))}
            for part in parts
        ]
        counts = {
            part: {name: len(each) for name, each in kinds.items()}
            for part, kinds in zip(parts, by_part, strict=True)
        }
        if {count for kinds in counts.values() for count in kinds.values()} != {experts.num_experts}:
            raise CheckpointError(
                f"{full_layer_name}: the checkpoint has so many tensors of each kind: {counts}, where "
                f"num_local_experts in config.json is {experts.num_experts}. Quantize the original checkpoint again."
            )
        matrices = (
            [
                _stored(f"{path}.{number}.{part}", {name: each[number] for name, each in kinds.items()})
                for part, kinds in zip(parts, by_part, strict=True)
            ]
            for number in range(experts.num_experts)
        )
        device = by_part[0]["weight"][0].device
        made = experts.parts_of_checkpoint(stack, matrices, device)
        return {f"{path}.{name}": tensor for name, tensor in made.items()}


class _ReadRouter(_Reads):
    """Make a router's weight, which may be packed as an expert's matrix would be."""

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """The weight, by the pattern of its name."""
        path, target = full_layer_name.rpartition(".")[0], target_patterns[0]
        router = target.removesuffix(".weight")
        tensors = {name.removeprefix(f"{router}."): found[0] for name, found in input_dict.items()}
        weight, dtype = tensors["weight"], model.get_parameter(full_layer_name).dtype
        if (len(tensors) > 1 or not weight.is_floating_point()) and not weight.is_meta:
            # Offloaded experts have others that know their shapes.
            shapes = (getattr(module, "shapes", module) for module in model.modules())
            experts = next(each for each in shapes if isinstance(each, BitsAndBytesExperts))
            weight = experts.unpacked_router(_stored(path, tensors))
        return {target: weight.to(dtype)}
