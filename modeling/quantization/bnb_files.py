"""Names and checks of the tensors in which bitsandbytes stores an expert; where they lie says the expert index.

The tensors are those of `BitsAndBytesExperts.unfused`. What is checked here would otherwise give other weights without
a word: codes of another table, scales of other blocks, another layout.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...configuration.errors import CheckpointError
from ..checkpoints import DTYPES, WEIGHT, Stored, expert_of, headers_of
from ..formats import BLOCKSIZES, NESTED_BLOCKSIZE, BitsAndBytesFormat, Bnb4Bit, Parts, Sizes, code_of

STATE = "quant_state.bitsandbytes__"
_REMEDY = "The checkpoint is damaged, or is not that of this config.json: quantize the original one again."
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.\w+\.experts\b")


def layer_of(path: str) -> str | None:
    """The layer's number in the name of experts, or of a tensor of theirs."""
    match = _LAYER.match(path)
    return match and match[1]


def packed_layers(files: Iterable[str]) -> dict[str, dict[str, Stored]]:
    """The layers whose experts are packed in these files: kinds of tensors there, and a tensor of each kind.

    Keys are those of `layer_of`, kinds those of `ExpertName`.
    """
    found: dict[str, dict[str, Stored]] = {}
    for stored in headers_of(files):
        expert = expert_of(stored.name.replace(".block_sparse_moe.", ".mlp."))
        if expert and (expert.kind != WEIGHT or stored.dtype in ("U8", "I8")):
            found.setdefault(layer_of(stored.name) or "", {}).setdefault(expert.kind, stored)
    return found


def first_state(kinds: Mapping[str, Stored]) -> dict[str, Any] | None:
    """Content of a `quant_state` of packed experts; None if they have none."""
    for kind, stored in kinds.items():
        if kind.startswith(STATE):
            return _facts_of(_opened(stored))
    return None


def _facts_of(stored: Stored) -> dict[str, Any]:
    """The content of a `quant_state`.

    Raises:
        CheckpointError: it is none.
    """
    try:
        content = json.loads(bytes(stored.content.flatten().tolist()))
        content["dtype"] = getattr(torch, content["dtype"])
        content["shape"] = tuple(content["shape"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{stored} cannot be read as the state of a weight in 4 bits ({type(error).__name__}: {error}). {_REMEDY}"
        ) from None
    if content.get("blocksize") not in BLOCKSIZES:
        raise CheckpointError(f"{stored} says blocksize {content.get('blocksize')}. {_REMEDY}")
    return content


# The kinds of tensors that are parts of a matrix, in their order.
_PARTS = {True: (WEIGHT, "absmax", "nested_absmax"), False: (WEIGHT, "SCB")}


def read_matrix(form: BitsAndBytesFormat, found: Mapping[str, Stored], sizes: Sizes) -> Parts:
    """The checked parts of one matrix.

    Args:
        form: that the model asks for.
        found: the matrix's tensors in the checkpoint, by kind; there is a weight.
        sizes: of the matrix.

    Raises:
        CheckpointError: a tensor is missing, has another shape or dtype, or means other weights than the format says.
    """
    kinds = _PARTS[isinstance(form, Bnb4Bit)]
    wanted = form.parts_of_one(*sizes)
    parts = [_need(found, kind).content for kind, _ in zip(kinds, wanted, strict=False)]
    if isinstance(form, Bnb4Bit):
        # Codes lie in bytes of any dtype.
        parts[0] = parts[0].contiguous().view(torch.uint8).flatten()
    elif (layout := found.get("weight_format")) is not None and layout.content.any():
        raise CheckpointError(f"{layout} is not 0, but a layout of old GPUs. {_REMEDY}")
    for kind, part, (shape, dtype) in zip(kinds, parts, wanted, strict=False):
        is_right = part.is_floating_point() if dtype.is_floating_point else part.dtype == dtype
        if tuple(part.shape) != shape or not is_right:
            raise CheckpointError(
                f"{found[kind]} has shape {list(part.shape)} and dtype {part.dtype}, where {list(shape)} and {dtype} "
                f"were expected. {_REMEDY}"
            )
    parts = [part.float() if part.is_floating_point() else part for part in parts]
    return [*parts, *_check_state(form, found, sizes)] if isinstance(form, Bnb4Bit) else parts


def _check_state(form: Bnb4Bit, found: Mapping[str, Stored], sizes: Sizes) -> list[torch.Tensor]:
    """Compare what a weight's state says with the format; the mean of its scales if these are nested."""
    state = _need(found, STATE + form.quant_type)
    said = _facts_of(state)
    wanted: dict[str, Any] = dict(blocksize=form.blocksize, shape=tuple(sizes), quant_type=form.quant_type)
    codes = {"quant_map": form.quant_type}
    if form.is_nested:
        wanted["nested_blocksize"] = NESTED_BLOCKSIZE
        codes["nested_quant_map"] = "dynamic"
    for field, value in wanted.items():
        if said.get(field) != value:
            raise CheckpointError(f"{state} says {field} {said.get(field)}, not {value}. {_REMEDY}")
    for kind, name in codes.items():
        stored, known = _need(found, kind), code_of(name, torch.device("cpu"))
        # bitsandbytes' own tolerance; NaN is not within it.
        if stored.content.shape != known.shape or not ((stored.content - known).abs() <= 1e-6).all():
            raise CheckpointError(f"{stored} has other numbers than bitsandbytes' codes have. {_REMEDY}")
    return [torch.tensor(said["nested_offset"], dtype=torch.float32)] if form.is_nested else []


def find_matrix(
    form: BitsAndBytesFormat, found: Mapping[str, Stored], sizes: Sizes
) -> list[Stored | torch.Tensor]:
    """For each part of one matrix the tensor that files have of it, or its number, which stands in a text.

    All but the numbers of codes and scales is checked. Arguments and errors as in `read_matrix`, but that headers are
    the tensors' content.
    """
    kinds = _PARTS[isinstance(form, Bnb4Bit)]
    opened = {kind: _opened(stored, is_empty=kind in kinds) for kind, stored in found.items()}
    parts = read_matrix(form, opened, sizes)
    return [found[kinds[place]] if part.is_meta else part for place, part in enumerate(parts)]


def _opened(stored: Stored, is_empty: bool = False) -> Stored:
    """A small tensor of a file, of which the header is known; or an empty one of its shape and dtype."""
    if is_empty:
        return stored._replace(content=torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta"))
    with open(stored.origin, "rb") as file:
        file.seek(stored.content.begin)
        content = file.read(stored.content.nbytes)
    found = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)
    return stored._replace(content=found.view(DTYPES[stored.dtype]).view(stored.shape))


def _need(found: Mapping[str, Stored], kind: str) -> Stored:
    if kind not in found:
        raise CheckpointError(
            f"{found[WEIGHT]}: its {kind} is missing, without which the codes mean nothing. {_REMEDY}"
        )
    return found[kind]
