"""Names and checks of the tensors in which bitsandbytes stores an expert; where they lie says the expert index.

The tensors are those of `BitsAndBytesExperts.unfused`.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...configuration.errors import CheckpointError
from ..checkpoints import DTYPES, WEIGHT, Stored, expert_of, headers_of
from ..formats import BLOCKSIZES, NESTED_BLOCKSIZE, BitsAndBytesFormat, Bnb4Bit, Parts, Sizes, code_of
from .packed import check_finite

_DAMAGED = "The checkpoint is damaged: download it again, or quantize the original one."
_QUANTIZE = "Quantize the original checkpoint again."
STATE = "quant_state.bitsandbytes__"
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
            return facts_of(_opened(stored))
    return None


def facts_of(stored: Stored) -> dict[str, Any]:
    """The content of a `quant_state`.

    Raises:
        CheckpointError: it is none.
    """
    try:
        content = json.loads(bytes(stored.content.flatten().tolist()))
        # Each is read later.
        _ = content["quant_type"], tuple(content["shape"])
        content["dtype"] = getattr(torch, content["dtype"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{stored} cannot be read as the state of a weight in 4 bits ({type(error).__name__}: {error}). {_DAMAGED}"
        ) from None
    if content.get("blocksize") not in BLOCKSIZES:
        raise CheckpointError(
            f"{stored} says blocksize {content.get('blocksize')}; bitsandbytes has {BLOCKSIZES[0]} to "
            f"{BLOCKSIZES[-1]}. {_DAMAGED}"
        )
    return content


def read_matrix(form: BitsAndBytesFormat, found: Mapping[str, Stored], sizes: Sizes) -> Parts:
    """The checked parts of one matrix.

    Args:
        form: that the model asks for.
        found: the matrix's tensors in the checkpoint, by kind; there is a weight.
        sizes: of the matrix.

    Raises:
        CheckpointError: a tensor is missing, has another shape or dtype, or scales that are not numbers; or the weight
            is stored in another format.
    """
    read = _read_4_bits if isinstance(form, Bnb4Bit) else _read_8_bits
    return read(form, found, sizes)


# The kinds of tensors that are parts of a matrix, in their order.
_PARTS = {True: (WEIGHT, "absmax", "nested_absmax"), False: (WEIGHT, "SCB")}


def find_matrix(
    form: BitsAndBytesFormat, found: Mapping[str, Stored], sizes: Sizes
) -> list[Stored | torch.Tensor]:
    """For each part of one matrix the tensor that files have of it, or its number, which stands in a text.

    All but the numbers of codes and scales is checked.

    Args:
        form: that the model asks for.
        found: the matrix's tensors, by kind, with their headers for content; there is a weight.
        sizes: of the matrix.

    Raises:
        CheckpointError: as `read_matrix`.
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


def _read_8_bits(form: BitsAndBytesFormat, found: Mapping[str, Stored], sizes: Sizes) -> Parts:
    weight, scb = found[WEIGHT], _need(found, "SCB")
    _check_shape(weight, sizes, torch.int8)
    _check_shape(scb, sizes[:1])
    layout = found.get("weight_format")
    if layout is not None and layout.content.any():
        raise CheckpointError(
            f"{layout} is {layout.content.flatten()[0].item()}, a layout of old GPUs: only rows (0) are read. "
            + _QUANTIZE
        )
    return [weight.content, scb.content.float()]


def _read_4_bits(form: Any, found: Mapping[str, Stored], sizes: Sizes) -> Parts:
    weight = found[WEIGHT]
    states = {kind.removeprefix(STATE): each for kind, each in found.items() if kind.startswith(STATE)}
    for quant_type, state in states.items():
        if quant_type != form.quant_type:
            raise CheckpointError(
                f"{state} is there, but bnb_4bit_quant_type in config.json is {form.quant_type!r}. Weights and "
                "config.json do not belong together."
            )
    state = _need(found, STATE + form.quant_type)
    facts = facts_of(state)
    if facts["blocksize"] != form.blocksize:
        raise CheckpointError(
            f"{state} says blocksize {facts['blocksize']}, but other experts have {form.blocksize}. {_QUANTIZE}"
        )
    if tuple(facts["shape"]) != tuple(sizes):
        raise CheckpointError(
            f"{state} says shape {list(facts['shape'])}, but the model that config.json describes has {list(sizes)}. "
            "Weights and config.json do not belong together."
        )
    if not form.is_nested and (other := found.get("nested_absmax")):
        raise CheckpointError(
            f"{other} means double quantization, which other experts do not have. {_QUANTIZE}"
        )
    shapes = [shape for shape, _ in form.parts_of_one(*sizes)]
    codes = weight.content.contiguous().view(torch.uint8).flatten()
    if codes.shape != shapes[0]:
        raise CheckpointError(
            f"{weight} holds {codes.numel()} bytes, where {list(sizes)} weights in 4 bits take {shapes[0][0]}. "
            + _DAMAGED
        )
    absmax = _need(found, "absmax")
    _check_codes(_need(found, "quant_map"), form.quant_type)
    if not form.is_nested:
        _check_shape(absmax, shapes[1])
        return [codes, absmax.content.float()]
    _check_shape(absmax, shapes[1], torch.uint8)
    nested = _need(found, "nested_absmax")
    _check_shape(nested, shapes[2])
    _check_codes(_need(found, "nested_quant_map"), "dynamic")
    offset = facts.get("nested_offset")
    if facts.get("nested_blocksize") != NESTED_BLOCKSIZE or not isinstance(offset, int | float):
        raise CheckpointError(
            f"{state} says nested_blocksize {facts.get('nested_blocksize')} and nested_offset {offset}, where "
            f"{NESTED_BLOCKSIZE} and a number were expected. {_QUANTIZE}"
        )
    if not math.isfinite(offset):
        raise CheckpointError(f"{state} says nested_offset {offset}. {_DAMAGED}")
    return [codes, absmax.content, nested.content.float(), torch.tensor(offset, dtype=torch.float32)]


def _need(found: Mapping[str, Stored], kind: str) -> Stored:
    if kind not in found:
        weight = found[WEIGHT]
        name = f"{weight.name.removesuffix('weight')}{kind}" if kind == "SCB" else f"{weight.name}.{kind}"
        raise CheckpointError(
            f"{weight.origin}: {name} is missing, without which the codes in {weight.name} mean nothing. {_DAMAGED}"
        )
    return found[kind]


def _check_shape(stored: Stored, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Check a tensor's shape and dtype, which is that of scales if None; scales must be finite."""
    tensor = stored.content
    is_known = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    if tuple(tensor.shape) != tuple(shape) or not is_known:
        found, wanted = (str(each).removeprefix("torch.") for each in (tensor.dtype, dtype or torch.float32))
        reason = "Weights and config.json do not belong together."
        if dtype is None and tensor.ndim > len(shape):
            reason = (
                "bitsandbytes leaves such scales if a weight is saved after a pass on a CPU; their order is lost. "
                + _QUANTIZE
            )
        raise CheckpointError(
            f"{stored} has shape {list(tensor.shape)} and dtype {found}, where {list(shape)} and {wanted} were "
            f"expected. {reason}"
        )
    if dtype is None:
        check_finite(tensor, stored)


def _check_codes(stored: Stored, name: str) -> None:
    known = code_of(name, torch.device("cpu"))
    found = stored.content
    # bitsandbytes' own tolerance; NaN is not within it.
    if found.shape != known.shape or not ((found - known).abs() <= 1e-6).all():
        raise CheckpointError(f"{stored} has other numbers than bitsandbytes' codes have. {_DAMAGED}")
