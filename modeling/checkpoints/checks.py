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
    """Check the names and dtypes of a checkpoint's tensors.

    Args:
        model: the empty model, in which modules to be packed have been replaced already.
        tensors: the checkpoint's tensors.
        load_config: transformers' record of the loading.

    Raises:
        CheckpointError: a tensor is there twice, an expert is missing between others, or a tensor has a dtype that the
            model cannot take.
    """
    quantizer = load_config.hf_quantizer
    # Other quantizers check their dtypes themselves.
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
    for (key, pattern), found in by_key.items():
        twice = found if pattern is None else by_key.get((key, None), [])
        if pattern is None and len(found) > 1 or pattern is not None and twice:
            raise CheckpointError(f"{found[-1]} is stored twice: {twice[0]} has it, too.")
        numbers = sorted(int(match[2]) for each in found if pattern and (match := _NUMBER.search(each.name)))
        gap = next((min(place, number) for place, number in enumerate(numbers) if place != number), None)
        if gap is not None:
            name = _NUMBER.sub(rf"\g<1>{gap}.", found[0].name)
            raise CheckpointError(f"{found[0].origin}: {name} is missing, or there by two names. {_REMEDY}")


def check_made(model: "PreTrainedModel", loading_info: Any, place: Any) -> None:
    """Check that fusing and quantizing succeeded, and that packed weights are complete: they have no initialisation.

    Args:
        model: as transformers has loaded it, before it fills what was missing.
        loading_info: transformers' record of what was missing, and of what had another shape.
        place: path of the checkpoint for the message; None for a state dict.

    Raises:
        CheckpointError: a conversion failed; or a packed weight's part is missing or has a wrong shape.
    """
    for key, details in loading_info.conversion_errors.items():
        # The details are a traceback that ends with the message, and a line "Error: …" by transformers. Keep the
        # message.
        message = details.rpartition("\nError: ")[0].rpartition("\n")[2]
        raise CheckpointError(f"{place or 'state_dict'}: {key}: {message}")
    wrong = {
        key: f" has shape {[*given]}, not {[*wanted]}" for key, given, wanted in loading_info.mismatched_keys
    }
    lost = []
    for path, module in model.named_modules():
        # Only packed modules have `part_shapes`.
        shapes = module.part_shapes() if hasattr(module, "part_shapes") else {}
        for name, part in module.state_dict().items() if shapes else ():
            key = f"{path}.{name}"
            if (
                key in wrong
                or key in loading_info.missing_keys
                or part.shape != shapes.get(name, [part.shape])[0]
            ):
                lost.append(key + wrong.get(key, ""))
    if lost:
        raise CheckpointError(
            f"{place}: {listed(lost, 5)} cannot be filled from the checkpoint, and packed weights are not "
            f"initialized at random. {_REMEDY}"
        )


def check_complete(model: "PreTrainedModel", loading_info: Any, load_config: Any) -> None:
    """Check that a checkpoint of the model's own class had all of its weights, and no unknown tensors of experts.

    A class may load a checkpoint of another class, as a classifier loads a language model's. Weights that such a
    checkpoint lacks are initialised, and transformers reports them.

    Args:
        model: loaded.
        loading_info: transformers' record of what the checkpoint lacks, and of what it has beside the model.
        load_config: transformers' record of the loading.

    Raises:
        CheckpointError: some weights are missing although config.json names the model's class; all weights are
            missing; or the checkpoint has a tensor of experts that the model lacks, such as a bias.
    """
    place, quantizer = load_config.pretrained_model_name_or_path, load_config.hf_quantizer
    experts = tuple(f"{path}." for path, _ in model.named_modules() if path.endswith(".experts"))
    if odd := sorted(name for name in loading_info.unexpected_keys if name.startswith(experts)):
        raise CheckpointError(
            f"{place or 'state_dict'}: {listed(odd, 5)} belong to experts, but are not read."
        )
    lost = [name for name in sorted(loading_info.missing_keys) if _is_plain_weight(model, name, quantizer)]
    has_none = len(lost) == len(list(model.parameters()))
    # A state dict has no config.json.
    if not lost or place is None and not has_none:
        return
    architectures = model.config.architectures
    if place is not None:
        # The checkpoint's own config.json; the model may have been given another configuration.
        with suppress(OSError):
            content, _ = model.config.get_config_dict(place, **(load_config.download_kwargs or {}))
            architectures = content.get("architectures")
    # FSDP2 derives classes of its own.
    name = type(model).__name__.removeprefix("FSDP")
    if name in (architectures or ()) or has_none:
        raise CheckpointError(
            f"{place or 'state_dict'}: config.json says that this is a {name}, but {len(lost)} of its weights are "
            f"missing: {listed(lost, 5)}. {_REMEDY} To begin with fresh weights, build {name}(config) and load the "
            "others with load_state_dict(..., strict=False)."
        )


def _is_plain_weight(model: "PreTrainedModel", name: str, quantizer: Any) -> bool:
    """Return True if a name is that of a parameter that no quantizer has created or removed."""
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    is_plain = type(module).__module__.startswith(("torch.nn.", "llamoe."))
    return own_name in module._parameters and (quantizer is None or is_plain)
