"""Functions of others that load weights, and ask no model for their names.

accelerate sets a file's tensors one after the other under the file's names, and passes over what it does not find;
transformers compares the names in the folder's index; torch sends other processes what has the model's names. They are
replaced, for modules with our models in them, wherever they have been imported by name.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from accelerate.utils import modeling
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dicts
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from .state_dicts import in_parts, is_read_in_parts, outermost, part_of_checkpoint


def _replace(module: ModuleType, name: str, make: Callable[[Callable], Callable]) -> None:
    original = getattr(module, name)
    replacement = functools.wraps(original)(make(original))
    for each in list(sys.modules.values()):
        if getattr(each, "__dict__", {}).get(name) is original:
            setattr(each, name, replacement)


def _has_ours(model: nn.Module) -> bool:
    return next(outermost(model), None) is not None


def _fusing(load: Callable) -> Callable:
    def load_checkpoint_in_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _has_ours(model):
            return load(model, *args, **kwargs)
        with in_parts(model, fuses=True):
            return load(model, *args, **kwargs)

    return load_checkpoint_in_model


def _comparing(load: Callable) -> Callable:
    def load_sharded_checkpoint(
        model: nn.Module, folder: Any, strict: bool = True, prefer_safe: bool = True
    ) -> Any:
        if not _has_ours(model):
            return load(model, folder, strict, prefer_safe)
        with in_parts(model) as parts:
            result = load(model, folder, False, prefer_safe)
        missing = [key for key in result.missing_keys if not parts.gave(key)]
        unexpected = [key for key in result.unexpected_keys if key not in parts.taken]
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"{folder} does not fit this {type(model).__name__}: {listed(missing) or 'nothing'} missing, "
                f"{listed(unexpected) or 'nothing'} unexpected."
            )
        return result._replace(missing_keys=missing, unexpected_keys=unexpected)

    return load_sharded_checkpoint


def _renaming(load: Callable) -> Callable:
    def set_model_state_dict(
        model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
    ) -> Any:
        broadcasts = options is not None and options.broadcast_from_rank0
        if is_read_in_parts() and not model_state_dict and not broadcasts:
            # All that a file has may wait for other files; torch refuses empty state dicts.
            return None
        if is_read_in_parts() or not _has_ours(model):
            return load(model, model_state_dict, options=options)
        with in_parts(model, fuses=True) as parts:
            return load(model, parts.take(dict(model_state_dict)), options=options)

    return set_model_state_dict


def replace_loaders() -> None:
    """Let `load_checkpoint_in_model`, `load_checkpoint_and_dispatch` and `set_model_state_dict` load our models."""
    read = modeling.load_state_dict

    @functools.wraps(read)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        return part_of_checkpoint(read(*args, **kwargs))

    _replace(modeling, "load_checkpoint_in_model", _fusing)
    _replace(torch_state_dicts, "set_model_state_dict", _renaming)
    # The other uses of this function know nothing of a model.
    vars(modeling)["load_state_dict"] = load_state_dict


def replace_trainers_loader(trainer_utils: ModuleType) -> None:
    """Let Trainer's `load_sharded_checkpoint` know the names of our models; called once it is imported."""
    _replace(trainer_utils, "load_sharded_checkpoint", _comparing)
