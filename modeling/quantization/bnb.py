"""Quantizers for bitsandbytes, which extend transformers' to llamoe's routed experts.

They replace transformers' classes and derive from them; linear layers and other models are handled as before. A name in
`llm_int8_skip_modules` that matches the experts, or the layer of a single expert as files name it, leaves the experts
of that mixture in 16 bits. Files store each expert as linear layers: `experts.N.gate_proj`, `up_proj` and `down_proj`,
or Mixtral's `w1`, `w3` and `w2`.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from .._private_api import replace_quantizer
from ..checkpoints import DTYPES, WEIGHT, AtomicSaveMixin, expert_of, headers_of
from ..formats import Bnb
from ..layers import Linear
from ..moe import PARTS_OF_STACKS, STACKS, Experts, Router
from .packed import QuantizedExperts, packed_modules
from .packed_quantizer import PackedQuantizer


class QuantizesExperts(PackedQuantizer):
    """A mixin for both quantizers; name it before transformers' class."""

    quantization_config: Any
    modules_to_not_convert: list[str]
    # Folders of transformers 4 may have quantized routers, which were linear layers.
    layers_in_files = (".feed_forward.router", ".mlp.gate")

    def _format(self, dtype: torch.dtype) -> Bnb:
        config = self.quantization_config
        if config.load_in_8bit:
            return Bnb(dtype, "int8")
        is_nested = config.bnb_4bit_use_double_quant
        return Bnb(config.bnb_4bit_compute_dtype, config.bnb_4bit_quant_type, is_nested)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, **kwargs)
        files = kwargs.get("checkpoint_files") if self.pre_quantized else None
        if files and isinstance(model, AtomicSaveMixin) and (dtype := _plain_dtype(files)):
            # Whatever dtype is requested, transformers loads plain weights in the files' dtype. Biases, routers and
            # experts, which it would cast, must follow.
            for parameter in model.parameters():
                if type(parameter) is nn.Parameter:
                    parameter.data = parameter.data.to(dtype)
        # In some folders the experts of only some layers are quantized.
        stored = _packed_in(files) if files else None
        for name, module in list(model.named_modules()):
            if not isinstance(module, Experts):
                continue
            if self._takes(name, module) if stored is None else name.rpartition("layers.")[2] in stored:
                form = self._format(module.dtype)
                with torch.device("meta"):
                    packed = QuantizedExperts(module, form, gate_up_form=replace(form, count=2))
                model.set_submodule(name, packed)
                self.layout = form if self.pre_quantized else None

    def _takes(self, path: str, experts: Experts) -> bool:
        """Return True unless `llm_int8_skip_modules` names these experts or a part of them."""
        parts = itertools.chain(*PARTS_OF_STACKS[experts.is_transposed].values())
        layers = (f"{path}.{n}.{part}" for n, part in itertools.product(range(experts.num_experts), parts))
        return all(should_convert_module(name, self.modules_to_not_convert) for name in (path, *layers))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        # On a CPU with bfloat16 instructions, a 4-bit layer reorders its codes for a kernel in the first forward
        # without gradients, and rounds its scales. Then scales without double quantization are saved in the wrong
        # order, backward passes fail, and layers whose outputs are no multiple of 32 do not run.
        for module in model.modules() if isinstance(model, AtomicSaveMixin) else ():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        return super()._process_model_after_weight_loading(model, **kwargs)

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        # transformers' function ends in an UnboundLocalError if experts alone were packed.
        has_layers = any(type(module).__module__.startswith("bitsandbytes") for module in model.modules())
        return super()._dequantize(model, dtype) if has_layers else model  # pyright: ignore[reportAttributeAccessIssue]

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any] | None, dict]:
        """Return the state dict with packed experts split into linear layers, as in files; None without any."""
        packed = dict(packed_modules(model))
        # If the model has an adapter, only the adapter is saved.
        if not packed or getattr(model, "_hf_peft_config_loaded", False):
            return super().get_state_dict_and_metadata(model)
        storage = getattr(self.quantization_config, "bnb_4bit_quant_storage", torch.uint8)
        state = model.state_dict()
        weights = {name: state[name] for name in state if name.rpartition(".")[0] not in packed}
        for path, experts in packed.items():
            for name, tensor in _unfused(experts, storage, model.dtype):
                weights[f"{path}.{name}"] = tensor
        return weights, {}


class BitsAndBytes4BitQuantizer(QuantizesExperts, Bnb4BitHfQuantizer):
    """The quantizer for `load_in_4bit=True`."""


class BitsAndBytes8BitQuantizer(QuantizesExperts, Bnb8BitHfQuantizer):
    """The quantizer for `load_in_8bit=True`."""


def _plain_dtype(files: Iterable[str]) -> torch.dtype | None:
    """Return the dtype of norms in these files, which is that of all plain weights; None without one."""
    norms = (stored for stored in headers_of(files) if stored.name.endswith("input_layernorm.weight"))
    return next((DTYPES[stored.dtype] for stored in norms), None)


def _packed_in(files: Iterable[str]) -> set[str]:
    """List the experts that are packed in these files, by layer number and path: "3.mlp.experts"."""
    return {
        expert.experts.rpartition("layers.")[2]
        for stored in headers_of(files)
        if (expert := expert_of(stored.name.replace(".block_sparse_moe.", ".mlp.")))
        and (expert.kind != WEIGHT or stored.dtype in ("U8", "I8"))
    }


def _unfused(
    experts: QuantizedExperts, storage: torch.dtype, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the experts as the linear layers that files store, by name below the experts; without copying codes.

    Files hold the bytes of 4-bit codes as `storage`, and record the dtype of unpacked weights.
    """
    for number, stack in itertools.product(range(experts.num_experts), STACKS):
        form: Any = experts.formats[stack]
        for place, name in enumerate(PARTS_OF_STACKS[experts.is_transposed][stack]):
            # Give each tensor its own storage: transformers saves tensors of one storage into one file.
            parts = [torch.from_dlpack(part[number, place]) for part in experts.parts(stack)]
            if parts[0].dtype == torch.uint8:
                parts[0] = parts[0].view(storage)
            tensors = form.for_file(parts, form.sizes_of_one(experts.sizes[stack]), dtype)
            yield from ((f"{number}.{name}.{kind}", tensor) for kind, tensor in tensors.items())


@contextmanager
def naming_plain_layers(model: PreTrainedModel) -> Iterator[None]:
    """List all layers that bitsandbytes has not quantized in the model's configuration, for files of other programs.

    Without the list these skip only heads. With it they skip nothing else, and would quantize the new head of a
    classifier, so llamoe's own folders have no list.
    """
    if not isinstance(getattr(model, "hf_quantizer", None), QuantizesExperts):
        yield
        return
    config: Any = model.config.quantization_config
    kept = config.llm_int8_skip_modules
    plain = {
        # In transformers 4 routers are linear layers, and Mixtral's mixture has this name.
        name.replace(".mlp.gate", ".block_sparse_moe.gate")
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Linear)
        or isinstance(module, Router)
        or (isinstance(module, Experts) and not module.is_packed)
    }
    config.llm_int8_skip_modules = sorted(plain.union(kept or ()))
    try:
        yield
    finally:
        config.llm_int8_skip_modules = kept


def register_bitsandbytes() -> None:
    """Replace transformers' quantizers by these; called once, at import."""
    replace_quantizer("bitsandbytes_4bit", BitsAndBytes4BitQuantizer)
    replace_quantizer("bitsandbytes_8bit", BitsAndBytes8BitQuantizer)
