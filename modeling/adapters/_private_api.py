"""Every use of what peft keeps to itself, with its reason.

peft is imported by whoever uses it, so all its modules are looked up when a function runs. All were seen in peft 0.21.1
and 0.21.2.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def replace_all_linear(replacement: Callable) -> None:
    """Replace peft's expansion of "all-linear" by `replacement(original, peft_config, model)`.

    peft does not ask models which layers that means. Several of its modules import the function by name; all share
    one original.
    """
    tuners_utils = importlib.import_module("peft.tuners.tuners_utils")
    original = tuners_utils._maybe_include_all_linear_layers

    @functools.wraps(original)
    def expand(peft_config, model):
        return replacement(original, peft_config, model)

    replace_in_peft("_maybe_include_all_linear_layers", original, expand)


def read_adapters_as(model_type: str, stock_type: str) -> None:
    """Have peft treat adapters of a model type as those of a stock one, whose layers transformers 5 has renamed.

    peft then takes "all-linear" and the names of single experts' layers for the stacks that hold them. Where a config
    names no layers, peft would make that an empty set, and forget its default.
    """
    from peft.utils import transformers_weight_conversion as conversion

    patterns = conversion._MODEL_TO_CONVERSION_PATTERN
    patterns[model_type] = patterns[stock_type]
    original = conversion._convert_peft_config_moe

    @functools.wraps(original)
    def convert(peft_config, model):
        if peft_config.target_modules is not None or model.config.model_type != model_type:
            original(peft_config, model)

    conversion._convert_peft_config_moe = convert


def replace_weighted_sum(replacement: Callable) -> None:
    """Replace peft's sum of adapters by `replacement(original, tuner, adapters, weights, adapter_name, ...)`.

    peft does not ask the layers that hold the factors.
    """
    tuner_class = importlib.import_module("peft.tuners.lora.model").LoraModel
    original = tuner_class.add_weighted_adapter

    @functools.wraps(original)
    def add_weighted_adapter(self, *args, **kwargs):
        return replacement(original, self, *args, **kwargs)

    tuner_class.add_weighted_adapter = add_weighted_adapter


def after_subtraction(correct: Callable) -> None:
    """Let `correct(model, tensors)` return what peft saves of an adapter without the numbers that it began with."""
    tuner_class = importlib.import_module("peft.tuners.lora.model").LoraModel
    original = tuner_class.subtract_mutated_init

    @functools.wraps(original)
    def subtract(self, *args, **kwargs):
        return correct(self.model, original(self, *args, **kwargs))

    tuner_class.subtract_mutated_init = subtract


@contextmanager
def sum_of_parameters(tuner: Any) -> Iterator[None]:
    """Let peft sum adapters of parameters, which it refuses before it looks at their layers."""
    check = tuner._check_add_weighted_adapter

    def check_modules(adapters, *args, **kwargs):
        configs = [config for name, config in tuner.peft_config.items() if name in adapters]
        targets = [config.target_parameters for config in configs]
        try:
            for config in configs:
                config.target_parameters = None
            return check(adapters, *args, **kwargs)
        finally:
            for config, each in zip(configs, targets, strict=True):
                config.target_parameters = each

    tuner._check_add_weighted_adapter = check_modules
    try:
        yield
    finally:
        del tuner._check_add_weighted_adapter


def watch_adapter_files(around: Callable, after: Callable) -> None:
    """Read adapters inside of `around(model, model_id, **kwargs)`; then call `after(tensors, model_id, **kwargs)`.

    The context is entered before layers are made for the adapter; `model` is a `PeftModel` or its base. If an adapter
    of that name already exists, peft reads the file's weights without its config.
    """
    peft_model = importlib.import_module("peft.peft_model")
    hotswap = importlib.import_module("peft.utils.hotswap")
    load_weights = peft_model.load_peft_weights
    from_pretrained = peft_model.PeftModel.from_pretrained.__func__
    load_adapter = peft_model.PeftModel.load_adapter
    hotswap_adapter = hotswap.hotswap_adapter

    @functools.wraps(load_weights)
    def read(model_id, *args, **kwargs):
        tensors = load_weights(model_id, *args, **kwargs)
        after(tensors, model_id, **kwargs)
        return tensors

    @functools.wraps(from_pretrained)
    def make(cls, model, model_id, *args, **kwargs):
        with around(model, model_id, **kwargs):
            return from_pretrained(cls, model, model_id, *args, **kwargs)

    @functools.wraps(load_adapter)
    def add(self, model_id, *args, **kwargs):
        with around(self, model_id, **kwargs):
            return load_adapter(self, model_id, *args, **kwargs)

    @functools.wraps(hotswap_adapter)
    def swap(model, model_name_or_path, *args, **kwargs):
        with around(model, model_name_or_path, **kwargs):
            return hotswap_adapter(model, model_name_or_path, *args, **kwargs)

    vars(peft_model)["load_peft_weights"] = read
    peft_model.PeftModel.from_pretrained = classmethod(make)
    peft_model.PeftModel.load_adapter = add
    vars(hotswap)["hotswap_adapter"] = swap


def before_saving_adapters(tell: Callable) -> None:
    """Call `tell(model, selected_adapters)` before a `PeftModel` is saved; None selects all adapters."""
    peft_model = importlib.import_module("peft.peft_model").PeftModel
    original = peft_model.save_pretrained

    @functools.wraps(original)
    def save_pretrained(
        self, save_directory, safe_serialization=True, selected_adapters=None, *args, **kwargs
    ):
        tell(self, selected_adapters)
        return original(self, save_directory, safe_serialization, selected_adapters, *args, **kwargs)

    peft_model.save_pretrained = save_pretrained


def before_merging(check: Callable[[torch.nn.Module], None]) -> None:
    """Call `check(module)` before peft merges adapters: with all that a tuner has wrapped, then with each layer.

    A tuner is asked before it changes its first layer. Some do not ask, and a layer can be merged by itself.
    """
    tuners_utils = importlib.import_module("peft.tuners.tuners_utils")
    allow = tuners_utils.BaseTuner._check_merge_allowed
    original = tuners_utils.check_adapters_to_merge

    @functools.wraps(allow)
    def check_tuner(self):
        check(self.model)
        return allow(self)

    @functools.wraps(original)
    def check_layer(module, *args, **kwargs):
        names = original(module, *args, **kwargs)
        if names:
            check(module)
        return names

    tuners_utils.BaseTuner._check_merge_allowed = check_tuner
    replace_in_peft("check_adapters_to_merge", original, check_layer)


def replace_in_peft(name: str, original: Callable, replacement: Callable) -> None:
    """Replace a function in all modules of peft that have imported it by name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("peft.") and vars(module).get(name) is original:
            vars(module)[name] = replacement


