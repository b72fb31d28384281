"""bitsandbytes' formats: the weights of `Linear4bit` and `Linear8bitLt`, for the experts' matrices.

bitsandbytes' own functions quantize and unpack them; a product unpacks one expert's matrix first, on every device.
Files store each matrix as the tensors of a linear layer, with the name suffixes "weight", "weight.absmax", "SCB" …
An expert's gate and up are one stack here, but two linear layers in files, with separate blocks and nested statistics
(`Bnb.count`).

bitsandbytes is imported when a matrix is quantized or unpacked.

Shapes: O outputs, I inputs, B blocks of a matrix.
"""

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from ...configuration.errors import CheckpointError
from .format import MAKERS, Format, Parts, Sizes

# Weights of a block, as in bitsandbytes' linear layers; with double quantization, blocks that share a nested scale.
BLOCKSIZE, NESTED_BLOCKSIZE = 64, 256
# Weights that are quantized at once, a multiple of all block sizes: bitsandbytes' CPU kernel takes 24 bytes for each.
_NUMBERS_AT_ONCE = 1 << 16
# Alignment of codes in bytes: CUDA kernels load several at once.
_ALIGNMENT = 16
_REMEDY = "The checkpoint is damaged, or is not that of this config.json: quantize the original one again."


@dataclass(frozen=True)
class Bnb(Format):
    """A format of bitsandbytes', which is also the `reading.Layout` of folders in it.

    Parts have an axis for the matrix in front.

    Attributes:
        compute_dtype: dtype of the products.
        count: number of stacked matrices of equal sizes that are quantized separately.
        kinds: name suffixes of a matrix's tensors in files, first of those that are parts.
    """

    compute_dtype: torch.dtype
    count: int = 1
    is_unfused_in_files = True
    kinds: ClassVar[tuple[str, ...]]
    stacks = ()

    def sizes_of_one(self, sizes: Sizes) -> Sizes:
        """Return the sizes of one of the matrices."""
        return sizes[0] // self.count, sizes[1]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        ones = [self._quantize_one(matrix) for matrix in weight_OI.chunk(self.count)]
        return [torch.stack(part) for part in zip(*ones, strict=True)]

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        ones = [self._unpack_one(one, self.sizes_of_one(sizes), dtype) for one in zip(*parts, strict=True)]
        return ones[0] if len(ones) == 1 else torch.cat(ones)

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

    def from_file(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """Return the parts of one matrix from its tensors in a file.

        Args:
            tensors: by name suffix.
            sizes: of this matrix.

        Raises:
            CheckpointError: a tensor is missing, has another shape or dtype, or is of another format.
        """
        try:
            parts = self._read_one(tensors, sizes)
        except KeyError as error:
            raise CheckpointError(f"{error} is missing. {_REMEDY}") from error
        except ValueError as error:
            raise CheckpointError(f"{error}. {_REMEDY}") from error
        parts = [part.float() if part.is_floating_point() else part for part in parts]
        shapes = self.parts((self.count * sizes[0], sizes[1]))
        for kind, part, ((_, *shape), dtype) in zip(self.kinds, parts, shapes, strict=False):
            if [*part.shape] != shape or part.dtype != dtype:
                found = f"shape {[*part.shape]} and dtype {part.dtype}"
                raise CheckpointError(f"{kind} has {found}, not shape {shape} and dtype {dtype}. {_REMEDY}")
        return parts

    @abstractmethod
    def for_file(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return one matrix's tensors for files, by name suffix; `dtype` is that of unpacked weights."""

    # Functions for one matrix, whose parts have no axis in front.

    @abstractmethod
    def _quantize_one(self, weight_OI: torch.Tensor) -> list[torch.Tensor]: ...

    @abstractmethod
    def _unpack_one(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor: ...

    @abstractmethod
    def _read_one(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> list[torch.Tensor]: ...


@dataclass(frozen=True)
class Bnb4Bit(Bnb):
    """Codes of 4 bits and a scale for each block of weights, as in `Linear4bit`.

    Parts of one matrix: codes `[ceil(O * I / 2)]` uint8, and scales `[B]` float32, called absmax. With double
    quantization the scales are uint8 codes; then follow their own scales `[ceil(B / 256)]` float32, called nested
    absmax, and the mean of the scales `[]` float32, called offset.

    Attributes:
        quant_type: "nf4" or "fp4".
        is_nested: the scales are quantized, too (double quantization).
    """

    quant_type: str = "nf4"
    is_nested: bool = False
    kinds = (
        "weight",
        "weight.absmax",
        "weight.nested_absmax",
        "weight.quant_map",
        "weight.nested_quant_map",
        "weight.quant_state.bitsandbytes__nf4",
        "weight.quant_state.bitsandbytes__fp4",
    )

    @property
    def suffixes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("", "_absmax", "_nested_absmax", "_nested_offset")[: 4 if self.is_nested else 2]

    @property
    def key(self) -> str:
        dtype, nested = str(self.compute_dtype).removeprefix("torch."), ":nested" if self.is_nested else ""
        return f"bitsandbytes-4bit:{dtype}:{self.count}:{self.quant_type}{nested}"

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        numbers, count = math.prod(self.sizes_of_one(sizes)), self.count
        blocks = -(-numbers // BLOCKSIZE)
        codes = ((count, -(-numbers // 2)), torch.uint8)
        if not self.is_nested:
            return [codes, ((count, blocks), torch.float32)]
        nested = (count, -(-blocks // NESTED_BLOCKSIZE))
        return [codes, ((count, blocks), torch.uint8), (nested, torch.float32), ((count,), torch.float32)]

    def _quantize_one(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        from bitsandbytes.functional import quantize_4bit, quantize_blockwise

        numbers = weight_OI.reshape(-1)
        codes, scales = [], []
        for some in numbers.split(_NUMBERS_AT_ONCE if numbers.is_cpu else numbers.numel()):
            codes_of_some, state = quantize_4bit(some, blocksize=BLOCKSIZE, quant_type=self.quant_type)
            codes.append(codes_of_some.view(-1))
            scales.append(state.absmax)
        absmax = torch.cat(scales)
        if not self.is_nested:
            return [torch.cat(codes), absmax]
        offset = absmax.mean()
        codes_of_scales, state = quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCKSIZE)
        return [torch.cat(codes), codes_of_scales, state.absmax, offset]

    def _unpack_one(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        codes = parts[0]
        # With sizes that are not multiples of 32, an expert's codes are not aligned as the kernels require.
        if codes.is_cuda and codes.data_ptr() % _ALIGNMENT:
            codes = codes.clone()
        return dequantize_4bit(codes.view(-1, 1), self._state(parts, sizes, dtype))

    def _state(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> Any:
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

    def _read_one(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        state = tensors[f"weight.quant_state.bitsandbytes__{self.quant_type}"]
        facts = json.loads(bytes(state.tolist()))
        names = ("quant_type", "blocksize", "shape", "nested_blocksize")
        given = [facts.get(name) for name in names]
        wanted = [self.quant_type, BLOCKSIZE, [*sizes], NESTED_BLOCKSIZE if self.is_nested else None]
        if given != wanted:
            raise ValueError(f"{', '.join(names)} are {given}, not {wanted}")
        # A file may store the bytes of the codes in any dtype.
        parts = [tensors["weight"].contiguous().view(torch.uint8).flatten(), tensors["weight.absmax"]]
        tables = {self.quant_type: tensors["weight.quant_map"]}
        if self.is_nested:
            parts += [tensors["weight.nested_absmax"], torch.tensor(facts["nested_offset"])]
            tables["dynamic"] = tensors["weight.nested_quant_map"]
        for name, table in tables.items():
            if not torch.allclose(table, code_of(name, table.device), rtol=0, atol=1e-6):
                raise ValueError(f"the {name} table has other numbers than bitsandbytes' codes have")
        return parts

    def for_file(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        state = self._state(parts, sizes, dtype)
        # Copy the lookup table, which matrices share: safetensors refuses one tensor under two names.
        state.code = state.code.clone()
        beside = state.as_dict(packed=True)
        return {"weight": parts[0].view(-1, 1)} | {f"weight.{kind}": part for kind, part in beside.items()}


@dataclass(frozen=True)
class Bnb8Bit(Bnb):
    """Codes of 8 bits and a scale for each output, as in `Linear8bitLt`.

    Parts of one matrix: codes `[O, I]` int8, and the largest absolute weight of each output, `[O]` float32, which
    bitsandbytes calls SCB; a weight is `code * SCB / 127`. Weights are as in LLM.int8(), but rows stay in the products'
    dtype: they are not rounded to 8 bits, so outliers need no treatment.
    """

    suffixes = ("", "_scb")
    kinds = ("weight", "SCB", "weight_format")

    @property
    def key(self) -> str:
        return f"bitsandbytes-8bit:{str(self.compute_dtype).removeprefix('torch.')}:{self.count}"

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        num_out, num_in = self.sizes_of_one(sizes)
        return [((self.count, num_out, num_in), torch.int8), ((self.count, num_out), torch.float32)]

    def _quantize_one(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        from bitsandbytes.functional import int8_vectorwise_quant

        return list(int8_vectorwise_quant(weight_OI.contiguous().to(torch.float16))[:2])

    def _unpack_one(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(*parts).to(dtype)

    def _read_one(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        if (layout := tensors.get("weight_format")) is not None and layout.any():
            raise ValueError("weight_format is not 0, but a layout of old GPUs")
        return [tensors["weight"], tensors["SCB"]]

    def for_file(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        # 0 is the row-major layout, the only one that current bitsandbytes has.
        return {"weight": parts[0], "SCB": parts[1], "weight_format": torch.tensor(0, dtype=torch.uint8)}


@lru_cache
def code_of(name: str, device: torch.device) -> torch.Tensor:
    """Return the lookup table of codes: "nf4", "fp4", or "dynamic" for doubly quantized scales."""
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    return create_dynamic_map().to(device) if name == "dynamic" else get_4bit_type(name, device=device)


MAKERS["bitsandbytes-4bit"] = lambda dtype, count, kind, *nested: Bnb4Bit(
    getattr(torch, dtype), int(count), kind, bool(nested)
)
MAKERS["bitsandbytes-8bit"] = lambda dtype, count: Bnb8Bit(getattr(torch, dtype), int(count))
