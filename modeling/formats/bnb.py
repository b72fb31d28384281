"""bitsandbytes' formats, those of `Linear4bit` and `Linear8bitLt`, for the matrices of experts.

Functions of bitsandbytes quantize and unpack a matrix; each product first unpacks the matrix of its expert. Importing
this file does not import bitsandbytes.

Files store each matrix as the tensors of a linear layer, whose names end in "weight", "weight.absmax", "SCB" and so on.
In memory an expert's gate and up are parts of one stack; in files they are two linear layers, each with blocks and
nested statistics of its own (`Bnb.count`).

Shapes: O outputs, I inputs, B blocks of a matrix.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ...configuration.errors import CheckpointError
from .format import MAKERS, Format, Parts, Sizes

# The sizes in bitsandbytes' linear layers: weights that share a scale, and scales that share a nested scale.
BLOCKSIZE, NESTED_BLOCKSIZE = 64, 256
_REMEDY = (
    "The checkpoint is damaged, or does not belong to this config.json: quantize the original model again."
)


@dataclass(frozen=True)
class Bnb(Format):
    """A format of bitsandbytes. It also reads linear layers in files, with the methods of `formats.packed.Layout`.

    Each part has an axis for `count` matrices in front. Without this axis the parts are

    * for "int8": codes, `[O, I]` int8, and the largest absolute weight of each output, `[O]` float32, called SCB. A
      weight is `code * SCB / 127`, as in LLM.int8(). Unlike there, products do not round rows to 8 bits.
    * for "nf4" and "fp4": codes, `[ceil(O * I / 2)]` uint8, and a scale for each block, `[B]` float32, called absmax.
      With double quantization the scales are uint8 codes. Two more parts then hold the scales of these codes,
      `[ceil(B / 256)]` float32, called nested absmax, and the mean of the scales, `[]` float32, called offset.

    Attributes:
        compute_dtype: dtype of the products.
        quant_type: "int8", "nf4" or "fp4".
        is_nested: True if scales are quantized, too (double quantization).
        count: number of matrices of equal sizes that are stacked, but quantized separately; 2 for gate and up.
    """

    compute_dtype: torch.dtype
    quant_type: str
    is_nested: bool = False
    count: int = 1
    is_unfused_in_files = True
    in_stacks = ()

    @property
    def key(self) -> str:
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return f"bitsandbytes:{dtype}:{self.quant_type}:{int(self.is_nested)}:{self.count}"

    @property
    def suffixes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.quant_type == "int8":
            return "", "_scb"
        return ("", "_absmax", "_nested_absmax", "_nested_offset")[: 4 if self.is_nested else 2]

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the names of a matrix's tensors in files end with; the first is that of the codes."""
        if self.quant_type == "int8":
            return "weight", "SCB", "weight_format"
        state = f"quant_state.bitsandbytes__{self.quant_type}"
        beside = "absmax", "nested_absmax", "quant_map", "nested_quant_map", state
        return "weight", *(f"weight.{kind}" for kind in beside)

    def sizes_of_one(self, sizes: Sizes) -> Sizes:
        """Return the sizes of one of the `count` matrices."""
        return sizes[0] // self.count, sizes[1]

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        count, (num_out, num_in) = self.count, self.sizes_of_one(sizes)
        if self.quant_type == "int8":
            return [((count, num_out, num_in), torch.int8), ((count, num_out), torch.float32)]
        blocks = -(-num_out * num_in // BLOCKSIZE)
        codes = ((count, -(-num_out * num_in // 2)), torch.uint8)
        if not self.is_nested:
            return [codes, ((count, blocks), torch.float32)]
        nested = (count, -(-blocks // NESTED_BLOCKSIZE))
        return [codes, ((count, blocks), torch.uint8), (nested, torch.float32), ((count,), torch.float32)]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        ones = [self._quantize_one(matrix) for matrix in weight_OI.chunk(self.count)]
        return [torch.stack(part) for part in zip(*ones, strict=True)]

    def _quantize_one(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

        if self.quant_type == "int8":
            return list(int8_vectorwise_quant(weight_OI.contiguous().to(torch.float16))[:2])
        codes, state = quantize_4bit(
            weight_OI.contiguous(),
            blocksize=BLOCKSIZE,
            compress_statistics=self.is_nested,
            quant_type=self.quant_type,
        )
        nested = [state.state2.absmax, state.offset] if self.is_nested else []
        return [codes.view(-1), state.absmax, *nested]

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        ones = [self._unpack_one(one, self.sizes_of_one(sizes), dtype) for one in zip(*parts, strict=True)]
        return ones[0] if len(ones) == 1 else torch.cat(ones)

    def _unpack_one(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

        if self.quant_type == "int8":
            return int8_vectorwise_dequant(*parts).to(dtype)
        return dequantize_4bit(parts[0].view(-1, 1), self._state(parts, sizes, dtype))

    def _state(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> Any:
        """Return bitsandbytes' description of a 4-bit matrix that is unpacked to `dtype`."""
        from bitsandbytes.functional import QuantState

        device = parts[0].device
        nested = {}
        if self.is_nested:
            scales = dict(code=code_of("dynamic", device), blocksize=NESTED_BLOCKSIZE, dtype=torch.float32)
            nested = dict(offset=parts[3], state2=QuantState(absmax=parts[2], **scales))
        return QuantState(
            absmax=parts[1],
            shape=torch.Size(sizes),
            code=code_of(self.quant_type, device),
            blocksize=BLOCKSIZE,
            quant_type=self.quant_type,
            dtype=dtype,
            **nested,
        )

    def for_file(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the tensors of one matrix for files, by `kinds`; readers unpack 4 bits to `dtype`."""
        if self.quant_type == "int8":
            # 0 means row-major, the only layout of current bitsandbytes.
            return {"weight": parts[0], "SCB": parts[1], "weight_format": torch.tensor(0, dtype=torch.uint8)}
        state = self._state(parts, sizes, dtype)
        # All matrices share the lookup table, and safetensors refuses one tensor under two names.
        state.code = state.code.clone()
        beside = state.as_dict(packed=True)
        return {"weight": parts[0].view(-1, 1)} | {f"weight.{kind}": part for kind, part in beside.items()}

    def from_file(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """Return the parts of one matrix of these sizes; `tensors` are its tensors in a file, by `kinds`.

        Raises:
            CheckpointError: the tensors are of another format, or of a matrix of other sizes.
        """
        # int8 has three kinds. Of the six kinds for 4 bits the last describes the codes; lookup tables are not read.
        needed = self.kinds[: 2 + self.is_nested] + self.kinds[5:]
        if missing := [kind for kind in needed if kind not in tensors]:
            raise CheckpointError(f"{', '.join(missing)} missing. {_REMEDY}")
        if self.quant_type == "int8":
            if (layout := tensors.get("weight_format")) is not None and layout.any():
                raise CheckpointError(f"weight_format is {int(layout.max())}, not 0 (row-major). {_REMEDY}")
            return self._checked([tensors["weight"], tensors["SCB"].float()], sizes)
        state = json.loads(bytes(tensors[self.kinds[-1]].tolist()))
        names = ("quant_type", "blocksize", "shape", "nested_blocksize")
        stored = [state.get(name) for name in names]
        wanted = [self.quant_type, BLOCKSIZE, [*sizes], NESTED_BLOCKSIZE if self.is_nested else None]
        if stored != wanted:
            raise CheckpointError(f"{', '.join(names)} are {stored}, not {wanted}. {_REMEDY}")
        # Files may store two codes a byte, or these bytes as numbers of another dtype (bnb_4bit_quant_storage).
        codes = tensors["weight"].contiguous().view(torch.uint8).flatten()
        if not self.is_nested:
            return self._checked([codes, tensors["weight.absmax"].float()], sizes)
        nested = [tensors["weight.nested_absmax"].float(), torch.tensor(state["nested_offset"])]
        return self._checked([codes, tensors["weight.absmax"], *nested], sizes)

    def _checked(self, parts: list[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        # bitsandbytes does not check shapes: it would read beyond the end of tensors that are too short.
        shapes = [tuple(part.shape) for part in parts]
        wanted = [shape[1:] for shape, _ in replace(self, count=1).parts(sizes)]
        if shapes != wanted:
            raise CheckpointError(f"codes and scales have the shapes {shapes}, not {wanted}. {_REMEDY}")
        return parts

    def parts_of(
        self, matrices: Sequence[Mapping[str, torch.Tensor]], sizes: Sizes, form: Format
    ) -> list[torch.Tensor]:
        """Return the parts of the `count` matrices of an expert, which have these sizes each."""
        ones = [self.from_file(tensors, sizes) for tensors in matrices]
        return [torch.stack(part) for part in zip(*ones, strict=True)]

    def weight_of(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
        """Return the weight of a linear layer, `[O, I]`: unpacked, or as it is if the file stores it plain."""
        if set(tensors) == {"weight"} and tensors["weight"].is_floating_point():
            return tensors["weight"]
        return self._unpack_one(self.from_file(tensors, sizes), sizes, self.compute_dtype)


@lru_cache
def code_of(name: str, device: torch.device) -> torch.Tensor:
    """Return the numbers that codes mean: of "nf4" and "fp4" 16, of "dynamic", for nested scales, 256."""
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    return create_dynamic_map().to(device) if name == "dynamic" else get_4bit_type(name, device=device)


MAKERS["bitsandbytes"] = lambda dtype, kind, is_nested, count: Bnb(
    getattr(torch, dtype), kind, is_nested == "1", int(count)
)
