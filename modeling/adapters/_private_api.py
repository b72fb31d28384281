"""What peft does otherwise over models of ours: every use of what peft keeps to itself, with its reason.

Importing this file changes peft, so it is imported when peft is (`peft_registration`). Each function here stands for
one of peft's, which it gets as `original`. All were seen in peft 0.21.2.
"""

import functools
import inspect
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners import tuners_utils
from peft.tuners.lora.model import LoraModel
from peft.utils import hotswap, other
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN
from torch import nn

from ...configuration import LlamoeConfig, LlamoeMixtralConfig, LlamoeVisionConfig
from ...configuration.quantization import METHOD
from ..checkpoints import saving_adapter
from ..layers import Linear
from ..moe import Experts
from ..offload import freeze_for_training
from ..quantization import QuantizedLinear
from . import expert_lora
from .adapted_parts import refuse_shared_experts, warn_of_frozen_experts
from .expert_layout import refuse_square_stacks
from .files import tensor_names
from .linear_lora import lora_linear
from .loading import LoadsAdapters
from .packed_weights import refuse_for_packed, refuse_merging
from .stack_targets import choose_parameters, reading, telling_unused

# peft treats adapters of these model types as those of Mixtral, whose layers transformers 5 has renamed: it takes
# "all-linear" and the names of single experts' layers for the stacks that hold them.
_MODEL_TO_CONVERSION_PATTERN[LlamoeMixtralConfig.model_type] = _MODEL_TO_CONVERSION_PATTERN[
    LlamoeMixtralConfig.stock_model_type
]


