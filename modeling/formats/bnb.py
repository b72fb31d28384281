"""bitsandbytes' formats: the weights of `Linear4bit` and `Linear8bitLt`, for the experts' matrices.

bitsandbytes' own functions quantize and unpack them; a product unpacks one expert's matrix first, on every device.
Files store each matrix as the tensors of a linear layer, with the name suffixes "weight", "weight.absmax", "SCB" …
An expert's gate and up are one stack here, but two linear layers in files, with separate blocks and nested statistics
(`Bnb.count`).

bitsandbytes is imported when a matrix is quantized or unpacked.

Shapes: O outputs, I inputs, B blocks of a matrix.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...configuration.errors import CheckpointError
from .format import MAKERS, Format, Parts, Sizes

# Weights of a block, as in bitsandbytes' linear layers; with double quantization, blocks that share a nested scale.
BLOCKSIZE, NESTED_BLOCKSIZE = 64, 256
_REMEDY = "The checkpoint is damaged, or is not that of this config.json: quantize the original one again."


@dataclass(frozen=True)
class Bnb(Format):
    """A format of bitsandbytes', which also reads the linear layers of folders in it, as `formats.packed.Layout` does.

    Parts have an axis for the matrix in front. Of one matrix they are

    * "int8": codes `[O, I]` int8, and the largest absolute weight of each output, `[O]` float32, which bitsandbytes
      calls SCB; a weight is `code * SCB / 127`. Weights are as in LLM.int8(), but rows stay in the products' dtype:
      they are not rounded to 8 bits, so outliers need no treatment.
    * "nf4" and "fp4": codes `[ceil(O * I / 2)]` uint8, and a scale for each block `[B]` float32, called absmax. With
      double quantization the scales are uint8 codes; then follow their own scales `[ceil(B / 256)]` float32, called
      nested absmax, and the mean of the scales `[]` float32, called offset.

    Attributes:
        compute_dtype: dtype of the products.
        quant_type: "int8", "nf4" or "fp4".
        is_nested: the scales are quantized, too (double quantization).
        count: number of stacked matrices of equal sizes that are quantized separately.
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
        """Name suffixes of a matrix's tensors in files, first of those that are parts."""
        if self.quant_type == "int8":
            return "weight", "SCB", "weight_format"
        state = f"quant_state.bitsandbytes__{self.quant_type}"
        beside = "absmax", "nested_absmax", "quant_map", "nested_quant_map", state
        return "weight", *(f"weight.{kind}" for kind in beside)

    def sizes_of_one(self, sizes: Sizes) -> Sizes:
        """Return the sizes of one of the matrices."""
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
        """Return bitsandbytes' description of a matrix of 4 bits."""
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
        """Return one matrix's tensors for files, by name suffix; `dtype` is that of unpacked weights."""
        if self.quant_type == "int8":
            # 0 is the row-major layout, the only one that current bitsandbytes has.
            return {"weight": parts[0], "SCB": parts[1], "weight_format": torch.tensor(0, dtype=torch.uint8)}
        state = self._state(parts, sizes, dtype)
        # Copy the lookup table, which matrices share: safetensors refuses one tensor under two names.
        state.code = state.code.clone()
        beside = state.as_dict(packed=True)
        return {"weight": parts[0].view(-1, 1)} | {f"weight.{kind}": part for kind, part in beside.items()}

    def from_file(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """Return the parts of one matrix of these sizes from its tensors in a file, by name suffix.

        Raises:
            CheckpointError: the tensors are of another format, or of a matrix of other sizes.
        """
        if self.quant_type == "int8":
            if (layout := tensors.get("weight_format")) is not None and layout.any():
                raise CheckpointError(f"weight_format is not 0, but a layout of old GPUs. {_REMEDY}")
            return [tensors["weight"], tensors["SCB"].float()]
        state = json.loads(bytes(tensors[self.kinds[-1]].tolist()))
        names = ("quant_type", "blocksize", "shape", "nested_blocksize")
        stored = [state.get(name) for name in names]
        wanted = [self.quant_type, BLOCKSIZE, [*sizes], NESTED_BLOCKSIZE if self.is_nested else None]
        if stored != wanted:
            raise CheckpointError(f"{', '.join(names)} are {stored}, not {wanted}. {_REMEDY}")
        # A file may store the bytes of the codes in any dtype.
        codes = tensors["weight"].contiguous().view(torch.uint8).flatten()
        if not self.is_nested:
            return [codes, tensors["weight.absmax"].float()]
        offset = torch.tensor(state["nested_offset"])
        return [codes, tensors["weight.absmax"], tensors["weight.nested_absmax"].float(), offset]

    def parts_of(
        self, matrices: Sequence[Mapping[str, torch.Tensor]], sizes: Sizes, form: Format
    ) -> list[torch.Tensor]:
        """Return the parts of matrices of these sizes, such as an expert's gate and up."""
        ones = [self.from_file(tensors, sizes) for tensors in matrices]
        return [torch.stack(part) for part in zip(*ones, strict=True)]

    def weight_of(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
        """Return the weight of a layer, unpacked unless it is plain already."""
        if set(tensors) == {"weight"} and tensors["weight"].is_floating_point():
            return tensors["weight"]
        return self._unpack_one(self.from_file(tensors, sizes), sizes, self.compute_dtype)


@lru_cache
def code_of(name: str, device: torch.device) -> torch.Tensor:
    """Return the lookup table of codes: "nf4", "fp4", or "dynamic" for doubly quantized scales."""
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    return create_dynamic_map().to(device) if name == "dynamic" else get_4bit_type(name, device=device)


MAKERS["bitsandbytes"] = lambda dtype, kind, is_nested, count: Bnb(
    getattr(torch, dtype), kind, is_nested == "1", int(count)
)
