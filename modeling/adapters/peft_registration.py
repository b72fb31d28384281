"""Our model types in peft's tables: which layers an adapter changes if its config names none.

They are registered when peft is imported, before or after llamoe; llamoe does not import it.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from torch import nn

from ...configuration import LlamoeConfig, LlamoeMixtralConfig, LlamoeVisionConfig
from ...configuration.stock import CONFIG_CLASSES
from ..moe import Experts, Router
from ._private_api import (
    after_subtraction,
    around_forward_hooks,
    around_injection,
    before_compiled_hotswap,
    before_hotswap,
    before_merging,
    before_saving_adapters,
    choose_wrapped,
    find_word_embeddings,
    name_tied_parts,
    read_adapters_as,
    replace_all_linear,
    replace_weighted_sum,
    turn_update_of_one_expert,
    watch_adapter_files,
)
from .adapted_parts import refuse_shared_experts, warn_of_frozen_experts
from .expert_layout import mark, remember_file
from .fitting import join_beginnings, orient_swapped, pad_ranks
from .loading import LoadsAdapters
from .packed_weights import prepare_for_training, refuse_for_packed, refuse_merging
from .row_names import dealing_names
from .safetensors_headers import check_files
from .stack_targets import choose_parameters, reading, telling_unused
from .when_imported import when_imported

logger = logging.getLogger("llamoe")

# The vision tower's names for the parts of a feed-forward.
_IN_THE_TOWER = {"up_proj": "fc1", "down_proj": "fc2", "norm": "layernorm_post"}


def default_targets(model_type: str, stock: dict[str, Any]) -> Any:
    """Default targets of a model type of ours from a table of peft's: those of its stock family, else of `llama`."""
    name = {"llamoe_dense": "llama", "llamoe_mixtral": "mixtral"}.get(model_type, "llama4")
    targets = list(stock.get(name, stock["llama"]))
    if model_type == LlamoeVisionConfig.model_type:
        targets = [_IN_THE_TOWER.get(target, target) for target in targets if target != "gate_proj"]
    return targets


def _fill_tables(peft: ModuleType) -> None:
    from peft.utils import constants

    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MAPPING") and "llama" in table:
            for config_class in CONFIG_CLASSES:
                table.setdefault(config_class.model_type, default_targets(config_class.model_type, table))


def tower_layers(model: nn.Module) -> set[str]:
    """Names of all modules of a multimodal model's vision tower; empty for a tower by itself."""
    return {
        f"{tower}.{name}"
        for tower, module in model.named_modules()
        if tower and isinstance(module, LoadsAdapters) and isinstance(module.config, LlamoeVisionConfig)
        for name, _ in module.named_modules()
        if name
    }


def _expand_all_linear(original: Any, config: Any, model: nn.Module) -> Any:
    """Expand `target_modules="all-linear"`; leave the tower out unless `exclude_modules=[]` asks for it."""
    targets = getattr(config, "target_modules", None)
    config = original(config, model)
    if not isinstance(model, LoadsAdapters):
        return config
    mark(config, model)
    _adapt_experts_here(config)
    excluded = getattr(config, "exclude_modules", None)
    nothing_excluded = excluded in ([], (), set(), "")
    if isinstance(targets, str) and config.target_modules != targets and not nothing_excluded:
        config.target_modules = set(config.target_modules) - tower_layers(model)
    # Before the first layer is wrapped.
    choose_parameters(config, model)
    refuse_for_packed(config, model)
    if _is_lora(config):
        from .expert_begin import refuse_beginnings

        refuse_beginnings(config, model)
        refuse_shared_experts(config, model)
        # Where peft takes "all-linear" for experts, too, it asks here first for the layers alone.
        if not (isinstance(targets, str) and model.config.model_type == LlamoeMixtralConfig.model_type):
            warn_of_frozen_experts(config, model)
    return config


def _is_lora(config: Any) -> bool:
    """Whether it is LoRA's own config; its subclasses (AdaLora) have layers of their own."""
    from peft import LoraConfig

    return type(config) is LoraConfig


def _adapt_experts_here(config: Any) -> None:
    """Let peft wrap the experts' stacks and the routers' weights in our classes."""
    from . import expert_lora, router_lora

    if _is_lora(config) and not config._custom_modules:
        config._register_custom_module({Experts: expert_lora.ParamWrapper, Router: router_lora.ParamWrapper})


def _orient_before_hotswap(model: nn.Module, tensors: dict[str, Any], adapter_name: str, config: Any) -> Any:
    # Only under peft's own classes: `PreTrainedModel.load_adapter(hotswap=True)` has oriented the factors already.
    base = model.get_base_model() if hasattr(model, "get_base_model") else None
    if not isinstance(base, LoadsAdapters):
        return tensors
    return pad_ranks(model, adapter_name, orient_swapped(base, config, adapter_name, tensors))


