"""The base class of all llamoe models: transformers' interface of a model class, loading and saving.

transformers detects some features by literal text in the file of a model's class
(`ALL_ATTENTION_FUNCTIONS.get_interface(`, `@use_experts_implementation`). llamoe's layers are in other files, so two
methods override these checks here.
"""

import copy
import os
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import find_adapter_config_file

from ..configuration import LlamoeConfig, from_stock, to_stock
from ..configuration.hub import hub_arguments, is_ours, written_by
from ..configuration.json_files import read_json
from ..configuration.quantization import METHOD, QuantizationConfig
from . import checkpoints
from ._compat import takes_cache
from .adapters import LoadsAdapters
from .attention import MaskInputs, attention_masks
from .layers import make_layers_plain
from .moe import IMPLEMENTATION, Experts, Router
from .offload import OffloadMixin, attach_stores, replace_with_offloaded, take_request
from .parallel import Distributed
from .quantization import (
    QuantizedExperts,
    QuantizedLinear,
    layout_of,
    naming_plain_layers,
    own_config,
    take_activations,
)

# Quantization methods whose quantizers take the stacked experts one by one, or leave them unchanged. The others expect
# another layout of experts, or replace stock's class by its name. transformers reports that hqq is not supported yet.
_QUANTIZERS_FOR_MIXTURES = ("bitsandbytes", "hqq", "llamoe", "quanto", "torchao")


