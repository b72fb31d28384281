"""The base class of all our models: what transformers must know of them, loading and saving.

transformers decides some features by looking for literal text in the file of a model's class
(`ALL_ATTENTION_FUNCTIONS.get_interface(`, `@use_experts_implementation`). Our blocks stand in files of their own,
so the two checks are answered here.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from ..configuration import LlamoeConfig, from_stock
from ..configuration.parallel import check_parallel, wildcard
from ..configuration.stock import to_stock
from ._compat import (
    gather,
    is_tensor_parallel_only,
    parallel_sizes,
    register_parallel_style,
    shards_unevenly,
)
from .expert_parallel import DispatchExperts
from .masks import attention_masks
from .moe import Experts, Router
from .weights import check_fit, check_folder, check_place

logger = logging.getLogger("llamoe")

# Quantization methods whose transformers quantizers leave the stacked experts as they are. The others expect
# experts of another layout or replace stock's class by its name.
_QUANTIZERS_FOR_MIXTURES = ("bitsandbytes", "hqq", "quanto", "torchao")

register_parallel_style("ep_dispatch_experts", DispatchExperts())

# What says from where a config is read.
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class LlamoePreTrainedModel(PreTrainedModel):
    """What every llamoe model shares."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _has_experts: ClassVar[bool] = False
    # Beginnings (patterns) of keys in checkpoints of other classes, and what they are here.
    _checkpoint_prefixes: ClassVar[dict[str, str]] = {}
    _has_stock_layout: ClassVar[bool] = True

    @classmethod
    def resolve_config(cls, config: PreTrainedConfig) -> PreTrainedConfig:
        """Give the config that this class works with.

        Args:
            config: this class's own, the stock one of the same architecture, or a multimodal one (ours or stock)
                of which this class is a part.

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

    def _grouped_mm_can_dispatch(self) -> bool:
        # Asked of every part of a multimodal model, also of the tower, which has no experts to dispatch. Sizes
        # that the kernel does not take are the experts' own business.
        return True

    @staticmethod
    def create_masks_for_generate(
        config: PreTrainedConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Any,
        position_ids: torch.Tensor | None = None,
        **_,
    ) -> dict[str, Any]:
        """Prepare the masks outside of a compiled forward pass; `generate` calls this."""
        text_config = config.get_text_config(decoder=True)
        return attention_masks(text_config, inputs_embeds, attention_mask, past_key_values, position_ids)

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Experts):
            std = self.config.get_text_config().initializer_range
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, Router):
            init.normal_(module.weight, mean=0.0, std=self.config.get_text_config().initializer_range)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """Load a checkpoint, ours or stock, as `PreTrainedModel.from_pretrained` does.

        A local folder's files are checked first, from their headers.

        Raises:
            ValueError: a config of another model type, a damaged or missing file (`CheckpointError`, also an
                `OSError`), weights that do not fit the config, or a quantization that the model cannot take.
        """
        config = kwargs.get("config")
        if config is None and pretrained_model_name_or_path is not None:
            check_place(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
        if isinstance(config, PreTrainedConfig):
            kwargs["config"] = config = cls.resolve_config(config)
        elif pretrained_model_name_or_path is not None and not kwargs.get("gguf_file"):
            where = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
            try:
                config = cls.config_class.from_pretrained(config or pretrained_model_name_or_path, **where)
            except OSError:
                config = None  # transformers says what is missing, or follows an adapter to its base model
        cls._check_quantization(config, kwargs.get("quantization_config"))
        if pretrained_model_name_or_path is not None and os.path.isdir(pretrained_model_name_or_path):
            check_folder(
                pretrained_model_name_or_path, kwargs.get("subfolder") or "", variant=kwargs.get("variant")
            )
        result = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        model._log_backends()
        return result

    @classmethod
    def _from_config(cls, config, **kwargs):
        model = super()._from_config(cls.resolve_config(config), **kwargs)
        model._log_backends()
        return model

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        # Here the empty model and the list of its files, downloaded or local, are known for the first time.
        if state_dict is None and checkpoint_files:
            expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            quantized = getattr(load_config, "hf_quantizer", None) is not None
            if not getattr(load_config, "ignore_mismatched_sizes", False):
                check_fit(checkpoint_files, expected, model._checkpoint_prefixes, quantized)
        return PreTrainedModel._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *args, **kwargs
        )

    def init_parallel_plans(self) -> None:
        """Join the plans of configuration, heads and parts, without rules for what this model does not have."""
        super().init_parallel_plans()
        parts = [*self.named_modules(), *self.named_parameters()]
        names = {wildcard(name) for name, _ in parts}
        for plan in filter(None, (self._tp_plan, self._ep_plan, self._fsdp_plan)):
            for name in plan.keys() - names:
                del plan[name]

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh):
        """Spread the empty model over the devices; `from_pretrained` calls this before it reads a weight.

        Raises:
            ValueError: the devices do not divide the attention heads, or the experts.
        """
        if mesh is not None:
            check_parallel(model.config, *parallel_sizes(distributed_config))
            if not shards_unevenly():
                model._drop_uneven_rules(distributed_config.tp_size or 1)
        return super().maybe_distribute_model(model, distributed_config, mesh)

    def _drop_uneven_rules(self, tp_size: int) -> None:
        """Keep whole on each device what the release cannot split: an odd vocabulary, for one."""
        plan = self._tp_plan or {}
        for name, module in self.named_modules():
            rule = wildcard(name)
            style = plan.get(rule)
            if style is None:
                continue
            if isinstance(module, Experts):
                size = module.down_proj.shape[1]
            elif isinstance(module, torch.nn.Embedding):
                size = module.num_embeddings
            else:
                size = module.in_features if style == "rowwise" else module.out_features
            if size % tp_size:
                for key in [key for key in plan if f"{key}.".startswith(f"{rule}.")]:
                    del plan[key]

    @classmethod
    def _check_quantization(cls, config: Any, requested: Any = None) -> None:
        quantization = requested or getattr(config, "quantization_config", None)
        if not isinstance(config, PreTrainedConfig) or quantization is None:
            return
        if not getattr(config.get_text_config(), "moe_layers", None):
            return
        if not isinstance(quantization, dict):
            quantization = quantization.to_dict()
        method = quantization.get("quant_method")
        if method is None and (quantization.get("load_in_8bit") or quantization.get("load_in_4bit")):
            method = "bitsandbytes"  # as its first configs were written
        method = getattr(method, "value", method)
        if not str(method).startswith(_QUANTIZERS_FOR_MIXTURES):
            raise ValueError(
                f"{cls.__name__} cannot load a mixture quantized with {method!r}: its experts are stored in a "
                "layout that transformers reads only into its own Llama 4 classes. Supported here: "
                f"{', '.join(_QUANTIZERS_FOR_MIXTURES)} (experts stay in 16 bit). Load the unquantized checkpoint."
            )

    def _log_backends(self) -> None:
        text_config = self.config.get_text_config()
        message = f"{type(self).__name__}: attention {text_config._attn_implementation}"
        experts = next((module for module in self.modules() if isinstance(module, Experts)), None)
        if experts is not None:
            implementation = text_config._experts_implementation
            if implementation == "grouped_mm" and not experts.fits_grouped_mm():
                implementation = "eager (grouped_mm does not take these sizes and dtype)"
            message += f", experts {implementation}"
        logger.info(message)

    def gather_sharded_state_dict_for_save(self, model_to_save, state_dict, distributed_config, **kwargs):
        """Join the shards of tensor parallelism; `save_pretrained` calls this in every process."""
        if is_tensor_parallel_only(distributed_config):
            state_dict = {
                name: gather(value).detach().cpu() if isinstance(value, torch.Tensor) else value
                for name, value in state_dict.items()
            }
        return super().gather_sharded_state_dict_for_save(
            model_to_save, state_dict, distributed_config, **kwargs
        )

    def save_pretrained(self, save_directory, *args, layout: str = "llamoe", **kwargs):
        """Save as `PreTrainedModel.save_pretrained` does; the weights' keys are stock keys in either layout.

        Args:
            save_directory: the folder.
            *args: of `PreTrainedModel.save_pretrained`.
            layout: "llamoe" writes our model type to config.json. "stock" writes transformers' (`llama`,
                `llama4`, `llama4_text`), so that transformers, vLLM or llama.cpp read the folder without llamoe.
            **kwargs: of `PreTrainedModel.save_pretrained`.

        Raises:
            ValueError: an unknown layout, or a config that stock cannot express; nothing is written then.
        """
        if os.path.isfile(save_directory):
            raise ValueError(f"save_pretrained({str(save_directory)!r}): this is a file; give a folder.")
        if layout not in ("llamoe", "stock"):
            raise ValueError(f"save_pretrained(layout={layout!r}): valid layouts are 'llamoe' and 'stock'.")
        if layout == "stock":
            if not self._has_stock_layout:
                raise ValueError(
                    f"{type(self).__name__} has no counterpart in transformers: save the model with a head."
                )
            to_stock(self.config)  # raises before anything is written
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, *args, **kwargs)
        config_file = Path(save_directory) / "config.json"
        is_main_process = kwargs.get("is_main_process", args[0] if args else True)
        # Of several processes that hold shards one writes, and the others wait for it.
        if layout == "stock" and config_file.exists() and self.should_save_on_this_rank(is_main_process):
            content = json.dumps(to_stock(self.config), indent=2, sort_keys=True) + "\n"
            unfinished = config_file.with_suffix(".json.tmp")
            unfinished.write_text(content, encoding="utf-8")
            unfinished.replace(config_file)
        if layout == "stock":
            self.barrier_after_gathered_checkpoint_save(getattr(self.config, "distributed_config", None))
