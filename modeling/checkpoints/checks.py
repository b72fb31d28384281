"""Checks before and after a load, for faults of checkpoints that transformers ignores or only warns of.

transformers itself refuses wrong shapes and truncated files. But it takes the last copy of a tensor that is stored
twice, renumbers the experts after one that is missing, casts integers to weights, and initialises missing weights at
random.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from .stored import Stored, check_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUMBER = re.compile(r"(\.experts\.(?:\w+\.)?)(\d+)\.")
_REMEDY = "Download or copy the checkpoint again."


def check_tensors(model: "PreTrainedModel", tensors: Iterable[Stored], load_config: Any) -> None:
    """Check the names and dtypes of a checkpoint's tensors before they are loaded.

    Args:
        model: the model without weights, in which the quantizer has replaced modules by packed ones already.
        tensors: the checkpoint's tensors.
        load_config: transformers' `LoadStateDictConfig`.

    Raises:
        CheckpointError: a tensor is stored twice, an expert with a lower number than others is missing, or a tensor has
            a dtype that the model cannot take.
    """
    quantizer = load_config.hf_quantizer
    # Other libraries' quantizers check the dtypes of their tensors themselves.
    checks_dtypes = quantizer is None or getattr(quantizer, "checks_shapes", False)
    rules, state = load_config.weight_mapping or (), model.state_dict()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_name: dict[str, Stored] = {}
    by_key: dict[tuple[str, str | None], list[Stored]] = {}
    for tensor in tensors:
        if tensor.name in by_name:
            raise CheckpointError(
                f"{tensor.origin}: {tensor.name!r} is in {by_name[tensor.name].origin} too."
            )
        by_name[tensor.name] = tensor
        key, pattern = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, state)
        if key not in state:
            continue
        by_key.setdefault((key, pattern), []).append(tensor)
        if checks_dtypes:
            is_quantized_next = quantizer is not None and quantizer.param_needs_quantization(model, key)
            is_weight = is_quantized_next or state[key].is_floating_point()
            check_dtype(tensor, None if is_weight else state[key].dtype)
    for (key, pattern), stored in by_key.items():
        # Tensors that match a pattern are single experts, beside which their stack must not be stored.
        twice = stored if pattern is None else by_key.get((key, None), [])
        if pattern is None and len(stored) > 1 or pattern is not None and twice:
            raise CheckpointError(f"{stored[-1]} is stored twice: {twice[0]} has it, too.")
        numbers = sorted(int(match[2]) for one in stored if pattern and (match := _NUMBER.search(one.name)))
        # The experts' numbers must be 0, 1, 2, …
        gap = next((min(pair) for pair in enumerate(numbers) if pair[0] != pair[1]), None)
        if gap is not None:
            name = _NUMBER.sub(rf"\g<1>{gap}.", stored[0].name)
            raise CheckpointError(
                f"{stored[0].origin}: {name} is missing, or stored under two names. {_REMEDY}"
            )


def check_made(model: "PreTrainedModel", loading_info: Any, source: Any) -> None:
    """Check that experts were fused and weights quantized without errors, and that all packed weights were loaded.

    Args:
        model: the loaded model, before transformers initialises missing weights.
        loading_info: transformers' `LoadStateDictInfo`.
        source: path of the checkpoint, for the message; None for a state dict.

    Raises:
        CheckpointError: fusing or quantizing failed, or a part of a packed weight is missing or has a wrong shape.
    """
    for key, details in loading_info.conversion_errors.items():
        # `details` is a traceback, whose last line is the message, and then transformers' own line "Error: …".
        message = details.rpartition("\nError: ")[0].rpartition("\n")[2]
        raise CheckpointError(f"{source or 'state_dict'}: {key}: {message}")
    wrong_shapes = {
        key: f" has shape {[*stored]}, not {[*wanted]}"
        for key, stored, wanted in loading_info.mismatched_keys
    }
    not_loaded = []
    for path, module in model.named_modules():
        # Only packed modules have `part_shapes`.
        shapes = module.part_shapes() if hasattr(module, "part_shapes") else {}
        for name, part in module.state_dict().items() if shapes else ():
            key = f"{path}.{name}"
            if (
                key in wrong_shapes
                or key in loading_info.missing_keys
                or part.shape != shapes.get(name, [part.shape])[0]
            ):
                not_loaded.append(key + wrong_shapes.get(key, ""))
    if not_loaded:
        raise CheckpointError(
            f"{source}: {listed(not_loaded, 5)} cannot be filled from the checkpoint, and packed weights are not "
            f"initialized at random. {_REMEDY}"
        )


def check_complete(model: "PreTrainedModel", loading_info: Any, load_config: Any) -> None:
    """Check that a checkpoint of the model's class lacks no weight, and has no tensor of experts that the model lacks.

    If the checkpoint is of another class, as when a classifier loads a language model's, missing weights are no error:
    transformers initialises and reports them.

    Raises:
        CheckpointError: a weight is missing although config.json names the model's class; all weights are missing; or
            the checkpoint has a tensor of experts that the model does not have, such as a bias.
    """
    source, quantizer = load_config.pretrained_model_name_or_path, load_config.hf_quantizer
    experts = tuple(f"{path}." for path, _ in model.named_modules() if path.endswith(".experts"))
    if unknown := sorted(name for name in loading_info.unexpected_keys if name.startswith(experts)):
        raise CheckpointError(
            f"{source or 'state_dict'}: {listed(unknown, 5)} belong to experts, but this model has no such tensors."
        )
    missing = [name for name in sorted(loading_info.missing_keys) if _is_plain_weight(model, name, quantizer)]
    has_none = len(missing) == len(list(model.parameters()))
    # A state dict has no config.json that would name its class.
    if not missing or source is None and not has_none:
        return
    architectures = model.config.architectures
    if source is not None:
        # Ask the checkpoint's own config.json: the caller may have passed another configuration.
        with suppress(OSError):
            content, _ = model.config.get_config_dict(source, **(load_config.download_kwargs or {}))
            architectures = content.get("architectures")
    # FSDP2 replaces the class by one that is named FSDP and the old name.
    name = type(model).__name__.removeprefix("FSDP")
    if name in (architectures or ()) or has_none:
        raise CheckpointError(
            f"{source or 'state_dict'}: config.json says that this is a {name}, but {len(missing)} of its weights are "
            f"missing: {listed(missing, 5)}. {_REMEDY} To draw them at random, build {name}(config) and load the other "
            "weights by load_state_dict(..., strict=False)."
        )


def _is_plain_weight(model: "PreTrainedModel", name: str, quantizer: Any) -> bool:
    """Return True for the name of a parameter that exists in the model and does not come from a quantizer."""
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    is_plain = type(module).__module__.startswith(("torch.nn.", "llamoe."))
    return own_name in module._parameters and (quantizer is None or is_plain)
