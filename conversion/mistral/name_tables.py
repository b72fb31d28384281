"""Mistral AI's names as data.

Dense tensors have the names of LLaMA, and files are sliced along the same axes. Q and k are rotated in neighbouring
pairs, as Meta's. The target side has the names of stock files, with `mlp` for `block_sparse_moe`.

E experts, H hidden size, I inner size of an expert. In mistral-inference's layout each expert has matrices w1 and w3
`[I, H]` and w2 `[H, I]`. In the first release of Mixtral 8x7B the rows of all experts stand in one matrix: w1, w3 and,
transposed, w2, each `[E * I, H]`.

Sources: `Transformer`, `TransformerBlock` and `MoeLayer` of mistralai/mistral-inference; transformers' former script
convert_mixtral_weights_to_hf.py for the first release.
"""

from ...configuration.errors import CheckpointError
from ..hf import stack_rows
from ..io import Operation, Row, Table, check_alike
from ..meta import llama_table


class _ExpertsInOneMatrix(Operation):
    """w1, w3 and w2 of the first release, each `[E * I, H]`, to the stacks of the model. This operation only reads."""

    def convert(self, tensors, sizes):
        experts = sizes.num_local_experts
        for tensor in tensors:
            if tensor.ndim != 2 or tensor.shape[0] % experts:
                raise CheckpointError(
                    f"{tensor.origin} has shape {list(tensor.shape)}; expected: a matrix of {experts} experts' rows, "
                    "as many for each."
                )
        check_alike(tensors)
        inner = tensors[0].shape[0] // experts
        gates, ups, downs = (
            [tensor.cut(0, number * inner, (number + 1) * inner) for number in range(experts)]
            for tensor in tensors
        )
        return list(stack_rows(gates, ups, [down.transpose() for down in downs]))


_MLP = "model.layers.{i}.mlp."
_MIXTURE = (
    Row("layers.{i}.feed_forward.gate.weight", _MLP + "gate.weight"),
    Row("layers.{i}.feed_forward.experts.{e}.w{part}.weight", _MLP + "experts.{e}.w{part}.weight"),
)
_FIRST_RELEASE = (
    Row("layers.{i}.block_sparse_moe.gate.weight", _MLP + "gate.weight"),
    Row(
        tuple(f"layers.{{i}}.block_sparse_moe.{name}" for name in ("w1", "w3", "w2")),
        (_MLP + "experts.gate_up_proj", _MLP + "experts.down_proj"),
        _ExpertsInOneMatrix(),
    ),
)


def mistral_table(embedding_axis: int = 1, is_first_release: bool = False) -> Table:
    """The table of Mistral and Mixtral; several files slice the embedding along `embedding_axis`."""
    return (*llama_table(embedding_axis), *(_FIRST_RELEASE if is_first_release else _MIXTURE))
