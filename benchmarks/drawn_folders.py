"""Write folders of models of published sizes with random quantized weights.

Each matrix gets its integer codes from one block of random codes, at an offset of its own: drawing all codes would take
longer than writing them. The dequantized weights have the standard deviation of newly initialised ones.
"""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

import llamoe
from llamoe.configuration.base import LlamoeBaseConfig
from llamoe.configuration.quantization import as_quantization
from llamoe.conversion.checkpoint import Checkpoint, expected_shapes
from llamoe.conversion.hf import save_hf
from llamoe.conversion.io import LazyTensor, WriteOptions
from llamoe.modeling.formats import Int4, Int8

STD = 0.02
W4A16 = "w4a16"
GROUP = 128
# Modules that llm-compressor's recipe for Llama 4 leaves in 16 bits.
KEPT = ("lm_head", "self_attn", "router", "vision_model", "multi_modal_projector")


class Drawn(LazyTensor):
    """A bfloat16 weight: ones for norms, zeros for experts (their codes are random instead), else random."""

    def __init__(
        self, name: str, shape: tuple[int, ...], generator: torch.Generator, blanks: dict[Any, torch.Tensor]
    ):
        super().__init__(shape, torch.bfloat16, name)
        self._generator, self._blanks = generator, blanks

    def _read(self, start: int, stop: int) -> torch.Tensor:
        shape = self._piece_shape(start, stop)
        if len(shape) == 3:
            if shape not in self._blanks:
                self._blanks[shape] = torch.zeros(shape, dtype=self.dtype)
            return self._blanks[shape]
        if "norm" in self.origin:
            return torch.ones(shape, dtype=self.dtype)
        return torch.randn(shape, generator=self._generator).mul_(STD).to(self.dtype)


class Draws:
    """Makes quantized matrices; their codes are pieces of one block of random codes."""

    def __init__(self, generator: torch.Generator, size: int = 1 << 26):
        self.block = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        self.lock, self.begin = threading.Lock(), 0

    def codes(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the next matrix of integer codes in a given shape and dtype."""
        with self.lock:
            begin = self.begin
            # A prime step, so that no two matrices begin at the same place of the block.
            self.begin = (begin + 15_485_863) % len(self.block)
        codes = torch.empty(shape, dtype=dtype)
        flat, at = codes.view(-1).view(torch.uint8), 0
        while at < len(flat):
            piece = self.block[begin : begin + len(flat) - at]
            flat[at : at + len(piece)] = piece
            at, begin = at + len(piece), 0
        return codes

    def quantize(self, form: Any, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        """Return random codes and scales, in place of `form.quantize`; weights get the deviation `STD`."""
        (shape, dtype), (scales_shape, scales_dtype) = form.parts(tuple(weight_OI.shape))
        codes = self.codes(shape, dtype)
        scales = torch.empty(scales_shape, dtype=scales_dtype)
        if isinstance(form, Int4):
            # An offset of half a scale: codes have a mean of 7.5, and 8 stands for zero.
            scales[..., 0], scales[..., 1] = STD / 4.61, STD / 9.22
        else:
            scales.fill_(STD / 73.9)
        return [codes, scales]


def write(config: LlamoeBaseConfig, target: Path, weights: str, seed: int = 0) -> dict[str, Any]:
    """Write a model folder with random codes; return its bytes, seconds of writing and number of files.

    Args:
        config: of the model.
        target: an empty folder, or one that does not exist.
        weights: a format of ours, as "int4:128", which the code of `llamoe quantize` writes; or "w4a16", the format in
            which llm-compressor publishes Llama 4.
        seed: of all random numbers.
    """
    generator, blanks = torch.Generator().manual_seed(seed), {}
    tensors = {name: Drawn(name, shape, generator, blanks) for name, shape in expected_shapes(config).items()}
    draws, begun = Draws(generator), time.perf_counter()
    if weights == W4A16:
        _save_w4a16(config, tensors, draws, target)
    else:

        def quantize(form: Any, weight_OI: torch.Tensor) -> list[torch.Tensor]:
            return draws.quantize(form, weight_OI)

        source = Checkpoint(Path("<drawn>"), "hf", config, tensors)
        with mock.patch.object(Int4, "quantize", quantize), mock.patch.object(Int8, "quantize", quantize):
            save_hf(
                source, target, WriteOptions("llamoe", None, "5GB"), quantization=as_quantization(weights)
            )
    sizes = [path.stat().st_size for path in target.glob("*.safetensors")]
    return {"bytes": sum(sizes), "seconds": time.perf_counter() - begun, "files": len(sizes)}


def _save_w4a16(config: LlamoeBaseConfig, tensors: dict[str, Drawn], draws: Draws, target: Path) -> None:
    """Save Llama 4's tensors in compressed-tensors' layout: single experts, one scale for each 128 inputs."""
    target.mkdir(exist_ok=True)
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}

    def save() -> None:
        name = f"model-{len(set(files.values())) + 1:05}.safetensors"
        files.update(dict.fromkeys(shard, name))
        save_file(shard, target / name, {"format": "pt"})
        shard.clear()

    for name, tensor in tensors.items():
        for layer, (num_out, num_in) in _packed_layers(name, tensor.shape):
            shard[f"{layer}.weight_packed"] = draws.codes((num_out, num_in // 8), torch.int32)
            shard[f"{layer}.weight_scale"] = torch.full((num_out, num_in // GROUP), STD / 4.61).bfloat16()
            shard[f"{layer}.weight_shape"] = torch.tensor([num_out, num_in])
            if sum(part.nbytes for part in shard.values()) > 2e9:
                save()
        if not any(_packed_layers(name, tensor.shape)):
            shard[name] = tensor.read()
    save()
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": [f"re:.*{part}.*" for part in KEPT],
    }
    content = llamoe.to_stock(config) | {"dtype": "bfloat16", "quantization_config": quantization}
    (target / "config.json").write_text(json.dumps(content, indent=1))


def _packed_layers(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and sizes (out, in) of each packed layer that stores this tensor; none if it stays in 16 bits."""
    if len(shape) == 3 and ".experts." in name:
        num_experts, num_in, num_out = shape
        path, _, stack = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
        for expert in range(num_experts):
            for part in parts:
                yield f"{path}.{expert}.{part}", (num_out // len(parts), num_in)
    elif len(shape) == 2 and name.endswith("_proj.weight") and not any(part in name for part in KEPT):
        yield name.removesuffix(".weight"), (shape[0], shape[1])
