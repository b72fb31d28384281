"""Operations by which transformers' loader fuses experts that a checkpoint stores one by one.

Mixtral's files store each expert's matrices as tensors of their own, and transformers has rules that fuse them. Some
quantizers and trainers write Llama 4's experts so, too: as linear layers `[out, in]`, under names of one of two kinds.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter
from transformers.modeling_utils import load_state_dict

from ...configuration.errors import CheckpointError
from ..moe import PARTS_OF_STACKS, STACKS, ExpertMatrix, put_matrix
from ..parallel import is_sharded
from .expert_index import expert_of


class FuseExperts(ConversionOps):
    """Copies the matrices of all experts into one stack, and frees each matrix after its copy.

    transformers' own operations hold all gate matrices, all up matrices and their stack in memory at the same time.

    Args:
        is_transposed: the stack is input-first, `[E, in, out]` (Llama 4), not `[E, out, in]` (Mixtral).
    """

    def __init__(self, is_transposed: bool = False):
        self.is_transposed = is_transposed

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
        """Return the stack, under the pattern of its name.

        Raises:
            CheckpointError: an expert lacks a matrix, has a matrix under two names, or one of another shape.
        """
        counts = {pattern: len(input_dict[pattern]) for pattern in source_patterns if pattern in input_dict}
        path, _, stack = full_layer_name.rpartition(".")
        parts = PARTS_OF_STACKS[self.is_transposed][stack]
        if len(counts) != len(parts) or len({*counts.values()}) > 1:
            raise CheckpointError(
                f"{full_layer_name}: the checkpoint has these numbers of matrices: {counts}, but every expert needs "
                f"one of each of {', '.join(parts)}. Download or copy the checkpoint again."
            )
        lists = [input_dict.pop(pattern) for pattern in counts]
        # If any parameter is sharded, `transposed_for_shards` has transposed the matrices of all input-first stacks.
        target: Any = getattr(model.get_submodule(path), stack)
        was_transposed = self.is_transposed and is_sharded(model.parameters())
        if not lists[0]:
            # This process holds none of the experts.
            return {target_patterns[0]: torch.empty(target.to_local().shape, dtype=kwargs["config"].dtype)}
        first = lists[0][0].T if was_transposed else lists[0][0]
        size_out, size_in = len(parts) * first.shape[0], first.shape[-1]
        sizes = (size_in, size_out) if self.is_transposed else (size_out, size_in)
        fused = first.new_empty(len(lists[0]), *sizes)
        for number in range(len(lists[0])):
            for part, matrices in zip(parts, lists, strict=True):
                matrix = matrices[number].T if was_transposed else matrices[number]
                matrices[number] = None
                put_matrix(matrix, fused, ExpertMatrix(number, part), self.is_transposed)
        return {target_patterns[0]: fused}


SPLIT_LLAMA4 = [
    WeightConverter(
        [
            *(f".experts.*.{part}.weight" for part in parts),
            *(f".experts.{part}s.*.weight" for part in parts),
        ],
        f".experts.{stack}",
        [FuseExperts(is_transposed=True)],
    )
    for stack, parts in PARTS_OF_STACKS[True].items()
]
"""Rules for transformers' loader, which fuse Llama 4's experts that are stored one by one, by either kind of names."""


def fuse_in_place(rules: Iterable[Any]) -> None:
    """Put `FuseExperts` into transformers' rules for Mixtral, so that each matrix is copied once, not three times."""
    for rule in rules:
        is_of_stack = (
            isinstance(rule, WeightConverter) and rule.target_patterns[0].rpartition(".")[2] in STACKS
        )
        if is_of_stack and any(isinstance(operation, MergeModulelist) for operation in rule.operations):
            rule.operations = [FuseExperts()]


def transposed_for_shards(
    model: PreTrainedModel, files: Iterable[str], state_dict: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return a state dict in which Llama 4's single experts are transposed, so that each process loads its shard.

    transformers cuts each expert's matrix along the axes of its stack. The files have matrices `[out, in]`, but Llama
    4's stacks are input-first, `[E, in, out]`. Files are memory-mapped, not read.

    Returns:
        the given `state_dict` if the model is not sharded, or the checkpoint has no such experts.
    """
    if not is_sharded(model.parameters()):
        return state_dict
    content = dict(state_dict or {})
    for file in files:
        content |= load_state_dict(file)
    # Parts named w1, w2 and w3 are Mixtral's, whose stacks are `[E, out, in]`.
    single = [
        name for name in content if (expert := expert_of(name)) and not expert.matrix.part.startswith("w")
    ]
    content |= {name: content[name].T for name in single if content[name].dim() == 2}
    return content if single else state_dict
