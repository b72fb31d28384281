"""Whether an adapter's weights belong to a model, and in which layout the factors of its experts are.

peft names an adapter's weights after the modules that it changes, so adapters of stock models fit ours by their
names. Two things remain. peft and transformers drop what fits nowhere, with a warning at most; here it is an error.
And stock Llama 4 does not declare that its experts are stored input-first: peft takes `[E, in, out]` for
`[E, out, in]`, and learns A on the output side and B on the input side. The change of the weight is the same matrix
product. Our experts declare their layout, so such a pair fits them once its factors are exchanged:

* A `[E * r, in]`, where the expert is the slowest index;
* B `[out, r * E]`, where the expert is the fastest index.

Shapes: E experts, R = r rank, X and Y the sizes of the two sides.
"""

import copy
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import cache, partial
from types import NoneType
from typing import Any

import torch
from transformers import PreTrainedModel

from ...configuration.hub import HUB_ARGUMENTS
from ..moe import Experts
from .safetensors_headers import check_files

logger = logging.getLogger("llamoe")

_PEFT_PREFIX = "base_model.model."
# Base weights that peft saves with an adapter if they were resized or trained.
_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|lm_head)\.")
_FACTOR = re.compile(r"^(?P<module>.+?)(?P<nested>(\.base_layer)*)\.lora_A(?P<rest>\..+)$")


