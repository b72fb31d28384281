"""The names that a model's tensors have in state dicts: its own, and those of files that name them otherwise.

Wrappers put words between: peft around layers, FSDP and compilers around modules.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..moe import PARTS_OF_STACKS, ExpertMatrix, Experts, Router
from .expert_index import expert_of
from .split_experts import fusing_rules

# Wrappers that hide their own name, by hooks; and those whose name stands in state dicts.
HIDDEN = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_AROUND = ("base_layer", "original_module", "_orig_mod")
# A weight of routed experts, not what an adapter adds to them, and its layer.
_OF_EXPERTS = re.compile(
    r"(.*\blayers\.\d+)\.\w+\.experts\.(?:(?:\w+\.)?\d+\.|gate_up_proj|down_proj)(?!.*lora_)"
)


@dataclass
class Mixture:
    """Routed experts: their module, its name in state dicts, and the model that they are in."""

    module: Experts
    name: str
    owner: str


class ModelNames:
    """The tensors of a model by the names that state dicts have for them; and without the wrappers around layers."""

    def __init__(self, model: nn.Module):
        self.tensors: dict[str, torch.Tensor | None] = {}
        self.of_plain: dict[str, str] = {}
        self.mixtures: dict[str, Mixture] = {}
        # By the innermost model around them: routed weights, and the others, which any checkpoint has.
        self.routed: dict[str, list[str]] = {}
        self.others: dict[str, list[str]] = {}
        self.layers: set[str] = set()
        self.offloaded: set[str] = set()
        self._walk(model, "", "", "", adapter=False)

    def _walk(self, module: nn.Module, name: str, plain: str, owner: str, adapter: bool) -> None:
        if isinstance(module, PreTrainedModel):
            owner = plain
        self.layers.add(plain)
        names = [key for key, tensor in module._parameters.items() if tensor is not None]
        buffers = [
            key
            for key, tensor in module._buffers.items()
            if tensor is not None and key not in module._non_persistent_buffers_set
        ]
        if isinstance(module, Experts):
            self.mixtures[plain] = Mixture(module, name, owner)
            # FSDP may have made one flat parameter of them.
            names = list(dict.fromkeys((*names, *PARTS_OF_STACKS[True])))
        elif isinstance(module, Router):
            names = ["weight"]
        for key in (*names, *buffers):
            full = _join(name, key)
            self.tensors[full] = module._parameters.get(key, module._buffers.get(key))
            if adapter:
                continue
            self.of_plain[_join(plain, key)] = full
            if isinstance(module, Experts) and module.is_offloaded:
                self.offloaded.add(full)
            if isinstance(module, Experts | Router):
                if key != "balancing_bias":
                    self.routed.setdefault(owner, []).append(full)
            elif key in module._parameters:
                self.others.setdefault(owner, []).append(full)
        around = [child for child in _AROUND if child in module._modules]
        for child, part in module._modules.items():
            if part is None:
                continue
            if child in HIDDEN:
                self._walk(part, name, plain, owner, adapter)
            elif child in around:
                self._walk(part, _join(name, child), plain, owner, adapter)
            else:
                self._walk(part, _join(name, child), _join(plain, child), owner, adapter or bool(around))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Renaming:
    """The names that a model has for a file's keys, by the rules of `from_pretrained`."""

    def __init__(self, model: PreTrainedModel, names: ModelNames):
        self._model = model
        self._base = model.base_model_prefix
        self._names = names

    @cached_property
    def _rules(self) -> tuple[list[Any], list[Any]]:
        prefixes: Mapping[str, str] = getattr(self._model, "_checkpoint_prefixes", {})
        rules = get_model_conversion_mapping(self._model, {f"^{old}": new for old, new in prefixes.items()})
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        if any(mixture.module.is_transposed for mixture in self._names.mixtures.values()):
            converters += fusing_rules()
        return [rule for rule in rules if isinstance(rule, WeightRenaming)], converters

    def __call__(self, key: str) -> str | None:
        """The name in state dicts of the model; None if it has no such tensor."""
        known: Any = self._names.of_plain
        whole, _ = rename_source_key(key, *self._rules, self._base, known)
        if whole not in known:
            return None
        renamed, _ = rename_source_key(key, self._rules[0], [])
        expert = expert_of(renamed)
        if expert is None:
            return known[whole]
        mixture = self._names.mixtures[whole.rpartition(".")[0]]
        part = expert.part if expert.part.startswith("w") else f"{expert.part}_proj"
        return _join(mixture.name, str(ExpertMatrix(expert.number, part)))

    def belongs_to_layer(self, key: str) -> bool:
        """Whether a key is of the experts of a layer that the model has."""
        renamed, _ = rename_source_key(key, self._rules[0], [])
        match = _OF_EXPERTS.match(renamed)
        if match is None:
            return False
        layer = match[1]
        return not self._names.layers.isdisjoint(
            (layer, layer.removeprefix(f"{self._base}."), f"{self._base}.{layer}")
        )