def instead_of(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Put the decorated function, which gets the original as its first argument, into the place of `owner.name`.

    Modules that have imported the original by name get it, too.
    """
    found = vars(owner)[name]
    kind = type(found) if isinstance(found, classmethod | staticmethod) else lambda function: function
    original = getattr(found, "__func__", found)

    def put(replacement: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args, **kwargs):
            return replacement(original, *args, **kwargs)

        setattr(owner, name, kind(call))
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is found:
                setattr(module, name, call)
        return replacement

    return put


def _is_ours(model: nn.Module) -> bool:
    return isinstance(_base(model), LoadsAdapters)


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# Making an adapter's layers


@instead_of(tuners_utils, "_maybe_include_all_linear_layers")
def expand_all_linear(original: Callable, config: Any, model: nn.Module) -> Any:
    """Leave the tower out of "all-linear" unless `exclude_modules=[]`; refuse what cannot be, before a layer changes.

    peft does not ask models which layers "all-linear" means.
    """
    targets = getattr(config, "target_modules", None)
    config = original(config, model)
    if not isinstance(model, LoadsAdapters):
        return config
    # LoRA's subclasses (AdaLora) have layers of their own.
    is_lora = type(config) is LoraConfig
    if is_lora and not config._custom_modules:
        layers = {Experts: expert_lora.ParamWrapper, Linear: lora_linear, QuantizedLinear: lora_linear}
        config._register_custom_module(layers)
    nothing_excluded = getattr(config, "exclude_modules", None) in ([], (), set(), "")
    if isinstance(targets, str) and config.target_modules != targets and not nothing_excluded:
        config.target_modules = set(config.target_modules) - _tower_layers(model)
    parameters = choose_parameters(config, model)
    refuse_square_stacks(model, parameters)
    refuse_for_packed(config, model, parameters)
    if is_lora:
        refuse_shared_experts(model, parameters)
        # Where peft takes "all-linear" for experts, too, it asks here first for the layers alone.
        if not (isinstance(targets, str) and model.config.model_type == LlamoeMixtralConfig.model_type):
            warn_of_frozen_experts(config, model, parameters)
    return config


def _tower_layers(model: nn.Module) -> set[str]:
    """Names of all modules of a multimodal model's vision tower; empty for a tower by itself."""
    return {
        f"{tower}.{name}"
        for tower, module in model.named_modules()
        if tower and isinstance(module, LoadsAdapters) and isinstance(module.config, LlamoeVisionConfig)
        for name, _ in module.named_modules()
        if name
    }


@instead_of(tuners_utils.BaseTuner, "inject_adapter")
def inject_adapter(
    original: Callable, self: Any, model: nn.Module, adapter_name: str, *args, **kwargs
) -> None:
    """Tell of what matches nothing, stacks and routers included, which peft passes over.

    Where a Mixtral's config names no layers, peft would make that an empty set, and forget its default.
    """
    if not isinstance(model, LoadsAdapters):
        return original(self, model, adapter_name, *args, **kwargs)
    config = self.peft_config[adapter_name]
    if getattr(config, "target_modules", "") is None:
        self._prepare_adapter_config(config, self.get_model_config(model))
    with telling_unused(self, model, adapter_name):
        return original(self, model, adapter_name, *args, **kwargs)


@instead_of(tuners_utils.BaseTuner, "_inject_parameters")
def inject_parameters(
    original: Callable, self: Any, peft_config: Any, model: nn.Module, *args, **kwargs
) -> Any:
    """Let all fields that choose layers choose parameters; the config stays as its user wrote it.

    peft matches `target_parameters` with the ends of names, and asks no other field.
    """
    if not isinstance(model, LoadsAdapters):
        return original(self, peft_config, model, *args, **kwargs)
    asked, peft_config.target_parameters = (
        peft_config.target_parameters,
        choose_parameters(peft_config, model),
    )
    try:
        return original(self, peft_config, model, *args, **kwargs)
    finally:
        peft_config.target_parameters = asked


@instead_of(other, "prepare_model_for_kbit_training")
def prepare_for_training(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Let peft see that a model of ours has quantized weights, and leave offloaded experts as they are.

    It knows bitsandbytes by a flag, and other libraries by their names. For a model that it does not know, it leaves
    out in silence the gradient checkpointing that it is asked for by default. Stacks of 16 bits it would read and cast
    to float32.
    """
    if getattr(model, "quantization_method", None) != METHOD:
        return freeze_for_training(original, model, *args, **kwargs)
    model.is_loaded_in_4bit = True
    try:
        return freeze_for_training(original, model, *args, **kwargs)
    finally:
        # Who reads it elsewhere asks for bitsandbytes.
        del model.is_loaded_in_4bit


# Reading and swapping


@contextmanager
def _reading(model: nn.Module, name_or_path: Any, **download: Any) -> Iterator[None]:
    if not _is_ours(model):
        yield
        return
    with reading(tensor_names(name_or_path, **download)):
        yield


@instead_of(PeftModel, "from_pretrained")
def from_pretrained(original: Callable, cls: Any, model: nn.Module, model_id: Any, *args, **kwargs) -> Any:
    """Make layers for the tensors that the file has."""
    with _reading(model, model_id, **kwargs):
        return original(cls, model, model_id, *args, **kwargs)


@instead_of(PeftModel, "load_adapter")
def load_adapter(original: Callable, self: Any, model_id: Any, *args, **kwargs) -> Any:
    """Make layers for the tensors that the file has."""
    with _reading(self, model_id, **kwargs):
        return original(self, model_id, *args, **kwargs)


@instead_of(PeftModel, "save_pretrained")
def save_pretrained(original: Callable, self: Any, save_directory: Any, *args, **kwargs) -> Any:
    """Write an adapter's files to a hidden folder first, so that a full disk leaves no half of an adapter."""
    given = inspect.signature(original).bind(self, save_directory, *args, **kwargs).arguments
    # Each adapter but the default one has a folder of its own.
    names = [name for name in given.get("selected_adapters") or self.peft_config if name != "default"]
    target = Path(save_directory)
    is_plain = given.get("path_initial_model_for_weight_conversion") is None and not any(
        (target / name).exists() for name in names
    )
    if not (_is_ours(self) and given.get("is_main_process", True) and is_plain) or target.is_file():
        return original(self, save_directory, *args, **kwargs)
    with saving_adapter(target) as folder:
        # peft reads the model card that is there, and adds to it.
        if (card := target / "README.md").is_file():
            shutil.copy(card, folder)
        return original(self, str(folder), *args, **kwargs)


@instead_of(hotswap, "hotswap_adapter_from_state_dict")
def swap(original: Callable, model: nn.Module, state_dict: dict[str, torch.Tensor], *args, **kwargs) -> None:
    """Refuse to swap factors of stacks for others of another shape.

    peft adds rows and columns of zeros at the end, which in a stack belong to other experts.
    """
    modules = {name.removeprefix("_orig_mod."): module for name, module in model.named_modules()}
    own = {name.removeprefix("_orig_mod."): parameter.shape for name, parameter in model.named_parameters()}
    for key, tensor in state_dict.items():
        is_of_stack = isinstance(modules.get(key.rpartition(".lora_")[0]), expert_lora.ParamWrapper)
        if is_of_stack and tensor.shape != own.get(key, tensor.shape):
            raise ValueError(
                f"hotswap: {key} has shape {list(tensor.shape)}, and the adapter that it replaces has "
                f"{list(own[key])}. Stacks of experts are swapped for the same rank and layout alone: load the adapter "
                "under a name of its own, and choose it by set_adapter()."
            )
    original(model, state_dict, *args, **kwargs)


@instead_of(hotswap, "_convert_scalings_to_tensor")
def prepare_compiled_hotswap(original: Callable, model: nn.Module) -> Any:
    """Refuse what `prepare_model_for_compiled_hotswap` leaves out; this is its first step."""
    for place, module in model.named_modules():
        if hasattr(module, "parameter_name"):
            raise ValueError(
                "prepare_model_for_compiled_hotswap: an adapter changes "
                f"{place.replace('.base_layer', '')}.{module.parameter_name}, a parameter, and peft prepares linear "
                "layers alone. Swap without it, or leave experts out: lora_config(model, experts=False)."
            )
    return original(model)


# Sums and merging


@instead_of(LoraModel, "_check_add_weighted_adapter")
def check_sum(
    original: Callable, self: Any, adapters: Sequence[str], combination_type: str, **more: Any
) -> Any:
    """Let peft sum adapters of experts' stacks, which it refuses before it looks at their layers.

    Raises:
        ValueError: a sum that peft takes of whole matrices; adapters of other stacks.
    """
    stacks = expert_lora.stacks_of(self.model, adapters)
    if any(name not in module.lora_A for module in stacks for name in adapters):
        raise ValueError(
            f"Some of the adapters {', '.join(adapters)} adapt experts' stacks that others do not."
        )
    # The "sum" of one adapter is linear. "cat" would put ranks of one expert beside another expert's.
    if stacks and ("svd" in combination_type or combination_type == "cat") and len(adapters) > 1:
        raise ValueError(
            f'combination_type="{combination_type}" is not for adapters of experts\' stacks: choose "linear".'
        )
    targets = {name: self.peft_config[name].target_parameters for name in adapters if stacks}
    try:
        for name in targets:
            self.peft_config[name].target_parameters = None
        return original(self, adapters=adapters, combination_type=combination_type, **more)
    finally:
        for name, parameters in targets.items():
            self.peft_config[name].target_parameters = parameters


@instead_of(tuners_utils.BaseTuner, "_check_merge_allowed")
def check_merge_of_all(original: Callable, self: Any) -> None:
    """Refuse to merge into packed weights before the first layer is merged."""
    refuse_merging(self.model)
    original(self)


@instead_of(tuners_utils, "check_adapters_to_merge")
def check_merge_of_layer(original: Callable, module: nn.Module, *args, **kwargs) -> list[str]:
    """Refuse to merge into packed weights; some tuners do not ask, and a layer can be merged by itself."""
    if names := original(module, *args, **kwargs):
        refuse_merging(module)
    return names


# Embeddings, tied weights and rows


@instead_of(PeftModel, "_setup_prompt_encoder")
def set_up_prompts(original: Callable, self: Any, *args, **kwargs) -> Any:
    """Let prompts use the text model's embeddings.

    peft looks for a module "embeddings.word_embeddings", then among the weights of the first model inside of a model,
    which in a multimodal one is the tower.
    """
    base = self.base_model
    if not isinstance(base, LoadsAdapters):
        return original(self, *args, **kwargs)
    get_submodule, found = base.get_submodule, base.get_input_embeddings()
    base.get_submodule = lambda target: (
        found if target == "embeddings.word_embeddings" else get_submodule(target)
    )
    try:
        return original(self, *args, **kwargs)
    finally:
        del base.get_submodule


# peft asks a model's own class and config for tied weights. Neither says so of a multimodal model, whose text model has
# them.


def _text_model(model: Any) -> Any:
    """The language model inside of a multimodal model; None for other models."""
    model = _base(model)
    model = model.model if isinstance(model, tuners_utils.BaseTuner) else model
    is_multimodal = isinstance(model, LoadsAdapters) and model.config.model_type == LlamoeConfig.model_type
    return getattr(model, "language_model", None) if is_multimodal else None


@instead_of(other, "_get_module_names_tied_with_embedding")
def names_tied_with_embedding(original: Callable, model: nn.Module) -> list[str]:
    """The names in the text model, of which peft compares the last parts with layers'."""
    text = _text_model(model)
    return original(model) or ([] if text is None else original(text))


@instead_of(tuners_utils.BaseTuner, "get_model_config")
def get_model_config(original: Callable, model: nn.Module) -> dict[str, Any]:
    """The config as a dict, which says so where the text model's weights are tied."""
    config = original(model)
    text: Any = config.get("text_config") if config.get("model_type") == LlamoeConfig.model_type else None
    is_tied = isinstance(text, dict) and text.get("tie_word_embeddings")
    return {**config, "tie_word_embeddings": True} if is_tied else config


@instead_of(tuners_utils.BaseTuner, "_unload_and_optionally_merge")
def unload_and_merge(original: Callable, self: Any, *args, **kwargs) -> nn.Module:
    """Say in the text model's config where merging has given the head weights of its own."""
    model = original(self, *args, **kwargs)
    if (text := _text_model(model)) is not None:
        embeddings = text.get_input_embeddings(), text.get_output_embeddings()
        weights = [getattr(module, "weight", None) for module in embeddings]
        if all(weight is not None for weight in weights) and weights[0].data_ptr() != weights[1].data_ptr():
            text.config.tie_word_embeddings = False
    return model


def enable_forward_hooks(original: Callable, self: Any, *args, **kwargs) -> AbstractContextManager:
    """Enter a forward with `adapter_names`, one adapter for each row.

    Raises:
        ValueError: an adapter changes a parameter (a stack of experts, say), or the rows have pictures, whose tiles
            are no rows.
    """
    if kwargs.get("adapter_names") is None or not isinstance(self.model, LoadsAdapters):
        return original(self, *args, **kwargs)
    changed = next(
        (name for name, module in self.model.named_modules() if hasattr(module, "parameter_name")), None
    )
    has_pictures = any(kwargs.get(name) is not None for name in ("pixel_values", "mm_encoder_outputs"))
    if changed is not None or has_pictures:
        what = "rows with pictures" if changed is None else f"experts and other parameters ({changed})"
        raise ValueError(
            f"adapter_names: there are no batches of several adapters for {what}. Run the rows of each adapter by "
            "themselves (set_adapter)."
        )
    return original(self, *args, **kwargs)


for _tuner_class in set(PEFT_TYPE_TO_TUNER_MAPPING.values()):
    if "_enable_peft_forward_hooks" in vars(_tuner_class):
        instead_of(_tuner_class, "_enable_peft_forward_hooks")(enable_forward_hooks)
