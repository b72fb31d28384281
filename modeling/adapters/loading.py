"""Loads adapters; raises an error if an adapter's weights do not fit the model.

peft names an adapter's weights after the modules that it changes. llamoe's modules have stock's names, so adapters of
stock models fit. peft and transformers would drop weights that fit nowhere, at most with a warning.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils.loading_report import LoadStateDictInfo

from ..checkpoints import names_in_model
from .expert_layout import orient_experts

logger = logging.getLogger("llamoe")


class LoadsAdapters(PreTrainedModel):
    """A mixin that checks adapters when they are loaded; name it before `PreTrainedModel`."""

    # Name of the adapter that `load_adapter` is loading.
    _adapter_being_read = "default"

    def load_adapter(self, peft_model_id: Any = None, adapter_name: str | None = None, **kwargs: Any) -> Any:
        """Load one of peft's adapters, as `PreTrainedModel.load_adapter` does.

        Adapters of transformers' Llama and Llama 4 fit; for experts of its Llama 4, A and B are exchanged.

        Raises:
            ValueError: the adapter is of another model, its file is damaged, or a part of the model is on disk.
            OSError: there is no adapter.
        """
        if "disk" in (getattr(self, "hf_device_map", None) or {}).values():
            # For layers on disk peft would make factors without data.
            raise ValueError(
                "load_adapter: a part of the model is on disk, where it takes no adapter. Load the model without "
                "'disk' in device_map, or merge the adapter into the checkpoint first."
            )
        self._adapter_being_read = adapter_name or "default"
        return super().load_adapter(peft_model_id, adapter_name=adapter_name, **kwargs)

    def _load_adapter_tensors(
        self, tensors: Mapping[str, torch.Tensor] | None, files: Iterable[str], ignore_mismatched_sizes: bool
    ) -> LoadStateDictInfo:
        """Load an adapter's tensors into the layers that peft has made for it, as a `PeftModel` does."""
        from peft import set_peft_model_state_dict

        if tensors is None:
            tensors = {key: tensor for file in files for key, tensor in load_state_dict(file).items()}
        tensors = {key.removeprefix("base_model.model."): tensor for key, tensor in tensors.items()}
        name = self._adapter_being_read
        result = set_peft_model_state_dict(self, tensors, name, ignore_mismatched_sizes)
        return LoadStateDictInfo(
            missing_keys={key for key in result.missing_keys if f".{name}" in key},
            unexpected_keys=set(result.unexpected_keys),
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # peft loads an adapter's weights by this method, too.
        if self.__dict__.get("peft_config"):
            _fit_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _fit_state_dict(model: LoadsAdapters, state_dict: dict[str, Any], prefix: str) -> None:
    """Rename, in place, an adapter's tensors to the model's keys; exchange A and B of experts from stock Llama 4.

    Args:
        model: the model; the adapter may have been trained on another of its classes, such as that with a head.
        state_dict: the tensors that peft loads into the model.
        prefix: the text before the model's keys in the keys of `state_dict`.

    Raises:
        ValueError: the adapter does not fit the model.
    """
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    keys = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # peft puts the adapter's name only into keys that the model has.
    named = [name for name in model.peft_config if any(_is_named(key, name) for key in keys)]
    adapter = (named or list(model.peft_config))[-1]
    config = model.peft_config[adapter]
    tuner = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type)
    if tuner is None or not any(_is_named(key, adapter) or f".{tuner}" in key for key in keys):
        # These are not the tensors of an adapter.
        return
    base = [name for name, shape in shapes.items() if len(shape) > 1 and not _is_named(name, adapter)]
    if sum(name in keys for name in base) > len(base) / 2:
        # This is a checkpoint of the whole model; an adapter has at most the embeddings or biases of a model.
        return
    full_names = {_without_name(name, adapter): name for name in shapes if _is_named(name, adapter)}
    added = {name: shapes[full] for name, full in full_names.items()}
    # Only for LoRA: with other methods layers share tensors, which are saved once.
    expected = {name: shape for name, shape in added.items() if tuner == "lora_" and ".lora_" in name}
    tensors = {_without_name(name, adapter): state_dict[key] for name, key in keys.items()}
    fitted = _fit(model, config, tensors, expected, {**shapes, **added})
    for key in keys.values():
        del state_dict[key]
    state_dict.update({prefix + full_names.get(name, name): tensor for name, tensor in fitted.items()})


def _fit(
    model: PreTrainedModel,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, torch.Tensor]:
    """Return an adapter's `tensors` by the model's keys; raise a `ValueError` if they do not fit the model.

    `expected` has the shapes of all tensors that the adapter must have, `shapes` those of all that the model can take.
    """
    names_of = names_in_model(model, ())
    fitted, ignored, problems = {}, [], []
    for key, tensor in tensors.items():
        name = next((name for name in names_of(key) if name in shapes), None)
        if name is not None:
            fitted[name] = tensor
        elif any(re.search(pattern, key) for pattern in getattr(model, "_keys_passed_over", ())):
            ignored.append(key)
        else:
            problems.append(f"{key} belongs to nothing in the model")
    orient_experts(model, fitted, expected)
    for name, tensor in fitted.items():
        if tuple(tensor.shape) != shapes[name]:
            problems.append(f"{name} has shape {list(tensor.shape)} where the model has {list(shapes[name])}")
    problems += [f"the adapter has no {name}" for name in expected if name not in fitted]
    if problems:
        source = getattr(config, "base_model_name_or_path", None)
        more = f", and {len(problems) - 1} more problems" if len(problems) > 1 else ""
        raise ValueError(
            f"The adapter does not fit this {type(model).__name__}: {problems[0]}{more}. Load it into the class and "
            f"the folder on which it was trained{f': {source}' if source else ''}."
        )
    if ignored:
        logger.warning(
            "The adapter has %d tensors for parts that a %s does not have, such as %s; they are ignored.",
            len(ignored),
            type(model).__name__,
            ignored[0],
        )
    return fitted


def _is_named(key: str, adapter_name: str) -> bool:
    """Return True if a key has the adapter's name as one of its parts."""
    return f".{adapter_name}." in key or key.endswith(f".{adapter_name}")


def _without_name(key: str, adapter_name: str) -> str:
    """Return a key without the adapter's name."""
    head, separator, tail = key.rpartition(f".{adapter_name}")
    return head + tail if separator and tail[:1] in ("", ".") else key
