"""In which layout the factors of an adapter's experts are, and the other layout.

Stock Llama 4 does not declare that its experts are stored input-first: peft takes `[E, in, out]` for `[E, out, in]`,
and learns A on the output side and B on the input side. The change of the weight is the same matrix product. Our
experts declare their layout, so such a pair fits them once its factors are exchanged:

* A `[E * r, in]`, where the expert is the slowest index;
* B `[out, r * E]`, where the expert is the fastest index.

Shapes: E experts, R = r rank, X and Y the sizes of the two sides.
"""

import logging
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import NoneType
from typing import Any

import torch
from transformers import PreTrainedModel

from ..moe import Experts

logger = logging.getLogger("llamoe")

_FACTOR = re.compile(r"^(?P<module>.+?)(?P<nested>(\.base_layer)*)\.lora_A(?P<rest>\..+)$")


def by_expert(factor: torch.Tensor, dim: int, num_experts: int) -> torch.Tensor:
    """A view of A (dim 0) as `[E, r, X]`, or of B (dim 1) as `[Y, r, E]`: in both the second axis is the rank."""
    return factor.unflatten(dim, (num_experts, -1) if dim == 0 else (-1, num_experts))


def exchange_factors(
    lora_A: torch.Tensor, lora_B: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert a pair `[E * r, X]`, `[Y, r * E]` from stock's layout to ours or back: `[E * r, Y]` and `[X, r * E]`.

    Each expert's product is the transpose of what it was.
    """
    a_ERX, b_YRE = by_expert(lora_A, 0, num_experts), by_expert(lora_B, 1, num_experts)
    return (
        b_YRE.permute(2, 1, 0).flatten(0, 1).contiguous(),
        a_ERX.permute(2, 1, 0).flatten(1, 2).contiguous(),
    )


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


def read_config(name_or_path: str | os.PathLike, **download: Any) -> Any:
    """An adapter's config, from a folder or the Hub; an `OSError` if there is none, else a `ValueError`."""
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


# The latest adapter file that a PeftModel has read: one of its tensors, and the file's place.
_latest_file: ContextVar[tuple[weakref.ref, Any, dict[str, Any]] | None] = ContextVar(
    "_latest_file", default=None
)


def remember_file(tensors: Mapping[str, torch.Tensor], name_or_path: Any, **kwargs: Any) -> None:
    """Remember the place from which tensors were read, while they live."""
    if tensors:
        _latest_file.set((weakref.ref(next(iter(tensors.values()))), name_or_path, kwargs))


def saved_config(config: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """The config saved with these tensors: the file's, if they come from a file."""
    reference, name_or_path, kwargs = _latest_file.get() or (lambda: None, None, {})
    first = reference()
    if first is None or not any(tensor is first for tensor in tensors):
        return config
    download = {name: value for name, value in kwargs.items() if name not in ("device", "key_mapping")}
    return read_config(name_or_path, **download)


def orient_experts(
    model: PreTrainedModel,
    config: Any,
    tensors: dict[str, torch.Tensor],
    expected: Mapping[str, tuple[int, ...]],
    given: Mapping[str, torch.Tensor],
) -> None:
    """Exchange the experts' factors in `tensors`, by the model's keys, if they were trained on stock.

    `expected` has the keys and shapes that the adapter must have on this model, `given` the whole adapter as it was
    read.

    Raises:
        ValueError: experts whose layout cannot be known.
    """
    experts = {
        name.replace(".base_layer", ""): module.num_experts
        for name, module in model.named_modules()
        # Stock's Mixtral declares its layout, which is ours.
        if isinstance(module, Experts) and module.is_transposed
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
        layouts.add(_recorded_layout(saved_config(config, given.values())))
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
    name = (getattr(config, "auto_mapping", None) or {}).get("base_model_class") or ""
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