def exchange_factors(
    lora_A: torch.Tensor, lora_B: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert a pair of factors from stock's layout to ours or back.

    Args:
        lora_A: `[E * r, X]`.
        lora_B: `[Y, r * E]`.
        num_experts: E.

    Returns:
        `[E * r, Y]` and `[X, r * E]`: each expert's product is the transpose of what it was.
    """
    a_ERX = lora_A.unflatten(0, (num_experts, -1))
    b_YRE = lora_B.unflatten(1, (-1, num_experts))
    return (
        b_YRE.permute(2, 1, 0).flatten(0, 1).contiguous(),
        a_ERX.permute(2, 1, 0).flatten(1, 2).contiguous(),
    )


def trained_on(config: Any) -> str | None:
    """Class name of the model on which an adapter was trained, if its config names one."""
    return (getattr(config, "auto_mapping", None) or {}).get("base_model_class")


def mark(config: Any, model: PreTrainedModel) -> None:
    """Note in an adapter's config, when it is injected, the class for whose layout its experts' factors are stored.

    The adapter is saved with this note. peft itself writes it only for adapters without a task type.
    """
    if getattr(config, "target_parameters", None):
        config.auto_mapping = {
            "base_model_class": type(model).__name__,
            # Our classes are published in transformers; peft imports them from there.
            "parent_library": "transformers",
        }


# The latest adapter file that a PeftModel has read: one of its tensors, and the file's place.
_latest_file: ContextVar[tuple[weakref.ref, Any, dict[str, Any]] | None] = ContextVar(
    "_latest_file", default=None
)


def remember_file(tensors: Mapping[str, torch.Tensor], name_or_path: Any, **kwargs: Any) -> None:
    """Remember the place from which tensors were read, while they live."""
    if tensors:
        _latest_file.set((weakref.ref(next(iter(tensors.values()))), name_or_path, kwargs))


def _config_in_memory_or_file(config: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """The config saved with these tensors: the file's, if they come from a file."""
    reference, name_or_path, kwargs = _latest_file.get() or (lambda: None, None, {})
    first = reference()
    if first is None or not any(tensor is first for tensor in tensors):
        return config
    download = {name: value for name, value in kwargs.items() if name not in ("device", "key_mapping")}
    return read_config(name_or_path, **download)


def read_adapter(name_or_path: str | os.PathLike, **download: Any) -> dict[str, torch.Tensor]:
    """Read an adapter's weights, from a folder or the Hub, onto the CPU."""
    from peft.utils import load_peft_weights

    return load_peft_weights(os.fspath(name_or_path), device="cpu", **download)


def read_config(name_or_path: str | os.PathLike, **download: Any) -> Any:
    """Read an adapter's config, from a folder or the Hub.

    Raises:
        OSError: there is none.
        ValueError: from peft, or a field is unknown or of another type.
    """
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(name_or_path, **download)
        begin = getattr(config, "init_lora_weights", None)
        if not isinstance(begin, bool | str | NoneType):
            raise TypeError(f"init_lora_weights = {begin!r} is neither a truth value nor a name")
        return config
    except OSError:
        raise
    # peft does not check the types of fields.
    except Exception as error:
        raise ValueError(
            f"{name_or_path}: adapter_config.json: peft cannot read it ({type(error).__name__}: {error})."
        ) from error


def skeleton_with(model: PreTrainedModel, config: Any, adapter_name: str) -> PreTrainedModel:
    """A model of the same shapes on the meta device, with an adapter.

    Args:
        model: the model, with or without other adapters; it is not changed.
        config: the adapter's config; it is not changed.
        adapter_name: the adapter's name.

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
        model: the model; its class may differ from the adapter's own, as a head and its base model do.
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
    fitted, passed_over, unknown = {}, [], []
    for key, tensor in tensors.items():
        name = next((name for name in _names(model, key) if name in expected or name in optional), None)
        if name is not None:
            fitted[name] = tensor
        elif any(re.search(pattern, key) for pattern in getattr(model, "_keys_passed_over", ())):
            passed_over.append(key)
        else:
            unknown.append(key)
            fitted[key] = tensor
    _orient_experts(model, config, fitted, expected, tensors)
    missing = [name for name in expected if name not in fitted]
    shapes = {**optional, **expected}
    differing = {
        name: (list(tensor.shape), list(shapes[name]))
        for name, tensor in fitted.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    }
    if strict and (unknown or missing or differing):
        raise ValueError(_complaint(model, config, unknown, missing, differing))
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


def _orient_experts(
    model: PreTrainedModel,
    config: Any,
    tensors: dict[str, torch.Tensor],
    expected: Mapping[str, tuple[int, ...]],
    given: Mapping[str, torch.Tensor],
) -> None:
    """Exchange the experts' factors in place if they were trained on stock; `given` is the whole adapter."""
    experts = {
        name.replace(".base_layer", ""): module.num_experts
        for name, module in model.named_modules()
        if isinstance(module, Experts)
    }
    pairs, layouts = {}, set()
    for key in tensors:
        match = _FACTOR.match(key)
        if match is None or match["module"] not in experts or key not in expected:
            continue
        other = f"{match['module']}{match['nested']}.lora_B{match['rest']}"
        if other not in tensors or other not in expected:
            continue
        size_in, size_out = expected[key][1], expected[other][0]
        sizes = tensors[key].shape[-1], tensors[other].shape[0]
        as_ours, as_stock = sizes == (size_in, size_out), sizes == (size_out, size_in)
        # Other shapes and ranks are reported later.
        if as_ours or as_stock:
            pairs[key] = (other, experts[match["module"]])
            layouts.add("either" if as_ours and as_stock else "ours" if as_ours else "stock")
    if layouts == {"either"}:
        layouts.add(_recorded_layout(_config_in_memory_or_file(config, given.values())))
    if layouts >= {"ours", "stock"}:
        raise ValueError(
            "The adapter's experts do not agree: some pairs lora_A, lora_B have A on the input side, some on the "
            "output side. It was not trained on one model."
        )
    if "stock" in layouts:
        for key, (other, num_experts) in pairs.items():
            tensors[key], tensors[other] = exchange_factors(tensors[key], tensors[other], num_experts)
        logger.info("The adapter's experts were trained on stock Llama 4: lora_A and lora_B are exchanged.")


def _recorded_layout(config: Any) -> str:
    """Class that trained experts whose input and output have the same size: "ours" or "stock"."""
    name = trained_on(config) or ""
    if name.startswith("Llamoe"):
        return "ours"
    if name.startswith("Llama4"):
        return "stock"
    raise ValueError(
        "The adapter changes experts whose input and output have the same size, and its adapter_config.json does "
        f"not say which model it was trained on (auto_mapping.base_model_class = {name or None!r}). Trained on "
        "transformers' Llama 4 its lora_A and lora_B are exchanged, trained on llamoe they are not, and nothing else "
        'tells. Add to adapter_config.json: "auto_mapping": {"base_model_class": "Llama4ForCausalLM", '
        '"parent_library": "transformers"}, or the same with "LlamoeForCausalLM".'
    )


def _complaint(
    model: PreTrainedModel,
    config: Any,
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
    else:
        base = getattr(config, "base_model_name_or_path", None)
        remedy = "Load it on the model that it was trained on" + (f": {base}." if base else ".")
    return f"The adapter does not fit this {type(model).__name__}: {'; '.join(problems)}. {remedy}"


def fit_folder(
    model: PreTrainedModel,
    config: Any,
    adapter_name: str,
    tensors: Mapping[str, torch.Tensor],
    strict: bool = True,
    make_skeleton: Callable[[], PreTrainedModel] | None = None,
) -> dict[str, torch.Tensor]:
    """Fit the content of an adapter's folder to a model that does not have the adapter yet.

    Args:
        model: the model; it is not changed.
        config: the adapter's config.
        adapter_name: the adapter's future name.
        tensors: its weights, by keys of the file.
        strict: as in `fit`.
        make_skeleton: returns the same as `skeleton_with`, if that is cached.

    Returns:
        the tensors by names that every supported `PreTrainedModel.load_adapter` understands.

    Raises:
        ValueError: as in `fit`, or a method whose layers share tensors outside of the model.
    """
    from peft import get_peft_model_state_dict

    shared = [key for key in tensors if key.startswith("base_model.") and not key.startswith(_PEFT_PREFIX)]
    # RandLora draws its shared tensors anew, from a seed in its config.
    if shared and config.peft_type != "RANDLORA":
        raise ValueError(
            f"This {getattr(config.peft_type, 'value', config.peft_type)} adapter has tensors that its layers share, "
            f"such as {shared[0]}, for which only a PeftModel has a place: use PeftModel.from_pretrained."
        )
    tensors = {key: tensor for key, tensor in tensors.items() if key not in shared}
    skeleton = make_skeleton() if make_skeleton else skeleton_with(model, config, adapter_name)
    saved = get_peft_model_state_dict(skeleton, adapter_name=adapter_name, save_embedding_layers=False)
    expected = _shapes(saved)
    whole = _shapes(skeleton.state_dict())
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
    """Fit what peft loads into a model that already has the adapter, in place.

    Args:
        model: one of our models, inside of a `PeftModel`.
        state_dict: the tensors being loaded.
        prefix: the beginning of the model's keys in it.

    Raises:
        ValueError: as in `fit`.
    """
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    given = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
    own = _shapes(model.state_dict())
    # Newer peft includes the adapter's name only in keys that the model has.
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


def orient_swapped(
    model: PreTrainedModel, config: Any, adapter_name: str, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Bring the experts' factors of an adapter that replaces another one into our layout.

    Args:
        model: one of our models, inside of a `PeftModel`.
        config: config of the new adapter.
        adapter_name: name of the adapter that is replaced.
        tensors: weights of the new adapter, by keys of the `PeftModel`.

    Returns:
        the tensors by the same keys.

    Raises:
        ValueError: experts whose layout cannot be known.
    """
    own = _shapes(model.state_dict())
    expected = {
        _without_name(name, adapter_name): shape
        for name, shape in own.items()
        if _is_named(name, adapter_name)
    }
    names = {_without_name(key.removeprefix(_PEFT_PREFIX), adapter_name): key for key in tensors}
    turned = {name: tensors[key] for name, key in names.items()}
    _orient_experts(model, config, turned, expected, dict(turned))
    return {names[name]: tensor for name, tensor in turned.items()}


def _is_named(key: str, adapter_name: str) -> bool:
    return f".{adapter_name}." in key or key.endswith(f".{adapter_name}")


def _without_name(key: str, adapter_name: str) -> str:
    head, found, tail = key.rpartition(f".{adapter_name}")
    return head + tail if found and tail[:1] in ("", ".") else key


def _as_object(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    from peft import get_peft_config

    return get_peft_config(config)


class LoadsAdapters(PreTrainedModel):
    """peft's adapters for a model class; a base class to name before `PreTrainedModel`."""

    def load_adapter(
        self,
        peft_model_id: str | os.PathLike | None = None,
        adapter_name: str | None = None,
        peft_config: Any = None,
        adapter_state_dict: dict[str, torch.Tensor] | None = None,
        **kwargs,
    ):
        """Load one of peft's adapters, as `PreTrainedModel.load_adapter` does.

        It is first compared with the model, so that an adapter of another base is refused before anything changes.
        Adapters of stock Llama and Llama 4 fit; factors of experts that were trained on stock are exchanged.

        Args:
            peft_model_id: a folder, or `owner/name` on the Hub.
            adapter_name: default: "default".
            peft_config: the adapter's config, instead of the folder's.
            adapter_state_dict: its weights, instead of the folder's.
            **kwargs: further arguments of `PreTrainedModel.load_adapter`.

        Raises:
            ValueError: an adapter of another model, or a damaged file.
        """
        if "disk" in (getattr(self, "hf_device_map", None) or {}).values():
            raise ValueError(
                "load_adapter: a part of the model is on disk, where no adapter can be added to it. Give the layers "
                "that the adapter changes another place in device_map, or merge the adapter into the checkpoint first."
            )
        config, tensors = peft_config, adapter_state_dict
        name, strict = adapter_name or "default", not kwargs.get("ignore_mismatched_sizes")
        make_skeleton = None
        if peft_model_id is not None and (config is None or tensors is None):
            download = dict(getattr(kwargs.get("load_config"), "download_kwargs", None) or {})
            download |= {**kwargs, **(kwargs.get("adapter_kwargs") or {})}
            download = {name: download[name] for name in HUB_ARGUMENTS if download.get(name) is not None}
            if "revision" in download:
                # The revision may be an object that also carries the commit in the base model's repository.
                download["revision"] = str(download["revision"])
            headers = check_files(self, peft_model_id, **download)
            config = read_config(peft_model_id, **download) if config is None else config
            config = _as_object(config)
            if tensors is None:
                # Headers reveal a tensor of a wrong shape before it is read.
                make_skeleton = cache(partial(skeleton_with, self, config, name))
                empty = {key: torch.empty(header.shape, device="meta") for key, header in headers.items()}
                if empty:
                    fit_folder(self, config, name, empty, strict, make_skeleton)
                tensors = read_adapter(peft_model_id, **download)
        config = _as_object(config)
        if config is not None and tensors is not None:
            tensors = fit_folder(self, config, name, tensors, strict, make_skeleton)
        return super().load_adapter(
            peft_model_id,
            adapter_name=adapter_name,
            peft_config=config,
            adapter_state_dict=tensors,
            **kwargs,
        )

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # peft's own classes load an adapter's weights through this method.
        if self.__dict__.get("peft_config"):
            fit_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
