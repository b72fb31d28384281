"""Mistral AI's names as data, and the check that a mixture has all its experts.

Dense tensors have the names of LLaMA, and files are sliced along the same axes. Q and k are rotated in neighbouring
pairs, as Meta's. The target side has the names of stock files.

E experts, H hidden size, I inner size of an expert. In mistral-inference's layout each expert has matrices w1 and w3
`[I, H]` and w2 `[H, I]`. In the first release of Mixtral 8x7B the rows of all experts stand in one matrix: w1, w3 and,
transposed, w2, each `[E * I, H]`.

Sources: `Transformer`, `TransformerBlock` and `MoeLayer` of mistralai/mistral-inference; transformers' former script
convert_mixtral_weights_to_hf.py for the first release.
"""

import re
from collections.abc import Iterator, Mapping

from ...configuration.errors import CheckpointError
from ..hf import stack_rows
from ..io import LazyTensor, Operation, Row, Table, check_alike
from ..meta import Params, llama_table


class _ExpertsInOneMatrix(Operation):
    """w1, w3 and w2 of the first release, each `[E * I, H]`, to the stacks of the model. This operation only reads."""

    def convert(self, tensors, sizes):
        """Cut out each expert's rows; w2's are transposed."""
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


_GATE = "model.layers.{i}.block_sparse_moe.gate.weight"
_MIXTURE = (
    Row("layers.{i}.feed_forward.gate.weight", _GATE),
    Row(
        "layers.{i}.feed_forward.experts.{e}.w{part}.weight",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w{part}.weight",
    ),
)
_FIRST_RELEASE = (
    Row("layers.{i}.block_sparse_moe.gate.weight", _GATE),
    Row(
        tuple(f"layers.{{i}}.block_sparse_moe.{name}" for name in ("w1", "w3", "w2")),
        ("model.layers.{i}.mlp.experts.gate_up_proj", "model.layers.{i}.mlp.experts.down_proj"),
        _ExpertsInOneMatrix(),
    ),
)
_OF_MIXTURE = re.compile(r"layers\.\d+\.(block_sparse_moe|feed_forward\.(gate|experts))\..*")


def mistral_table(embedding_axis: int = 1) -> Table:
    """The table of Mistral and Mixtral; written are the names of mistral-inference.

    Args:
        embedding_axis: axis along which several files slice the embedding.
    """
    return (*llama_table(embedding_axis), *_MIXTURE, *_FIRST_RELEASE)


def check_experts(params: Params, tensors: Mapping[str, LazyTensor], place: str) -> None:
    """Refuse a mixture with a router or an expert too few or too many, measured by params.json."""
    found = {name for name in tensors if _OF_MIXTURE.fullmatch(name)}
    mixture = params.part("moe")
    if mixture is None:
        if found:
            raise CheckpointError(
                f"{place}: {min(found)} is there, but {params.origin} has no moe; it is another model's."
            )
        return
    layers, experts = params.integer("n_layers"), mixture.integer("num_experts")
    is_first_release = any(".block_sparse_moe." in name for name in found)
    wanted = set()
    for name in _names(layers, experts, is_first_release):
        # At once: the file may say any number.
        if name not in found:
            raise CheckpointError(
                f"{place}: {name} missing, though {params.origin} says n_layers = {layers} and moe.num_experts = "
                f"{experts}. A file is not whole, or params.json is another model's."
            )
        wanted.add(name)
    if others := found - wanted:
        raise CheckpointError(
            f"{place}: {min(others)} is there, but {params.origin} says moe.num_experts = {experts}."
        )


def _names(layers: int, experts: int, is_first_release: bool) -> Iterator[str]:
    """The names of a mixture's routers and experts."""
    for layer in range(layers):
        if is_first_release:
            yield from (
                f"layers.{layer}.block_sparse_moe.{name}" for name in ("gate.weight", "w1", "w2", "w3")
            )
            continue
        yield f"layers.{layer}.feed_forward.gate.weight"
        for expert in range(experts):
            yield from (f"layers.{layer}.feed_forward.experts.{expert}.w{part}.weight" for part in (1, 2, 3))