def before_hotswap(prepare: Callable) -> None:
    """Let `prepare(model, tensors, adapter_name, config)` return the tensors that peft swaps into a `PeftModel`."""
    hotswap = importlib.import_module("peft.utils.hotswap")
    original = hotswap.hotswap_adapter_from_state_dict

    @functools.wraps(original)
    def swap(model, state_dict, adapter_name, config, *args, **kwargs):
        return original(
            model, prepare(model, state_dict, adapter_name, config), adapter_name, config, *args, **kwargs
        )

    vars(hotswap)["hotswap_adapter_from_state_dict"] = swap


def before_compiled_hotswap(check: Callable[[torch.nn.Module], None]) -> None:
    """Call `check(model)` before peft prepares a model's adapters to be swapped under a compiler.

    Whoever imported peft's function earlier has it as it was, so its first step is replaced.
    """
    hotswap = importlib.import_module("peft.utils.hotswap")
    original = hotswap._convert_scalings_to_tensor

    @functools.wraps(original)
    def convert(model):
        check(model)
        return original(model)

    vars(hotswap)["_convert_scalings_to_tensor"] = convert


def turn_update_of_one_expert(is_input_first: Callable[[torch.nn.Module], bool]) -> None:
    """Make peft add LoRA's update to a stack of one expert in the right orientation.

    peft takes a parameter `[1, in, out]` for a linear layer's weight and makes an update `[out, in]`: an error in the
    first forward pass or, if both sizes are equal, a wrong result in silence. With more experts it respects
    `is_transposed`, and its update has three axes.

    Args:
        is_input_first: whether a module's stacks are `[E, in, out]`.
    """
    wrapper = importlib.import_module("peft.tuners.lora.layer").ParamWrapper
    original = wrapper.get_delta_weight

    @functools.wraps(original)
    def get_delta_weight(self, *args, **kwargs):
        update = original(self, *args, **kwargs)
        return update.T[None] if update.ndim == 2 and is_input_first(self.get_base_layer()) else update

    wrapper.get_delta_weight = get_delta_weight


