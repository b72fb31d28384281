"""Operations by which transformers' loader fuses experts that a checkpoint stores one by one.

Mixtral's files have every expert's matrices as tensors of their own; stock's own rules fuse them. Files of Llama 4 from
quantizers and trainers have them, too, as linear layers `[out, in]`, in one of two spellings.
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
    """Fuse the matrices of each expert into a stack; each is copied once to its place, and then freed.

    transformers' own operations hold gate, up and their stack in memory at the same time.
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
        """Return the stack, by the pattern of its name.

        Raises:
            CheckpointError: an expert lacks a matrix, has one in two spellings, or one of another shape.
        """
        counts = {pattern: len(input_dict[pattern]) for pattern in source_patterns if pattern in input_dict}
        path, _, stack = full_layer_name.rpartition(".")
        parts = PARTS_OF_STACKS[self.is_transposed][stack]
        if len(counts) != len(parts) or len({*counts.values()}) > 1:
            raise CheckpointError(
                f"{full_layer_name}: the checkpoint has {counts} matrices, but every expert needs one of each of "
                f"{', '.join(parts)}. Download or copy the checkpoint again."
            )
        lists = [input_dict.pop(pattern) for pattern in counts]
        # In a sharded model, `transposed_for_shards` has transposed the matrices of all input-first stacks, also of
        # stacks that are not sharded because their size does not divide.
        target: Any = getattr(model.get_submodule(path), stack)
        is_turned = self.is_transposed and is_sharded(model.parameters())
        if not lists[0]:
            # This process holds none of the experts.
            return {target_patterns[0]: torch.empty(target.to_local().shape, dtype=kwargs["config"].dtype)}
        first = lists[0][0].T if is_turned else lists[0][0]
        size_out, size_in = len(parts) * first.shape[0], first.shape[-1]
        sizes = (size_in, size_out) if self.is_transposed else (size_out, size_in)
        whole = first.new_empty(len(lists[0]), *sizes)
        for number in range(len(lists[0])):
            for part, matrices in zip(parts, lists, strict=True):
                matrix = matrices[number].T if is_turned else matrices[number]
                matrices[number] = None
                put_matrix(matrix, whole, ExpertMatrix(number, part), self.is_transposed)
        return {target_patterns[0]: whole}


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
"""Rules of transformers' loader for Llama 4's experts one by one."""


def fuse_in_place(rules: Iterable[Any]) -> None:
    """Make stock's rules of a load fuse experts in place: each matrix is copied once, not up to three times."""
    for rule in rules:
        stacks = isinstance(rule, WeightConverter) and rule.target_patterns[0].rpartition(".")[2] in STACKS
        if stacks and any(isinstance(operation, MergeModulelist) for operation in rule.operations):
            rule.operations = [FuseExperts()]


def transposed_for_shards(
    model: PreTrainedModel, files: Iterable[str], state_dict: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return a state dict with single experts' matrices transposed, so that processes cut the right shards of them.

    transformers cuts a matrix along the axes of its stack, in which Llama 4's matrices are transposed. Files are only
    mapped.

    Returns:
        None if there are no such experts, or the model is not sharded.
    """
    if not is_sharded(model.parameters()):
        return state_dict
    content = dict(state_dict or {})
    for file in files:
        content |= load_state_dict(file)
    split = [
        name for name in content if (expert := expert_of(name)) and not expert.matrix.part.startswith("w")
    ]
    content |= {name: content[name].T for name in split if content[name].dim() == 2}
    return content if split else state_dict