def _refuse_compiled_hotswap(model: nn.Module) -> None:
    if not any(isinstance(module, LoadsAdapters) for module in model.modules()):
        return
    for place, module in model.named_modules():
        if hasattr(module, "parameter_name"):
            place = place.replace(".base_layer", "")
            raise ValueError(
                f"prepare_model_for_compiled_hotswap: an adapter changes {place}.{module.parameter_name}, a parameter, "
                "and peft prepares linear layers alone. Swap without it: hotswap_adapter takes adapters of any rank, "
                "and a compiled model may compile once more. Or leave experts and routers out: "
                "lora_config(model, experts=False)."
            )


def _check_and_read(model: nn.Module, name_or_path: Any, **download: Any) -> AbstractContextManager:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, LoadsAdapters):
        return nullcontext()
    return reading(check_files(base, name_or_path, **download))


def _tell_of_dropout(model: Any, selected_adapters: list[str] | None) -> None:
    """Say of adapters with dropout on experts' stacks that peft opens them over our models only."""
    for name, config in model.peft_config.items():
        chosen = selected_adapters is None or name in selected_adapters
        if chosen and _is_lora(config) and config.target_parameters and config.lora_dropout:
            if isinstance(model.get_base_model(), LoadsAdapters):
                logger.warning(
                    "Adapter \"%s\" has dropout on the experts' stacks, which peft opens over llamoe's models and no "
                    "others.",
                    name,
                )


def _forward_hooks(enable_hooks: Any, tuner: Any, *args: Any, **kwargs: Any) -> AbstractContextManager:
    if kwargs.get("adapter_names") is not None and isinstance(tuner.model, LoadsAdapters):
        return dealing_names(enable_hooks, tuner, *args, **kwargs)
    return enable_hooks(tuner, *args, **kwargs)


def _text_model(model: nn.Module) -> dict[str, Any]:
    """The language model in a multimodal one, by its name; nothing for other models."""
    is_multimodal = isinstance(model, LoadsAdapters) and model.config.model_type == LlamoeConfig.model_type
    part = getattr(model, "language_model", None) if is_multimodal else None
    return {} if part is None else {"language_model": part}


def _has_tied_text(config: dict[str, Any]) -> bool:
    text: Any = config.get("text_config") if config.get("model_type") == LlamoeConfig.model_type else None
    return isinstance(text, dict) and bool(text.get("tie_word_embeddings"))


def _untie_text(model: nn.Module) -> None:
    """Say in the text model's config that merging has given the head weights of its own."""
    for part in _text_model(model).values():
        embeddings = part.get_input_embeddings(), part.get_output_embeddings()
        weights = [getattr(module, "weight", None) for module in embeddings]
        if all(weight is not None for weight in weights) and weights[0].data_ptr() != weights[1].data_ptr():
            part.config.tie_word_embeddings = False


def _word_embeddings(model: nn.Module) -> nn.Module | None:
    return model.get_input_embeddings() if isinstance(model, LoadsAdapters) else None


def _join_beginnings(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    return join_beginnings(model, tensors) if isinstance(model, LoadsAdapters) else tensors


def _parameters_to_wrap(config: Any, model: nn.Module) -> Any:
    return choose_parameters(config, model) if isinstance(model, LoadsAdapters) else config.target_parameters


def _around_injection(tuner: Any, model: nn.Module, adapter_name: str) -> AbstractContextManager:
    is_ours = isinstance(model, LoadsAdapters)
    return telling_unused(tuner, model, adapter_name) if is_ours else nullcontext()


def _add_weighted_adapter(*args: Any, **kwargs: Any) -> None:
    from .expert_lora import add_weighted_adapter

    add_weighted_adapter(*args, **kwargs)


def _register(peft: ModuleType) -> None:
    _fill_tables(peft)
    read_adapters_as(LlamoeMixtralConfig.model_type, LlamoeMixtralConfig.stock_model_type)
    before_hotswap(_orient_before_hotswap)
    before_compiled_hotswap(_refuse_compiled_hotswap)
    before_merging(refuse_merging)
    prepare_for_training()
    replace_all_linear(_expand_all_linear)
    watch_adapter_files(_check_and_read, remember_file)
    turn_update_of_one_expert(lambda module: isinstance(module, Experts) and module.is_transposed)
    replace_weighted_sum(_add_weighted_adapter)
    before_saving_adapters(_tell_of_dropout)
    after_subtraction(_join_beginnings)
    around_forward_hooks(_forward_hooks)
    find_word_embeddings(_word_embeddings)
    name_tied_parts(_text_model, _has_tied_text, _untie_text)
    choose_wrapped(_parameters_to_wrap)
    around_injection(_around_injection)


def register_with_peft() -> None:
    """Add our model types to peft's tables as soon as peft is imported."""
    when_imported("peft", _register)
