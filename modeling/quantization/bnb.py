"""Quantizers for bitsandbytes, which also quantize llamoe's routed experts.

The classes derive from transformers' quantizers and replace them. Linear layers, and models that are not llamoe's, are
quantized by transformers' own code. If a name in `llm_int8_skip_modules` matches the experts of a layer, or a linear
layer of one expert as files name it, all experts of that layer stay in 16 bits. Files store each expert as linear
layers: `experts.N.gate_proj`, `up_proj` and `down_proj`, or Mixtral's `w1`, `w3` and `w2`.
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
    """A mixin that quantizes routed experts, too; name it before transformers' quantizer class."""

    quantization_config: Any
    modules_to_not_convert: list[str]
    # In transformers 4 routers were linear layers, so its folders may have quantized routers.
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
        norms = [
            stored for stored in headers_of(files or ()) if stored.name.endswith("input_layernorm.weight")
        ]
        if norms and isinstance(model, AtomicSaveMixin):
            # transformers loads norms and embeddings in the dtype of the files, whatever dtype is requested. Cast the
            # biases, routers and experts to the same dtype, since they would be loaded in the requested one.
            for parameter in model.parameters():
                if type(parameter) is nn.Parameter:
                    parameter.data = parameter.data.to(DTYPES[norms[0].dtype])
        # Some folders have quantized experts in some layers only.
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
        """Return True unless `llm_int8_skip_modules` matches these experts or a linear layer of one expert."""
        if self.quantization_config.load_in_8bit and self.quantization_config.llm_int8_has_fp16_weight:
            # With this option, linear layers keep their 16-bit weights, which can be trained.
            return False
        parts = itertools.chain(*PARTS_OF_STACKS[experts.is_transposed].values())
        layers = (f"{path}.{n}.{part}" for n, part in itertools.product(range(experts.num_experts), parts))
        return all(should_convert_module(name, self.modules_to_not_convert) for name in (path, *layers))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        # On a CPU with bfloat16 instructions, a 4-bit layer of bitsandbytes reorders its codes and rounds its scales in
        # the first forward without gradients. After that, scales without double quantization are saved in the wrong
        # order, backward fails, and layers whose number of outputs is no multiple of 32 do not run.
        for module in model.modules() if isinstance(model, AtomicSaveMixin) else ():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        return super()._process_model_after_weight_loading(model, **kwargs)

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        # transformers' function fails with an UnboundLocalError if the model has no layer of bitsandbytes.
        has_layers = any(type(module).__module__.startswith("bitsandbytes") for module in model.modules())
        return super()._dequantize(model, dtype) if has_layers else model  # pyright: ignore[reportAttributeAccessIssue]

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any] | None, dict]:
        """Return the state dict for files, with packed experts as linear layers; None if no experts are packed."""
        packed = dict(packed_modules(model))
        # Of a model with an adapter transformers saves only the adapter.
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


def _packed_in(files: Iterable[str]) -> set[str]:
    """Return the experts that are packed in these files, by the layer's number and their path: "3.mlp.experts"."""
    return {
        expert.experts.rpartition("layers.")[2]
        for stored in headers_of(files)
        if (expert := expert_of(stored.name.replace(".block_sparse_moe.", ".mlp.")))
        and (expert.kind != WEIGHT or stored.dtype in ("U8", "I8"))
    }


def _unfused(
    experts: QuantizedExperts, storage: torch.dtype, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the linear layers that files store for these experts, by names such as "0.up_proj.weight".

    The bytes of 4-bit codes are viewed as numbers of dtype `storage`; `dtype` is recorded as that of unpacked weights.
    """
    for number, stack in itertools.product(range(experts.num_experts), STACKS):
        form: Any = experts.formats[stack]
        for index, name in enumerate(PARTS_OF_STACKS[experts.is_transposed][stack]):
            # transformers saves tensors that share a storage into one file; a tensor of DLPack has its own.
            parts = [torch.from_dlpack(part[number, index]) for part in experts.parts(stack)]
            if parts[0].dtype == torch.uint8:
                parts[0] = parts[0].view(storage)
            tensors = form.for_file(parts, form.sizes_of_one(experts.sizes[stack]), dtype)
            yield from ((f"{number}.{name}.{kind}", tensor) for kind, tensor in tensors.items())


@contextmanager
def naming_plain_layers(model: PreTrainedModel) -> Iterator[None]:
    """Name all layers that are not quantized in `llm_int8_skip_modules` of the model's config, inside of the context.

    Programs that read a folder in stock's layout expect that all layers are quantized which the config does not name,
    except heads. llamoe's own folders have no such list: with one, transformers would quantize a classifier's new head.
    """
    if not isinstance(getattr(model, "hf_quantizer", None), QuantizesExperts):
        yield
        return
    config: Any = model.config.quantization_config
    kept = config.llm_int8_skip_modules
    plain = {
        # transformers 4, where routers are linear layers, names Mixtral's routers so.
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
    """Replace transformers' quantizers for bitsandbytes; called once, when llamoe is imported."""
    replace_quantizer("bitsandbytes_4bit", BitsAndBytes4BitQuantizer)
    replace_quantizer("bitsandbytes_8bit", BitsAndBytes8BitQuantizer)