def choose_wrapped(choose: Callable) -> None:
    """Have peft wrap the parameters that `choose(config, model)` names in full.

    peft matches `target_parameters` with the ends of names, and asks no other field of the config. The config stays as
    its user wrote it.
    """
    tuner_class = importlib.import_module("peft.tuners.tuners_utils").BaseTuner
    original = tuner_class._inject_parameters

    @functools.wraps(original)
    def inject(self, peft_config, model, *args, **kwargs):
        asked, peft_config.target_parameters = peft_config.target_parameters, choose(peft_config, model)
        try:
            return original(self, peft_config, model, *args, **kwargs)
        finally:
            peft_config.target_parameters = asked

    tuner_class._inject_parameters = inject


def around_injection(context: Callable) -> None:
    """Make peft change a model's layers for an adapter inside of `context(tuner, model, adapter_name)`."""
    tuner_class = importlib.import_module("peft.tuners.tuners_utils").BaseTuner
    original = tuner_class.inject_adapter

    @functools.wraps(original)
    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        with context(self, model, adapter_name):
            return original(self, model, adapter_name, *args, **kwargs)

    tuner_class.inject_adapter = inject_adapter


def find_word_embeddings(find: Callable) -> None:
    """Have peft's prompts use the embeddings that `find(model)` returns, where that is not None.

    peft looks for a module "embeddings.word_embeddings", then among the weights of the first model inside of a model,
    which in a multimodal one is the tower.
    """
    peft_model = importlib.import_module("peft.peft_model").PeftModel
    original = peft_model._setup_prompt_encoder

    @functools.wraps(original)
    def set_up(self, *args, **kwargs):
        base, found = self.base_model, find(self.base_model)
        if found is None:
            return original(self, *args, **kwargs)
        get_submodule = base.get_submodule
        base.get_submodule = lambda name: (
            found if name == "embeddings.word_embeddings" else get_submodule(name)
        )
        try:
            return original(self, *args, **kwargs)
        finally:
            del base.get_submodule

    peft_model._setup_prompt_encoder = set_up


def name_tied_parts(parts: Callable, reads_as_tied: Callable, after_merging: Callable) -> None:
    """Let peft find weights that are tied inside of a model's parts.

    peft asks a model's own class and config. Neither says so of a multimodal model, whose text model has tied weights.

    Args:
        parts: names of the parts of a model to ask as well, by the parts.
        reads_as_tied: whether a model's config, as a dict, means tied weights.
        after_merging: called with a model whose adapters are merged.
    """
    other = importlib.import_module("peft.utils.other")
    tuner_class = importlib.import_module("peft.tuners.tuners_utils").BaseTuner
    names_of, config_of = other._get_module_names_tied_with_embedding, tuner_class.get_model_config
    unload = tuner_class._unload_and_optionally_merge

    @functools.wraps(names_of)
    def names(model):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base = base.model if hasattr(base, "tuner_layer_cls") else base
        # peft compares a layer's last name with these, where it takes the embedding's factors for it.
        return names_of(model) or [name for module in parts(base).values() for name in names_of(module)]

    @functools.wraps(config_of)
    def config(model):
        config = config_of(model)
        return {**config, "tie_word_embeddings": True} if reads_as_tied(config) else config

    @functools.wraps(unload)
    def unload_and_merge(self, *args, **kwargs):
        model = unload(self, *args, **kwargs)
        after_merging(model)
        return model

    replace_in_peft("_get_module_names_tied_with_embedding", names_of, names)
    tuner_class.get_model_config = staticmethod(config)
    tuner_class._unload_and_optionally_merge = unload_and_merge


def around_forward_hooks(context: Callable) -> None:
    """Replace peft's context for batches of several adapters by `context(original, tuner, *args, **kwargs)`."""
    mapping = importlib.import_module("peft.mapping").PEFT_TYPE_TO_TUNER_MAPPING
    for tuner_class in set(mapping.values()):
        if original := vars(tuner_class).get("_enable_peft_forward_hooks"):
            tuner_class._enable_peft_forward_hooks = _with_context(original, context)


def _with_context(original: Callable, context: Callable) -> Callable:
    @functools.wraps(original)
    def enable(self, *args, **kwargs):
        return context(original, self, *args, **kwargs)

    return enable
