"""Patches of functions of peft for llamoe's models, each with the user's report that is its reason.

This file changes peft when it is imported (`peft_registration.py`). Each decorated function replaces one of peft's, and
gets that as `original`. All were checked with peft 0.21.2.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners import tuners_utils
from peft.tuners.lora.model import LoraModel
from peft.utils import hotswap, other
from peft.utils.transformers_weight_conversion import (
    _MODEL_TO_CONVERSION_PATTERN,
    convert_peft_config_for_transformers,
)
from torch import nn

from ...configuration import LlamoeConfig, LlamoeMixtralConfig, LlamoeVisionConfig
from ...configuration.quantization import METHOD
from ..layers import Linear
from ..moe import Experts
from ..offload import freeze_for_training
from ..quantization import QuantizedLinear
from .expert_lora import ParamWrapper, lora_linear
from .loading import LoadsAdapters
from .stack_targets import choose_parameters, refuse_unsupported
from .unsupported import unsupported

# For model types in this table peft converts the configs of adapters that were made with transformers 4. For Mixtral it
# replaces "all-linear", and names of single experts' layers, by the stacks of transformers 5.
_MODEL_TO_CONVERSION_PATTERN[LlamoeMixtralConfig.model_type] = _MODEL_TO_CONVERSION_PATTERN[
    LlamoeMixtralConfig.stock_model_type
]


def instead_of(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Replace `owner.name` by the decorated function, which gets the original as its first argument.

    It is also replaced in modules that have imported the original by name.
    """
    original = vars(owner)[name]

    def put(replacement: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args, **kwargs):
            return replacement(original, *args, **kwargs)

        setattr(owner, name, call)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, call)
        return replacement

    return put


# "layers_to_transform does nothing for my experts", "all-linear has trained the vision tower, too", "the head of my
# multimodal model is tied to the embedding, and is not trained with it": peft chooses layers without asking the model.
@instead_of(tuners_utils.BaseTuner, "inject_adapter")
def inject_adapter(
    original: Callable, self: Any, model: nn.Module, adapter_name: str, *args, **kwargs
) -> None:
    """Add an adapter's layers to a model: of llamoe's classes, for the parameters that the whole config chooses."""
    if not isinstance(model, LoadsAdapters):
        return original(self, model, adapter_name, *args, **kwargs)
    config = self.peft_config[adapter_name]
    if type(config) is LoraConfig:
        layers = {Experts: ParamWrapper, Linear: lora_linear, QuantizedLinear: lora_linear}
        config._register_custom_module(layers)
    if getattr(config, "target_modules", "") is None:
        # Fill in peft's default now: for Mixtral the conversion below would turn None into an empty set.
        self._prepare_adapter_config(config, self.get_model_config(model))
    # peft begins with this conversion, too, but the parameters that it adds are needed here.
    convert_peft_config_for_transformers(config, model, None)
    _leave_out_tower(config, model)
    choose_parameters(config, model)
    refuse_unsupported(config, model)
    with _showing_tied_head(model):
        return original(self, model, adapter_name, *args, **kwargs)


def _leave_out_tower(config: Any, model: nn.Module) -> None:
    """Replace "all-linear" by the names of the linear layers without the tower's, unless `exclude_modules` is []."""
    targets = getattr(config, "target_modules", None)
    tower = {
        f"{tower}.{name}"
        for tower, module in model.named_modules()
        if tower and isinstance(module, LoadsAdapters) and isinstance(module.config, LlamoeVisionConfig)
        for name, _ in module.named_modules()
    }
    includes_tower = getattr(config, "exclude_modules", None) in ([], (), set(), "")
    if not tower or includes_tower or not isinstance(targets, str):
        return
    tuners_utils._maybe_include_all_linear_layers(config, model)
    if config.target_modules != targets:
        config.target_modules = set(config.target_modules) - tower


@contextmanager
def _showing_tied_head(model: Any) -> Iterator[None]:
    """Enter a context in which a multimodal config, the one that peft reads, has its text's `tie_word_embeddings`."""
    text = getattr(model, "language_model", None)
    is_multimodal = model.config.model_type == LlamoeConfig.model_type and text is not None
    if not is_multimodal or not text.config.tie_word_embeddings or model.config.tie_word_embeddings:
        yield
        return
    model.config.tie_word_embeddings = True
    # The text model's names are enough: peft compares only their last parts with those of layers.
    model._tied_weights_keys = list(text._tied_weights_keys)
    try:
        yield
    finally:
        model.config.tie_word_embeddings = False
        del model._tied_weights_keys


