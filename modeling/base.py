"""The base class of all llamoe models: what transformers asks of a model class, loading and saving.

transformers detects attention and experts implementations by literal text in the file of a model's class
(`ALL_ATTENTION_FUNCTIONS.get_interface(`, `@use_experts_implementation`). llamoe's layers are in other files, so
`_can_set_attn_implementation` and `_can_set_experts_implementation` are overridden here.
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

# Quantization methods whose quantizers quantize our stacks of experts, or leave them as they are. All others expect
# experts in another layout, or of transformers' own class. For hqq transformers itself raises an error.
_QUANTIZERS_FOR_MIXTURES = ("bitsandbytes", "hqq", "llamoe", "quanto", "torchao")


def _method_of(quantization: Any) -> str:
    """Return the method of a quantization config, which may be a dict."""
    content = quantization if isinstance(quantization, dict) else quantization.to_dict()
    # Early configs of bitsandbytes have no quant_method; transformers refuses all other configs without it.
    method = content.get("quant_method") or "bitsandbytes"
    # The method may be a member of transformers' enum `QuantizationMethod`.
    return getattr(method, "value", method)


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
    # Patterns of key prefixes in other classes' checkpoints, with this class's prefix in place of each; and whether
    # registration adds these renamings to transformers.
    _checkpoint_prefixes: ClassVar[dict[str, str]] = {}
    _registers_prefixes: ClassVar[bool] = True
    # Patterns of keys that this class ignores in checkpoints of models that contain it. In transformers' own
    # `_keys_to_ignore_on_load_unexpected` the patterns would count for the containing models, too.
    _keys_passed_over: ClassVar[list[str]] = []
    # Whether transformers has a class that reads this class's folders.
    _has_stock_layout: ClassVar[bool] = True

    def post_init(self) -> None:
        """Finish construction; if another library is to quantize the model, make its layers plain `nn.Linear`."""
        super().post_init()
        quantization = getattr(self.config, "quantization_config", None)
        if quantization is not None and _method_of(quantization) != METHOD:
            make_layers_plain(self)

    @classmethod
    def resolve_config(cls, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return this class's config: the given one, or converted from stock's, or taken out of a multimodal one.

        Raises:
            ValueError: the config is of another model type.
        """
        wanted = cls.config_class
        if isinstance(config, wanted):
            return config
        converted = from_stock(config) if isinstance(config, PreTrainedConfig) else config
        if isinstance(converted, LlamoeConfig) and wanted.base_config_key in LlamoeConfig.sub_configs:
            converted = getattr(converted, wanted.base_config_key)
        if not isinstance(converted, wanted):
            raise ValueError(
                f"{cls.__name__} needs a {wanted.__name__}, not a {type(config).__name__}. To load a folder, use "
                f"{cls.__name__}.from_pretrained(folder)."
            )
        return converted

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls._has_experts

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Return the name of the experts implementation: the requested one, else LLAMOE_EXPERTS, else "llamoe".

        Raises:
            ValueError: transformers has no implementation of that name, or packed experts do not support it.
        """
        name = requested_experts or os.environ.get("LLAMOE_EXPERTS") or IMPLEMENTATION
        name = super().get_correct_experts_implementation(name)
        for module in self.modules():
            if isinstance(module, QuantizedExperts):
                module.check_implementation(name)
        return name

    def _grouped_mm_can_dispatch(self) -> bool:
        # transformers asks every part of a multimodal model: even the tower, which has no experts, must return True.
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
        """Return the masks of a step by attention type; `generate` calls this before a compiled forward."""
        text_config = config.get_text_config(decoder=True)
        inputs = MaskInputs(text_config, inputs_embeds, attention_mask, past_key_values, position_ids)
        if "flex" in inputs.implementation:
            # `generate` calls `contiguous()` on each mask. Flex attention's masks lack this method: forwards make them.
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
        # Load `_keep_in_fp32_modules`, for us only a list of what no quantizer may take, in the model's dtype.
        return {"balancing_bias": torch.float32}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """Load a checkpoint, ours or stock, as `PreTrainedModel.from_pretrained` does.

        A `device_map` may name a module and also parts of it, which then go to their own devices; "" means the rest
        of the model. `model.hf_device_map` then names every module once.

        Raises:
            CheckpointError: a file is damaged or missing, or weights do not fit the config.
            ValueError: the config is of another model type, its quantization is not supported, or the device map leaves
                a weight without a device.
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
        stored = getattr(config, "quantization_config", None)
        cls._check_quantization(config, kwargs.get("quantization_config") or stored)
        activations = take_activations(stored, kwargs)
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
        # By now transformers has made the model, without weights, and found or downloaded the files.
        load = PreTrainedModel._load_pretrained_model
        files = list(checkpoint_files or ()) if state_dict is None else []
        place = load_config.pretrained_model_name_or_path
        checkpoints.check_files(files, place)
        if args or "expected_keys" in kwargs:
            # `load_adapter` calls this method, too, to load an adapter into a model that has its weights.
            info = model._load_adapter_tensors(state_dict, files, load_config.ignore_mismatched_sizes)
            return info, None
        tensors = checkpoints.tensors_of(state_dict or {}) or checkpoints.headers_of(files)
        checkpoints.check_tensors(model, tensors, load_config)
        checkpoints.fuse_in_place(load_config.weight_mapping or ())
        replace_with_offloaded(model, files, load_config)
        checkpoints.settle_places(model, load_config)
        # Stop transformers from reporting these keys as unexpected, for this instance: subclasses would inherit them.
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
        """Return the config of a model that is quantized, or that the caller wants quantized; else None."""
        place, content = hub_arguments(kwargs), {}
        # If there is no config.json, transformers raises an error later.
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
        """Return our config, the layout and changed arguments for a folder that another program has packed.

        For other folders return the given config, None and the given arguments.
        """
        text_config: Any = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
        stored = getattr(config, "quantization_config", None) or getattr(
            text_config, "quantization_config", None
        )
        requested = kwargs.get("quantization_config")
        # With a config of another class the caller asks for transformers' quantizer.
        is_foreign = requested is not None and not isinstance(requested, QuantizationConfig)
        if stored is None or is_foreign or (layout := layout_of(stored)) is None:
            return config, None, kwargs
        if requested is not None and not layout.is_int4:
            raise ValueError(
                "quantization_config: the 8-bit weights of this folder become 16-bit weights in memory. Load it "
                "without quantization_config, save it by save_pretrained, and quantize the saved folder."
            )
        if isinstance(kwargs.get("config"), PreTrainedConfig):
            config = copy.deepcopy(config)
        else:
            # As in transformers, arguments with the names of the config's fields override these fields.
            not_fields = ("config", "quantization_config", "dtype", "torch_dtype")
            kept = {name: kwargs.pop(name) for name in not_fields if name in kwargs}
            config, kwargs = cls.config_class.from_dict(config.to_dict(), return_unused_kwargs=True, **kwargs)
            kwargs |= kept
        vars(config.get_text_config()).pop("quantization_config", None)
        config.quantization_config = own_config(layout).to_dict()
        return config, layout, kwargs | {"config": config}

    @classmethod
    def _check_quantization(cls, config: Any, quantization: Any) -> None:
        """Raise a `ValueError` for a mixture whose experts the quantization method would ignore or misread."""
        text_config: Any = config.get_text_config() if isinstance(config, PreTrainedConfig) else None
        if quantization is None or not getattr(text_config, "moe_layers", None):
            return
        if not (method := _method_of(quantization)).startswith(_QUANTIZERS_FOR_MIXTURES):
            raise ValueError(
                f"{cls.__name__} cannot load a mixture whose experts are quantized with quant_method {method!r}, only "
                "the formats of docs/packed_downloads.md. Load the model that was quantized; if memory is short, with "
                "quantization_config=llamoe.QuantizationConfig('int4') or BitsAndBytesConfig. Servers such as vLLM may "
                "load the folder as it is."
            )

    def save_pretrained(self, save_directory, *args, layout: str = "llamoe", **kwargs):
        """Save as `PreTrainedModel.save_pretrained` does, in our layout or in stock's.

        Args:
            layout: "llamoe" writes the tensors of `state_dict()`, our model type in config.json, and llamoe_hub.py, by
                which the folder loads with `trust_remote_code=True` where llamoe is not imported. "stock" writes a
                folder that transformers, vLLM and llama.cpp read without llamoe: transformers' model type (`llama`,
                `mixtral`, `llama4`, `llama4_text`), and Mixtral's experts one by one.

        Raises:
            ValueError: an unknown layout, or a config that stock cannot express; nothing is written then.
        """
        if not os.fspath(save_directory):
            raise ValueError("save_pretrained(''): the path is empty; for the current folder, give '.'.")
        self.check_saving()
        if layout not in ("llamoe", "stock"):
            raise ValueError(f"save_pretrained(layout={layout!r}): valid layouts are 'llamoe' and 'stock'.")
        is_stock = layout == "stock"
        if is_stock:
            if not self._has_stock_layout:
                raise ValueError(
                    f"save_pretrained(layout='stock'): transformers has no class like {type(self).__name__}. Leave "
                    "layout out, or save the model with its language model head."
                )
            # Raise an error for what stock cannot express before anything is written.
            to_stock(self.config)
        # Stock's Mixtral files store experts one by one; all other tensors are equal in both layouts.
        unfuses = is_stock and self._has_experts and self.config.stock_type() == "mixtral"
        naming = naming_plain_layers(self) if is_stock else nullcontext()
        with naming, written_by(to_stock if is_stock else None):
            super().save_pretrained(save_directory, *args, unfuses=unfuses, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Register a user's subclass, so that its sources are saved in folders; do nothing for llamoe's own classes.

        Folders of llamoe's own classes have llamoe_hub.py instead.
        """
        if not is_ours(cls):
            super().register_for_auto_class(auto_class)
