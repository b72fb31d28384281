"""Whether an adapter's weights belong to a model, and their names in it.

peft names an adapter's weights after the modules that it changes, so adapters of stock models fit ours by their names.
peft and transformers drop what fits nowhere, with a warning at most; here it is an error.
"""

import copy
import logging
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from transformers import PreTrainedModel

from .expert_layout import orient_experts
from .stack_targets import reading

logger = logging.getLogger("llamoe")

_PEFT_PREFIX = "base_model.model."
# Base weights that peft saves with an adapter if they were resized or trained.
_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|lm_head)\.")


def skeleton_with(model: PreTrainedModel, config: Any, adapter_name: str) -> PreTrainedModel:
    """A model of the same shapes on the meta device, with one adapter; neither `model` nor `config` is changed.

    Raises:
        ValueError: from peft, if the config's targets are not in the model.
    """
    from peft import inject_adapter_in_model

    config = copy.deepcopy(config)
    for field in ("init_lora_weights", "init_weights"):
        if hasattr(config, field):
            # Some initialisations decompose the weights.
            setattr(config, field, False)
    with torch.device("meta"):
        skeleton = type(model)(copy.deepcopy(model.config))
    try:
        inject_adapter_in_model(config, skeleton, adapter_name, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ValueError(f"adapter_config.json: {error}") from error
    # peft does not check the types of fields.
    except Exception as error:
        raise ValueError(
            f"adapter_config.json: peft cannot make layers of it ({type(error).__name__}: {error}). A field has a "
            "value of the wrong type, or asks for a package that is not installed."
        ) from error
    return skeleton


def fit(
    model: PreTrainedModel,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    strict: bool = True,
) -> dict[str, torch.Tensor]:
    """Rename an adapter's tensors to the model's keys, and bring its experts into the model's layout.

    Args:
        model: its class may differ from the adapter's own, as a head and its base model do.
        config: the adapter's config.
        tensors: its weights, without peft's prefix.
        expected: keys and shapes that the adapter must have on this model.
        optional: further keys and shapes that it may have.
        strict: raise on what does not fit; otherwise the caller decides.

    Returns:
        the tensors; if strict, all of them are expected or optional.

    Raises:
        ValueError: an adapter of another model, or experts whose layout cannot be known.
    """
    shapes = {**optional, **expected}
    fitted, passed_over, unknown = {}, [], []
    for key, tensor in tensors.items():
        name = next((name for name in _names(model, key) if name in shapes), None)
        if name is not None:
            fitted[name] = tensor
        elif any(re.search(pattern, key) for pattern in getattr(model, "_keys_passed_over", ())):
            passed_over.append(key)
        else:
            unknown.append(key)
            fitted[key] = tensor
    orient_experts(model, fitted, expected)
    missing = [name for name in expected if name not in fitted]
    differing = {
        name: (list(tensor.shape), list(shapes[name]))
        for name, tensor in fitted.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    }
    if strict and (unknown or missing or differing):
        raise ValueError(_complaint(model, config, tensors, unknown, missing, differing))
    if passed_over:
        logger.warning(
            "The adapter has %d tensors for parts that a %s does not have, such as %s; they are passed over.",
            len(passed_over),
            type(model).__name__,
            passed_over[0],
        )
    return fitted


def _names(model: PreTrainedModel, key: str) -> list[str]:
    """Names that a key may have in this model: its own, or that of a model around or within it."""
    prefixes: dict[str, str] = getattr(model, "_checkpoint_prefixes", {})
    renamed = (re.sub(f"^{old}", new, key) for old, new in prefixes.items())
    base = model.base_model_prefix + "."
    return [key, *renamed, key.removeprefix(base), base + key]


def _complaint(
    model: PreTrainedModel,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    unknown: list[str],
    missing: list[str],
    differing: dict[str, tuple[list[int], list[int]]],
) -> str:
    problems = []
    if differing:
        name, (given, wanted) = next(iter(differing.items()))
        problems.append(f"{name} has shape {given} where the model has {wanted} ({len(differing)} such)")
    if unknown:
        problems.append(f"{unknown[0]} belongs to nothing in the model ({len(unknown)} such)")
    if missing:
        problems.append(
            f"the model needs {missing[0]} and the adapter has no such tensor ({len(missing)} such)"
        )
    resized = [name for name in differing if _EMBEDDINGS.search(name)]
    if resized and len(resized) == len(differing) and not unknown and not missing:
        size = differing[resized[0]][0][0]
        remedy = f"Its vocabulary was resized: call model.resize_token_embeddings({size}) before loading it."
    elif any("block_sparse_moe.experts." in name for name in unknown):
        remedy = "It was trained with transformers 4: PeftModel.from_pretrained(model, folder) converts it."
    else:
        remedy = _remedy(model, config, tensors, unknown, differing)
    return f"The adapter does not fit this {type(model).__name__}: {'; '.join(problems)}. {remedy}"


def _remedy(
    model: PreTrainedModel,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    unknown: list[str],
    differing: Mapping[str, tuple[list[int], list[int]]],
) -> str:
    """What can be done about an adapter of another class, of another rank, or of another model."""
    ranks = [
        (given[axis], wanted[axis])
        for name, (given, wanted) in differing.items()
        if (axis := 0 if ".lora_A" in name else 1 if ".lora_B" in name else None) is not None
        and given[1 - axis] == wanted[1 - axis]
    ]
    if differing and len(ranks) == len(differing):
        given, wanted = ranks[0]
        return (
            "Its file contradicts its adapter_config.json, or an adapter of its name is there with another rank: it "
            f"has {given}/{wanted} of the rank that r = {config.r} and rank_pattern = {config.rank_pattern} give. "
            "peft writes the former after a hotswap, or prepare_model_for_compiled_hotswap(target_rank=...), that has "
            "raised the rank. Set r (and rank_pattern) to the file's ranks, and lora_alpha so that lora_alpha / r is "
            "what the adapter was scaled by."
        )
    base = getattr(config, "base_model_name_or_path", None)
    for place in ("language_model", "language_model.model", "vision_model"):
        part = reduce(lambda module, name: getattr(module, name, None), place.split("."), model)
        if part is not None and _fits(part, config, tensors):
            return f"It fits a part of this model: PeftModel.from_pretrained(model.{place}, folder)."
    if not differing and any(
        key.startswith(("language_model.", "multi_modal_projector.")) for key in unknown
    ):
        return _with_class("AutoModelForImageTextToText", base)
    if not differing and unknown and all(key.startswith(("model.", "lm_head.")) for key in unknown):
        return _with_class("AutoModelForCausalLM", base)
    return "Load it on the model that it was trained on" + (f": {base}." if base else ".")


def _with_class(name: str, base: str | None) -> str:
    folder = "FOLDER" if base is None else repr(base)
    return f"It was trained on another class: load it on {name}.from_pretrained({folder})."


def _fits(part: PreTrainedModel, config: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether an adapter would load on a part of a model."""
    with reading(tensors):
        try:
            skeleton = skeleton_with(part, config, "default")
        except ValueError:
            return False
    expected, whole = _shapes_with(skeleton, "default")
    fitted = fit(part, config, tensors, expected, whole, strict=False)
    shapes = {**whole, **expected}
    return expected.keys() <= fitted.keys() and all(
        shapes.get(name) == tuple(tensor.shape) for name, tensor in fitted.items()
    )


def _shapes_with(skeleton: PreTrainedModel, adapter_name: str) -> tuple[dict, dict]:
    """Keys and shapes that an adapter has on its skeleton, and those of the whole skeleton."""
    from peft import get_peft_model_state_dict

    saved = get_peft_model_state_dict(skeleton, adapter_name=adapter_name, save_embedding_layers=False)
    return _shapes(saved), _shapes(skeleton.state_dict())


def fit_folder(
    model: PreTrainedModel,
    config: Any,
    adapter_name: str,
    tensors: Mapping[str, torch.Tensor],
    strict: bool = True,
    make_skeleton: Callable[[], PreTrainedModel] | None = None,
) -> dict[str, torch.Tensor]:
    """Fit an adapter's tensors, by the keys of its file, to a model that does not have it yet, and is not changed.

    They come back by names that `PreTrainedModel.load_adapter` understands. `make_skeleton` is `skeleton_with` for
    these arguments, if it is cached.
    """
    shared = [key for key in tensors if key.startswith("base_model.") and not key.startswith(_PEFT_PREFIX)]
    # RandLora draws its shared tensors anew, from a seed in its config.
    if shared and config.peft_type != "RANDLORA":
        raise ValueError(
            f"This {getattr(config.peft_type, 'value', config.peft_type)} adapter has tensors that its layers share, "
            f"such as {shared[0]}, for which only a PeftModel has a place: use PeftModel.from_pretrained."
        )
    tensors = {key: tensor for key, tensor in tensors.items() if key not in shared}
    with reading(tensors):
        skeleton = make_skeleton() if make_skeleton else skeleton_with(model, config, adapter_name)
    expected, whole = _shapes_with(skeleton, adapter_name)
    tensors = {key.removeprefix(_PEFT_PREFIX): tensor for key, tensor in tensors.items()}
    fitted = fit(model, config, tensors, expected, whole, strict)
    # transformers inserts the adapter's name after "lora_...": the parameter's name, if peft saves that in full.
    # DoRA's vectors are saved without ".weight", trained base weights without their wrapper.
    names = {}
    for full in whole:
        without = _without_name(full, adapter_name)
        is_wrapped = ".modules_to_save." in full or ".token_adapter." in full
        for name in (without.replace(".modules_to_save", ""), without.removesuffix(".weight")):
            if name in expected and full != without and name not in whole:
                names[name] = full if is_wrapped else without
    return {names.get(name, name): tensor for name, tensor in fitted.items()}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def fit_state_dict(model: PreTrainedModel, state_dict: dict[str, Any], prefix: str) -> None:
    """Fit, in place, what peft loads into a model of ours that already has the adapter; raises as `fit` does.

    `prefix` is the beginning of the model's keys in `state_dict`.
    """
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    given = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
    own = _shapes(model.state_dict())
    # peft includes the adapter's name only in keys that the model has.
    named = [name for name in model.peft_config if any(_is_named(key, name) for key in given)]
    adapter = (named or list(model.peft_config))[-1]
    config = model.peft_config[adapter]
    tuner = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type)
    if tuner is None or not any(_is_named(key, adapter) or f".{tuner}" in key for key in given):
        # No adapter.
        return
    base = [name for name, shape in own.items() if len(shape) > 1 and not _is_named(name, adapter)]
    if sum(name in given for name in base) > len(base) / 2:
        # A checkpoint of the whole model; adapters bring at most embeddings or biases.
        return
    full_names = {_without_name(name, adapter): name for name in own if _is_named(name, adapter)}
    added = {name: own[full] for name, full in full_names.items()}
    # Methods other than LoRA share tensors between layers, which are saved once.
    expected = {name: shape for name, shape in added.items() if tuner == "lora_" and ".lora_" in name}
    tensors = {_without_name(key, adapter): state_dict[full] for key, full in given.items()}
    fitted = fit(model, config, tensors, expected, {**own, **added})
    for key in given.values():
        del state_dict[key]
    state_dict.update({prefix + full_names.get(name, name): tensor for name, tensor in fitted.items()})


def _is_named(key: str, adapter_name: str) -> bool:
    return f".{adapter_name}." in key or key.endswith(f".{adapter_name}")


def _without_name(key: str, adapter_name: str) -> str:
    head, found, tail = key.rpartition(f".{adapter_name}")
    return head + tail if found and tail[:1] in ("", ".") else key
