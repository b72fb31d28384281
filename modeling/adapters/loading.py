"""Loading of an adapter's weights; raises an error for weights that do not fit the model.

peft names an adapter's weights after the modules that it changes, so adapters of stock models fit llamoe's. peft and
transformers drop weights that fit nowhere, with a warning at most.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils.loading_report import LoadStateDictInfo

from .expert_layout import orient_experts

logger = logging.getLogger("llamoe")


class LoadsAdapters(PreTrainedModel):
    """A mixin that checks adapters when they are loaded; name it before `PreTrainedModel`."""

    # The adapter whose weights `load_adapter` reads.
    _adapter_being_read = "default"

    def load_adapter(self, peft_model_id: Any = None, adapter_name: str | None = None, **kwargs: Any) -> Any:
        """Load one of peft's adapters, as `PreTrainedModel.load_adapter` does.

        Adapters of stock Llama and Llama 4 fit; experts' factors are converted from stock's layout.

        Raises:
            ValueError: an adapter of another model, a damaged file, or a model a part of which is on disk.
            OSError: there is no adapter.
        """
        if "disk" in (getattr(self, "hf_device_map", None) or {}).values():
            # peft would put the factors of such layers on the meta device.
            raise ValueError(
                "load_adapter: a part of the model is on disk, where no adapter can be added to it. Give the layers "
                "that the adapter changes another place in device_map, or merge the adapter into the checkpoint first."
            )
        self._adapter_being_read = adapter_name or "default"
        return super().load_adapter(peft_model_id, adapter_name=adapter_name, **kwargs)

    def _load_adapter_tensors(
        self, tensors: Mapping[str, torch.Tensor] | None, files: Iterable[str], ignore_mismatched_sizes: bool
    ) -> LoadStateDictInfo:
        """Load an adapter's tensors into the LoRA layers that peft has created, as peft's own classes do."""
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
        # peft's own classes load an adapter's weights through this method.
        if self.__dict__.get("peft_config"):
            _fit_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _fit_state_dict(model: LoadsAdapters, state_dict: dict[str, Any], prefix: str) -> None:
    """Rename, in place, an adapter's tensors to the model's keys, and convert factors of stock's layout.

    Args:
        model: its class may differ from the adapter's own, as a head and its base model do.
        state_dict: what peft loads into the model.
        prefix: the beginning of the model's keys in `state_dict`.

    Raises:
        ValueError: an adapter of another model, or experts whose layout cannot be known.
    """
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    given = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # peft includes the adapter's name only in keys that the model has.
    named = [name for name in model.peft_config if any(_is_named(key, name) for key in given)]
    adapter = (named or list(model.peft_config))[-1]
    config = model.peft_config[adapter]
    tuner = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type)
    if tuner is None or not any(_is_named(key, adapter) or f".{tuner}" in key for key in given):
        # The tensors are not an adapter's.
        return
    base = [name for name, shape in own.items() if len(shape) > 1 and not _is_named(name, adapter)]
    if sum(name in given for name in base) > len(base) / 2:
        # This is a checkpoint of the whole model; an adapter contains at most some of its embeddings or biases.
        return
    full_names = {_without_name(name, adapter): name for name in own if _is_named(name, adapter)}
    added = {name: own[full] for name, full in full_names.items()}
    # Methods other than LoRA share tensors between layers, which are saved once.
    expected = {name: shape for name, shape in added.items() if tuner == "lora_" and ".lora_" in name}
    tensors = {_without_name(key, adapter): state_dict[full] for key, full in given.items()}
    fitted = _fit(model, config, tensors, expected, {**own, **added})
    for key in given.values():
        del state_dict[key]
    state_dict.update({prefix + full_names.get(name, name): tensor for name, tensor in fitted.items()})


def _fit(
    model: PreTrainedModel,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, torch.Tensor]:
    """Return the tensors by the model's keys; refuse them if any of `expected` is missing or any is not in `shapes`."""
    fitted, passed_over, problems = {}, [], []
    for key, tensor in tensors.items():
        name = next((name for name in _names(model, key) if name in shapes), None)
        if name is not None:
            fitted[name] = tensor
        elif any(re.search(pattern, key) for pattern in getattr(model, "_keys_passed_over", ())):
            passed_over.append(key)
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
            f"The adapter does not fit this {type(model).__name__}: {problems[0]}{more}. Load it on the class and the "
            f"folder that it was trained on{f': {source}' if source else ''}."
        )
    if passed_over:
        logger.warning(
            "The adapter has %d tensors for parts that a %s does not have, such as %s; they are passed over.",
            len(passed_over),
            type(model).__name__,
            passed_over[0],
        )
    return fitted


def _names(model: PreTrainedModel, key: str) -> list[str]:
    """Return the names that a key may have in this model, with or without a head's or multimodal model's prefix."""
    prefixes: dict[str, str] = getattr(model, "_checkpoint_prefixes", {})
    renamed = (re.sub(f"^{old}", new, key) for old, new in prefixes.items())
    base = model.base_model_prefix + "."
    return [key, *renamed, key.removeprefix(base), base + key]


def _is_named(key: str, adapter_name: str) -> bool:
    return f".{adapter_name}." in key or key.endswith(f".{adapter_name}")


def _without_name(key: str, adapter_name: str) -> str:
    head, found, tail = key.rpartition(f".{adapter_name}")
    return head + tail if found and tail[:1] in ("", ".") else key