# "My QLoRA step needs ten times the memory": peft recognises quantized models by flags such as `is_loaded_in_4bit`. For
# a model without one it skips gradient checkpointing, its default, and casts all 16-bit weights, even those on disk.
@instead_of(other, "prepare_model_for_kbit_training")
def prepare_for_training(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Freeze a model, enable gradient checkpointing, and cast the weights that are in memory and not packed."""
    if getattr(model, "quantization_method", None) != METHOD:
        return freeze_for_training(original, model, *args, **kwargs)
    model.is_loaded_in_4bit = True
    try:
        return freeze_for_training(original, model, *args, **kwargs)
    finally:
        # Remove the flag: by it other code recognises bitsandbytes' models.
        del model.is_loaded_in_4bit


# "After hotswap to an adapter of a lower rank my model talks nonsense": peft appends rows and columns of zeros to the
# factors, so that in a stack experts use each other's.
@instead_of(hotswap, "hotswap_adapter_from_state_dict")
def swap(original: Callable, model: nn.Module, state_dict: dict[str, torch.Tensor], *args, **kwargs) -> None:
    """Replace an adapter's weights by those of another one; refuse factors of stacks with another shape."""
    modules = {name.removeprefix("_orig_mod."): module for name, module in model.named_modules()}
    shapes = {
        name.removeprefix("_orig_mod."): parameter.shape for name, parameter in model.named_parameters()
    }
    for key, tensor in state_dict.items():
        is_of_stack = isinstance(modules.get(key.rpartition(".lora_")[0]), ParamWrapper)
        if is_of_stack and tensor.shape != shapes.get(key, tensor.shape):
            raise unsupported(
                "hotswap", f"hotswap: {key} has shape {list(tensor.shape)}, not {list(shapes[key])}"
            )
    original(model, state_dict, *args, **kwargs)


# "I want the sum of two adapters of experts": peft refuses every sum if an adapter has `target_parameters`.
@instead_of(LoraModel, "_check_add_weighted_adapter")
def check_sum(
    original: Callable, self: Any, adapters: Sequence[str], combination_type: str, **more: Any
) -> Any:
    """Check a weighted sum of adapters; allow sums of experts' adapters if they are element by element."""
    targets = {
        name: self.peft_config[name].target_parameters for name in adapters if name in self.peft_config
    }
    if isinstance(self.model, LoadsAdapters) and any(targets.values()):
        is_of_matrices = "svd" in combination_type or combination_type == "cat"
        # With a single adapter every combination type only scales its factors, which stacks support.
        different = {str(sorted(parameters or ())) for parameters in targets.values()}
        if (is_of_matrices and len(adapters) > 1) or len(different) > 1:
            raise unsupported("combination_type", f"{combination_type!r} for {', '.join(adapters)}")
        for name in targets:
            self.peft_config[name].target_parameters = None
    try:
        return original(self, adapters=adapters, combination_type=combination_type, **more)
    finally:
        for name, parameters in targets.items():
            self.peft_config[name].target_parameters = parameters


# "A row with pictures uses another row's adapter": peft takes the tiles of pictures for rows of the batch. And experts
# get the tokens of all rows in one tensor, which does not show the row of each token.
@instead_of(LoraModel, "_enable_peft_forward_hooks")
def enable_forward_hooks(original: Callable, self: Any, *args, **kwargs) -> AbstractContextManager:
    """Add peft's hooks; refuse `adapter_names`, an adapter for each row, with experts' adapters or pictures."""
    if kwargs.get("adapter_names") is not None and isinstance(self.model, LoadsAdapters):
        if any(hasattr(module, "parameter_name") for module in self.model.modules()):
            raise unsupported("adapter_names", "adapter_names beside adapters of experts")
        if any(kwargs.get(name) is not None for name in ("pixel_values", "mm_encoder_outputs")):
            raise unsupported("adapter_names", "adapter_names beside pictures")
    return original(self, *args, **kwargs)
