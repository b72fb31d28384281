"""Routed experts in bitsandbytes' formats, and the linear layers that they are in files.

An expert N is stored un-fused: `experts.N.gate_proj`, `up_proj` and `down_proj`, or Mixtral's `w1`, `w3` and `w2`.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...configuration.errors import CheckpointError
from ..checkpoints import DTYPES, WEIGHT, Stored, expert_of, headers_of
from ..formats import Bnb4Bit, Bnb8Bit, Parts, Separate, Sizes
from ..moe import PARTS_OF_STACKS, STACKS, Experts
from .packed import QuantizedExperts

_REMEDY = "The checkpoint is damaged, or is not that of this config.json: quantize the original one again."


class BitsAndBytesExperts(QuantizedExperts):
    """Routed experts of which each matrix is what a linear layer of bitsandbytes would hold.

    Attributes:
        weight_dtype: of the model, which files record.
    """

    is_packed_one_by_one = True
    # Of one kind, which the base class does not know.
    formats: dict[str, Any]

    def __init__(self, experts: Experts, form: Bnb4Bit | Bnb8Bit):
        weight_dtype = experts.dtype
        super().__init__(experts, Separate(form, 1), gate_up_form=Separate(form, 2))
        self.weight_dtype = weight_dtype

    def _one(self, stack: str) -> tuple[Any, Sizes]:
        """Format and sizes of one matrix as files have it."""
        return self.formats[stack].form, self.formats[stack].sizes_of_one(self.sizes[stack])

    @torch.no_grad()
    def parts_of_checkpoint(
        self, stack: str, experts: Iterable[Sequence[Mapping[str, Stored]]], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Read the parts of a stack to a device, by name.

        Args:
            stack: its name.
            experts: of each expert its matrices in the checkpoint, as tensors by kind.
            device: of the parts.
        """
        form, sizes = self._one(stack)
        wholes = self.empty_parts(stack, device)
        for number, matrices in enumerate(experts if device.type != "meta" else ()):
            for place, kinds in enumerate(matrices):
                for whole, part in zip(wholes.values(), _read(form, kinds, sizes), strict=True):
                    whole[number, place] = part
        return wholes

    def unpacked_router(self, kinds: Mapping[str, Stored]) -> torch.Tensor:
        """Dequantize the weight `[experts, hidden]` of a router from a checkpoint's tensors, by kind."""
        form, (hidden_size, _) = self._one("down_proj")
        sizes = self.num_experts, hidden_size
        return form.matrix(_read(form, kinds, sizes), sizes, self.weight_dtype)

    def matrix_in_files(self, stack: str, kinds: Mapping[str, Stored]) -> list[Stored | torch.Tensor]:
        """For each part of one matrix the tensor that files have of it, or its number, which stands in a text.

        All but the numbers of codes and scales is checked.

        Args:
            stack: that has the matrix.
            kinds: the headers of the matrix's tensors, by kind.
        """
        form, sizes = self._one(stack)
        opened = {kind: _opened(stored, is_empty=kind in form.kinds) for kind, stored in kinds.items()}
        parts = _read(form, opened, sizes)
        return [kinds[form.kinds[number]] if part.is_meta else part for number, part in enumerate(parts)]

    def name_of_layer(self, path: str, stack: str, number: int, place: int) -> str:
        """Return the name of the linear layer of an un-fused matrix.

        Args:
            path: of these experts.
            stack: that has the matrix.
            number: of the expert.
            place: of the matrix in the expert's part of the stack.
        """
        return f"{path}.{number}.{PARTS_OF_STACKS[self.is_transposed][stack][place]}"

    def unfused(self, path: str, storage: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of all linear layers that these experts are un-fused, with their names; in the same memory.

        Args:
            path: of these experts.
            storage: dtype in which files hold the bytes of 4-bit codes.
        """
        for number, stack in itertools.product(range(self.num_experts), STACKS):
            form, sizes = self._one(stack)
            for place in range(self.formats[stack].count):
                # In storages of their own: tensors that share one are saved into one file.
                parts = [torch.from_dlpack(part[number, place]) for part in self.parts(stack)]
                if parts[0].dtype == torch.uint8:
                    parts[0] = parts[0].view(storage)
                name = self.name_of_layer(path, stack, number, place)
                for kind, tensor in form.for_file(parts, sizes, self.weight_dtype).items():
                    yield f"{name}.{kind}", tensor


def packed_in(files: Iterable[str]) -> set[str]:
    """List the experts that are packed in these files, by layer number and path: "3.mlp.experts"."""
    return {
        expert.experts.rpartition("layers.")[2]
        for stored in headers_of(files)
        if (expert := expert_of(stored.name.replace(".block_sparse_moe.", ".mlp.")))
        and (expert.kind != WEIGHT or stored.dtype in ("U8", "I8"))
    }


def _read(form: Bnb4Bit | Bnb8Bit, found: Mapping[str, Stored], sizes: Sizes) -> Parts:
    """Read the parts of one matrix from its tensors in the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, has another shape or dtype, or means other weights than the format says.
    """
    try:
        parts = form.from_file({kind: stored.content for kind, stored in found.items()}, sizes)
    except (AssertionError, KeyError, ValueError) as error:
        says = (
            f"{error} is missing beside it" if isinstance(error, KeyError) else " ".join(str(error).split())
        )
        raise CheckpointError(f"{found[WEIGHT]}: {says}. {_REMEDY}") from error
    parts = [part.float() if part.is_floating_point() else part for part in parts]
    for kind, part, (shape, dtype) in zip(form.kinds, parts, form.parts(sizes), strict=False):
        if (tuple(part.shape), part.dtype) != (shape, dtype):
            raise CheckpointError(
                f"{found[kind]} has shape {list(part.shape)} and dtype {part.dtype}, where {list(shape)} and {dtype} "
                f"were expected. {_REMEDY}"
            )
    return parts


def _opened(stored: Stored, is_empty: bool = False) -> Stored:
    """Read a small tensor of a file by its header, or make an empty one of its shape and dtype."""
    if is_empty:
        return stored._replace(content=torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta"))
    with open(stored.origin, "rb") as file:
        file.seek(stored.content.begin)
        content = file.read(stored.content.nbytes)
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)
    return stored._replace(content=tensor.view(DTYPES[stored.dtype]).view(stored.shape))
