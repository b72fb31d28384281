"""Which parameters `target_parameters` means: peft's other fields count for them as they do for linear layers.

peft itself matches these names with the ends of the parameters' names, and passes over `layers_to_transform`,
`layers_pattern`, `exclude_modules` and `modules_to_save`. An adapter that peft trained alone
has factors for all layers, and is recognised by them when it is read.
"""

import copy
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

_PATTERNS = ("rank_pattern", "alpha_pattern")
# The names in the adapter's file that is being read, and the name that the adapter gets.
_keys: ContextVar[Collection[str]] = ContextVar("_keys", default=())
_adapter: ContextVar[str | None] = ContextVar("_adapter", default=None)


@contextmanager
def reading(keys: Collection[str], adapter_name: str | None = None) -> Iterator[None]:
    """Say that layers are made for the tensors of these names, not to be trained anew."""
    tokens = _keys.set(keys), _adapter.set(adapter_name)
    try:
        yield
    finally:
        _keys.reset(tokens[0])
        _adapter.reset(tokens[1])


def adapter_being_read() -> str | None:
    """Return the name that `reading` was given."""
    return _adapter.get()


def targeted_parameters(config: Any, model: nn.Module) -> list[str]:
    """Full names of the parameters that an adapter changes by its `target_parameters`, without those of wrappers."""
    asked = tuple(getattr(config, "target_parameters", None) or ())
    named = [
        (name, f"{name}.{parameter}")
        for name, module in (_plain_modules(model) if asked else ())
        for parameter, _ in module.named_parameters(recurse=False)
        if any(f".{name}.{parameter}".endswith(f".{each}") for each in asked)
    ]
    probe = copy.copy(config)
    probe.target_modules = list(asked)
    targeted = [(name, key) for name, key in named if _is_targeted(probe, name, key)]
    counts = Counter(name for name, _ in targeted)
    if any(_stacks_in_file(name) > counts[name] for name in {name for name, _ in named}):
        # peft by itself has trained it.
        return [key for _, key in named]
    return [key for _, key in targeted]


def _plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's own modules, by their names without adapters."""
    for name, module in model.named_modules():
        if ".lora_" not in name:
            yield name.replace(".base_layer", ""), module


def _stacks_in_file(name: str) -> int:
    """For how many parameters of a module the adapter that is being read has factors.

    Their wrappers are nested. Whatever stands before the name of the module's layer does not count.
    """
    count, place = 0, name[name.find("layers.") :]
    while any(f"{place}.lora_" in key for key in _keys.get()):
        count, place = count + 1, f"{place}.base_layer"
    return count


def _is_targeted(probe: Any, name: str, key: str) -> bool:
    from peft.tuners.tuners_utils import check_target_module_exists

    return bool(check_target_module_exists(probe, key)) and not is_excluded(probe, name)


def is_excluded(config: Any, name: str) -> bool:
    """Whether `exclude_modules` or `modules_to_save` name a module or parameter."""
    from peft.tuners.tuners_utils import check_target_module_exists

    # peft answers with an object of its own where a name is excluded, and with a truth value elsewhere.
    everything = copy.copy(config)
    everything.target_modules, everything.layers_to_transform = ".*", None
    return not check_target_module_exists(everything, name)


def choose_parameters(config: Any, model: nn.Module) -> list[str]:
    """The parameters that peft shall wrap; a `ValueError` if those of a module are others than earlier adapters'."""
    chosen = targeted_parameters(config, model)
    wrapped: dict[str, set[str]] = {}
    for name, module in _plain_modules(model):
        if hasattr(module, "parameter_name"):
            wrapped.setdefault(name, set()).add(f"{name}.{module.parameter_name}")
    for name, there in wrapped.items():
        new = {key for key in chosen if key.rpartition(".")[0] == name}
        if new and new != there:
            # Its wrappers are nested, and files have their places in the nest for names.
            raise ValueError(
                f"target_parameters means {', '.join(sorted(new))}, and an adapter that is there changes "
                f"{', '.join(sorted(there))}: all adapters of a module change the same of its parameters. See to "
                "exclude_modules and modules_to_save, too."
            )
    return chosen


@contextmanager
def telling_unused(tuner: Any, model: nn.Module, adapter_name: str) -> Iterator[None]:
    """Warn of patterns and exclusions that match neither a module nor a parameter; peft looks at modules alone."""
    config = tuner.peft_config[adapter_name]
    excluded = getattr(config, "exclude_modules", None)
    is_silent = not excluded and not any(getattr(config, field, None) for field in _PATTERNS)
    if is_silent or not getattr(config, "target_parameters", None):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match", RuntimeWarning)
        warnings.filterwarnings("ignore", r"You have passed exclude_modules=")
        names = [
            *(name for name, _ in _plain_modules(model) if name),
            *(
                f"{name}.{key}"
                for name, module in _plain_modules(model)
                for key, _ in module.named_parameters(recurse=False)
            ),
        ]
        yield
    targeted = [*tuner.targeted_module_names, *targeted_parameters(config, model)]
    for field in _PATTERNS:
        unused = [
            key
            for key in getattr(config, field, None) or ()
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in targeted)
        ]
        if unused:
            warnings.warn(
                f"{field}: {unused} match nothing that the adapter changes.", RuntimeWarning, stacklevel=4
            )
    if excluded and not any(is_excluded(config, name) for name in names):
        warnings.warn(f"exclude_modules={excluded} match nothing in the model.", RuntimeWarning, stacklevel=4)
