"""The names that a model's tensors have in state dicts: its own, and those of files that name them otherwise.

Wrappers put words between: peft around layers, FSDP and compilers around modules.
"""

import re
from collections.abc import Callable
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from ..moe import PARTS_OF_STACKS, STACKS, ExpertMatrix, Experts, Router, matrix_named
from .expert_index import WEIGHT, expert_of, names_in_model

# Wrappers that hide their own name, by hooks; and those whose name stands in state dicts.
HIDDEN = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_AROUND = ("base_layer", "original_module", "_orig_mod")
# A weight of routed experts, not what an adapter adds to them, and its layer.
_OF_EXPERTS = re.compile(
    r"(.*\blayers\.\d+)\.\w+\.experts\.(?:(?:\w+\.)?\d+\.|gate_up_proj|down_proj)(?!.*lora_)"
)


class ModelNames:
    """The tensors of a model by the names that state dicts have for them; and without the wrappers around layers."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self.tensors: dict[str, torch.Tensor | None] = {}
        self.experts: dict[str, Experts] = {}
        self._of_plain: dict[str, str] = {}
        # By the innermost model around them: routed weights, and the others, which any checkpoint has.
        self.routed: dict[str, list[str]] = {}
        self.others: dict[str, list[str]] = {}
        self._layers: set[str] = set()
        self.offloaded: set[str] = set()
        self._walk(model, "", "", "", adapter=False)

    def _walk(self, module: nn.Module, name: str, plain: str, owner: str, adapter: bool) -> None:
        if isinstance(module, PreTrainedModel):
            owner = plain
        self._layers.add(plain)
        names = [key for key, tensor in module._parameters.items() if tensor is not None]
        buffers = [
            key
            for key, tensor in module._buffers.items()
            if tensor is not None and key not in module._non_persistent_buffers_set
        ]
        if isinstance(module, Experts):
            self.experts[name], self._of_plain[plain] = module, name
            # FSDP may have made one flat parameter of them.
            names = list(dict.fromkeys((*names, *STACKS)))
        elif isinstance(module, Router):
            names = ["weight"]
        for key in (*names, *buffers):
            full = _join(name, key)
            self.tensors[full] = module._parameters.get(key, module._buffers.get(key))
            if adapter:
                continue
            self._of_plain[_join(plain, key)] = full
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

    @cached_property
    def _candidates(self) -> Callable[[str], list[str]]:
        """The names that `from_pretrained` would give a file's key."""
        prefixes = getattr(self._model, "_checkpoint_prefixes", {})
        rules = get_model_conversion_mapping(self._model, {f"^{old}": new for old, new in prefixes.items()})
        return names_in_model(self._model, rules)

    def single_of(self, name: str) -> tuple[str, ExpertMatrix | None]:
        """Path of the experts and the matrix, of the name of a single expert's matrix in the model."""
        pieces = name.rsplit(".", 3)
        path = pieces[0] if len(pieces) == 4 else ""
        matrix = matrix_named(name[len(path) + 1 :]) if path in self.experts else None
        is_own = matrix and matrix.part in PARTS_OF_STACKS[self.experts[path].is_transposed][matrix.stack]
        return path, matrix if is_own else None

    def name_of(self, key: str) -> str | None:
        """The name of a file's tensor in state dicts of the model; None if it has no such tensor."""
        path, matrix = self.single_of(key)
        if matrix is not None:
            return f"{path}.{matrix}"
        if key in self.tensors:
            return key
        for name in () if key in self._of_plain else self._candidates(key):
            expert = expert_of(name)
            path = self._of_plain.get(expert.experts) if expert and expert.kind == WEIGHT else None
            if expert is not None and path in self.experts:
                return f"{path}.{expert.matrix}"
            if name in self._of_plain:
                return self._of_plain[name]
        return self._of_plain.get(key)

    def has_layer_of(self, key: str) -> bool:
        """Whether a key is of the experts of a layer that the model has."""
        matches = (_OF_EXPERTS.match(name) for name in self._candidates(key))
        return any(match[1] in self._layers for match in matches if match)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