class LlamoePreTrainedModel(
    OffloadMixin, LoadsAdapters, Distributed, checkpoints.TakesWeights, checkpoints.AtomicSaveMixin
):
    """Base of every llamoe model."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _has_experts: ClassVar[bool] = False
    # Patterns of key prefixes in checkpoints of other classes, and their replacements here.
    _checkpoint_prefixes: ClassVar[dict[str, str]] = {}
    _registers_prefixes: ClassVar[bool] = True
    # Patterns of keys that checkpoints of classes around this one contain and this class lacks. Not transformers'
    # `_keys_to_ignore_on_load_unexpected`: a model inherits that of its children, whose patterns match its own parts,
    # and servers drop every key that one of them matches.
    _keys_passed_over: ClassVar[list[str]] = []
    _has_stock_layout: ClassVar[bool] = True

    def post_init(self) -> None:
        """Finish construction; if another library will quantize the model, convert its layers to `nn.Linear`."""
        super().post_init()
        quantization: Any = getattr(self.config, "quantization_config", None)
        if quantization is not None and not isinstance(quantization, dict):
            quantization = quantization.to_dict()
        if quantization is not None and quantization.get("quant_method") != METHOD:
            make_layers_plain(self)

    @classmethod
    def resolve_config(cls, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return a config of this class's own type.

        Args:
            config: this class's own, the stock one of the same architecture, or a multimodal one (ours or stock) of
                which this class is a part.

        Raises:
            ValueError: a config of another model type.
        """
        wanted = cls.config_class
        if isinstance(config, wanted):
            return config
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(
                f"{cls.__name__} needs a {wanted.__name__}, not a {type(config).__name__}. To load a checkpoint "
                f"use {cls.__name__}.from_pretrained(folder)."
            )
        converted = from_stock(config)
        if isinstance(converted, LlamoeConfig) and wanted.base_config_key in LlamoeConfig.sub_configs:
            converted = getattr(converted, wanted.base_config_key)
        if not isinstance(converted, wanted):
            raise ValueError(
                f"{cls.__name__} needs a {wanted.__name__}, but got a {type(config).__name__} "
                f"(model type {config.model_type!r})."
            )
        return converted

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls._has_experts

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Return the name of the experts implementation: the requested one, that in LLAMOE_EXPERTS, or `llamoe`.

        Raises:
            ValueError: transformers' registry has none of that name, or packed experts do not support it.
        """
        name = requested_experts or os.environ.get("LLAMOE_EXPERTS") or IMPLEMENTATION
        name = super().get_correct_experts_implementation(name)
        for module in self.modules():
            if isinstance(module, QuantizedExperts):
                module.check_implementation(name)
        return name

    def _grouped_mm_can_dispatch(self) -> bool:
        # transformers asks every part of a multimodal model, also the tower, which has no experts.
        return True

    @staticmethod
    @takes_cache
    def create_masks_for_generate(
        config: PreTrainedConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,
        position_ids: torch.Tensor | None = None,
        **_,
    ) -> dict[str, Any] | torch.Tensor | None:
        """Prepare the masks outside of a compiled forward pass; `generate` calls this."""
        text_config = config.get_text_config(decoder=True)
        inputs = MaskInputs(text_config, inputs_embeds, attention_mask, past_key_values, position_ids)
        if "flex" in inputs.implementation:
            # `generate` calls `contiguous()` on all masks, which flex attention's masks lack.
            return attention_mask
        return attention_masks(inputs)

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, QuantizedLinear):
            return
        super()._init_weights(module)
        if isinstance(module, Experts) and module.storage is None:
            std = self.config.get_text_config().initializer_range
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, Router):
            init.normal_(module.weight, mean=0.0, std=self.config.get_text_config().initializer_range)
            if module.balancing_bias is not None:
                init.zeros_(module.balancing_bias)

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        # `_keep_in_fp32_modules` only excludes modules from quantization; in float16 they are loaded in float16.
        return {"balancing_bias": torch.float32}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """Load a checkpoint, ours or stock, as `PreTrainedModel.from_pretrained` does.

        A `device_map` may name a module and parts of it: the longer name wins, and "" means the rest.
        `model.hf_device_map` then names every module once.

        Raises:
            ValueError: a config of another model type, a damaged or missing file (`CheckpointError`, also an
                `OSError`), weights that do not fit the config, a quantization that the model does not support, or a
                device map that cannot be followed.
        """
        name_or_path = pretrained_model_name_or_path
        subfolder = kwargs.get("subfolder") or ""
        config = kwargs.get("config")
        if name_or_path is not None:
            checkpoints.check_whole(name_or_path, subfolder)
        if isinstance(config, PreTrainedConfig):
            kwargs["config"] = config = cls.resolve_config(config)
        elif name_or_path is not None and not kwargs.get("gguf_file"):
            config = cls._config_if_quantized(config or name_or_path, kwargs)
        config, layout, kwargs = cls._with_own_quantization(config, kwargs)
        stored, activations = getattr(config, "quantization_config", None), None
        quantization = kwargs.get("quantization_config") or stored
        if quantization is not None:
            activations = take_activations(stored, kwargs)
            cls._check_quantization(config, quantization)
        request = take_request(kwargs)
        with checkpoints.loading() as state:
            state.offload, state.activations, state.layout = request, activations, layout
            result = super().from_pretrained(name_or_path, *model_args, **kwargs)
            model = result[0] if isinstance(result, tuple) else result
            attach_stores(model)
        return result

    @classmethod
    def _from_config(cls, config, **kwargs):
        return super()._from_config(cls.resolve_config(config), **kwargs)

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        # This is the first point with both the empty model and the list of its files, downloaded or local.
        load = PreTrainedModel._load_pretrained_model
        files = list(checkpoint_files or ()) if state_dict is None else []
        place = load_config.pretrained_model_name_or_path
        checkpoints.check_files(files, place)
        if args or "expected_keys" in kwargs:
            # This load is of an adapter; the model is on its devices already.
            info = model._load_adapter_tensors(state_dict, files, load_config.ignore_mismatched_sizes)
            return info, None
        tensors = checkpoints.tensors_of(state_dict or {}) or checkpoints.headers_of(files)
        checkpoints.check_tensors(model, tensors, load_config)
        checkpoints.fuse_in_place(load_config.weight_mapping or ())
        replace_with_offloaded(model, files, load_config)
        checkpoints.settle_places(model, load_config)
        # Set it on this instance, right before loading: transformers then does not report these keys as unexpected.
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | set(model._keys_passed_over)
        state_dict = checkpoints.transposed_for_shards(model, files, state_dict)
        loading_info, offload_index = load(model, state_dict, checkpoint_files, load_config)
        checkpoints.check_made(model, loading_info, place)
        return loading_info, offload_index

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        loading_info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        checkpoints.check_complete(model, loading_info, load_config)
        return loading_info

    @classmethod
    def _config_if_quantized(cls, name_or_path: Any, kwargs: dict[str, Any]) -> Any:
        """Return the config of a model that is, or will be, quantized; None for others, whose config is read later."""
        place, content = hub_arguments(kwargs), {}
        # transformers reports what is missing.
        with suppress(OSError):
            content, _ = cls.config_class.get_config_dict(name_or_path, **place)
        if not content:
            # The folder of an adapter names its base model.
            adapter = find_adapter_config_file(name_or_path, **place)
            base = read_json(adapter).get("base_model_name_or_path") if adapter else None
            return cls._config_if_quantized(base, kwargs) if base and base != str(name_or_path) else None
        if kwargs.get("quantization_config") is None and content.get("quantization_config") is None:
            return None
        return cls.config_class.from_dict(content)

    @classmethod
    def _with_own_quantization(cls, config: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Return, for a folder packed by another program, the config for int4, its layout, and the new arguments."""
        text_config: Any = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
        stored = getattr(config, "quantization_config", None) or getattr(
            text_config, "quantization_config", None
        )
        asked = kwargs.get("quantization_config")
        # A user's config of another method requests transformers' quantizer.
        is_others = asked is not None and not isinstance(asked, QuantizationConfig)
        if stored is None or is_others or (layout := layout_of(stored)) is None:
            return config, None, kwargs
        if asked is not None and not layout.is_int4:
            raise ValueError(
                "quantization_config: this folder's weights in 8 bits are held in 16. Load it without one, save it by "
                "save_pretrained, and quantize that folder."
            )
        if isinstance(kwargs.get("config"), PreTrainedConfig):
            config = copy.deepcopy(config)
        else:
            # Read the config as transformers does, overridden by arguments that are its fields.
            others = ("config", "quantization_config", "dtype", "torch_dtype")
            kept = {name: kwargs.pop(name) for name in others if name in kwargs}
            config, kwargs = cls.config_class.from_dict(config.to_dict(), return_unused_kwargs=True, **kwargs)
            kwargs |= kept
        vars(config.get_text_config()).pop("quantization_config", None)
        config.quantization_config = own_config(layout).to_dict()
        return config, layout, kwargs | {"config": config}

    @classmethod
    def _check_quantization(cls, config: Any, quantization: Any) -> None:
        text_config: Any = config.get_text_config() if isinstance(config, PreTrainedConfig) else None
        if not getattr(text_config, "moe_layers", None):
            return
        if not isinstance(quantization, dict):
            quantization = quantization.to_dict()
        method = quantization.get("quant_method")
        if method is None and (quantization.get("load_in_8bit") or quantization.get("load_in_4bit")):
            # Early configs of bitsandbytes have no quant_method.
            method = "bitsandbytes"
        # The method may be a member of transformers' enum `QuantizationMethod`.
        method = getattr(method, "value", method)
        if not str(method).startswith(_QUANTIZERS_FOR_MIXTURES):
            raise ValueError(
                f"{cls.__name__} cannot load a mixture whose experts are quantized with quant_method {method!r}: those "
                "that are plain, or packed in a format of docs/packed_downloads.md, are read here. Load the model that "
                "it was made of, if memory is short with quantization_config=llamoe.QuantizationConfig('int4') or "
                "BitsAndBytesConfig. Servers such as vLLM may take the folder as it is."
            )

    def save_pretrained(self, save_directory, *args, layout: str = "llamoe", **kwargs):
        """Save as `PreTrainedModel.save_pretrained` does, in our layout or in stock's.

        Args:
            layout: "llamoe" writes our model type to config.json, and llamoe_hub.py beside it, so that the folder
                loads with `trust_remote_code=True` where llamoe is not imported; the tensors are those of
                `state_dict()`. "stock" writes transformers' type (`llama`, `mixtral`, `llama4`, `llama4_text`), and
                of Mixtral each expert by itself, so that transformers, vLLM or llama.cpp read the folder without
                llamoe.

        Raises:
            ValueError: an unknown layout, or a config that stock cannot express; nothing is written then.
        """
        if not os.fspath(save_directory):
            raise ValueError(
                "save_pretrained(''): this is not a path; give a folder, or \".\" for the current one."
            )
        self.check_saving()
        if layout not in ("llamoe", "stock"):
            raise ValueError(f"save_pretrained(layout={layout!r}): valid layouts are 'llamoe' and 'stock'.")
        is_stock = layout == "stock"
        if is_stock:
            if not self._has_stock_layout:
                raise ValueError(
                    f"{type(self).__name__} has no counterpart in transformers' {self.config.stock_type()}: leave "
                    "layout out, or save the model with its language model head."
                )
            # Convert first: this raises before anything is written.
            to_stock(self.config)
        # Stock's Mixtral files store each expert separately; all other keys are equal.
        unfuses = is_stock and self._has_experts and self.config.stock_type() == "mixtral"
        naming = naming_plain_layers(self) if is_stock else nullcontext()
        with naming, written_by(to_stock if is_stock else None):
            super().save_pretrained(save_directory, *args, unfuses=unfuses, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Do nothing for llamoe's own classes: their folders already name their loader.

        transformers would copy llamoe's sources into each saved folder. A user's subclass is registered as usual.
        """
        if not is_ours(cls):
            super().register_for_auto_class(auto_class)
