"""What LoRA adds, as the compiled kernels of few rows take it: they multiply by a matrix and its adapters in one call.

Linear layers and stacks of experts, of one or several active adapters, as peft 0.21.2 computes them. Whatever else peft
has for a layer (variants such as DoRA, biases, an adapter for each row of a batch) is called as peft's module.

Shapes: E experts, r rank, I columns in, O columns out.
"""

from collections.abc import Sequence
from typing import Any

from peft.tuners.lora import layer
from torch import nn

from ..kernels import Adapter, adapts
from ..moe import STACKS
from . import expert_lora
from .when_imported import when_imported

# Somebody may put others in their places.
_FORWARDS = {kind: kind.forward for kind in (nn.Linear, nn.Identity, nn.Dropout)}
# Of scales: a tensor may change in place.
_NUMBERS = (int, float)


def register_with_kernels() -> None:
    """Let kernels know the formulas of peft's layer and of our stacks'."""
    adapts(layer.Linear.forward, _facts, _parts_of_linear)
    when_imported("peft.tuners.lora.bnb", _register_layers_of_bitsandbytes)
    adapts(expert_lora.ParamWrapper.forward, _facts, _parts_of_stacks)


def _register_layers_of_bitsandbytes(bnb: Any) -> None:
    for name in ("Linear8bitLt", "Linear4bit"):
        # peft defines them as far as the installed version of bitsandbytes has them.
        if kind := getattr(bnb, name, None):
            adapts(kind.forward, _facts, _parts_of_linear)


def _facts(lora: Any) -> tuple:
    """What decides which adapters a layer adds, and with what factors."""
    dropouts = lora._modules["lora_dropout"]._modules.values()
    return (
        str(lora._active_adapter),
        lora._disable_adapters,
        *lora.merged_adapters,
        *((name, scale if type(scale) in _NUMBERS else None) for name, scale in lora.scaling.items()),
        *lora.lora_variant,
        *(dropout.training for dropout in dropouts),
    )


def _active(lora: Any) -> list[str] | None:
    """The adapters that a layer adds; None where it does something else."""
    if lora.disable_adapters:
        # Its next pass takes them out of the weights.
        return None if lora.merged else []
    names = [] if lora.merged else [name for name in lora.active_adapters if name in lora.lora_A]
    return names if all(_is_plain(lora, name) for name in names) else None


def _is_plain(lora: Any, name: str) -> bool:
    a, b, dropout = (each[name] for each in (lora.lora_A, lora.lora_B, lora.lora_dropout))
    return (
        type(a) is type(b) is nn.Linear
        and a.bias is b.bias is None
        and (type(dropout) is nn.Identity or not dropout.training)
        and all(_FORWARDS.get(type(each)) is type(each).forward for each in (a, b, dropout))
        and type(lora.scaling[name]) in _NUMBERS
        and name not in lora.lora_variant
    )


def _parts_of_linear(lora: Any) -> tuple[nn.Module, Sequence[Adapter]] | None:
    names = _active(lora)
    if names is None:
        return None
    factors = ((lora.lora_A[name].weight, lora.lora_B[name].weight, lora.scaling[name]) for name in names)
    return lora.base_layer, [Adapter(*each) for each in factors]


def _parts_of_stacks(lora: Any) -> tuple[nn.Module, Sequence[Sequence[Adapter]]] | None:
    """The experts below the wrappers of their stacks, and the adapters of each stack."""
    found: dict[str, list[Adapter]] = {}
    while isinstance(lora, expert_lora.ParamWrapper):
        names = _active(lora)
        if names is None or lora.expert_mesh() is not None:
            return None
        for name in names:
            update: Any = lora.update_of(name, lora.scaling[name])
            a_ErI, b_OrE = update.a_EIr.transpose(1, 2), update.b_OrE
            apart = a_ErI.stride(0) * a_ErI.itemsize, b_OrE.stride(2) * b_OrE.itemsize
            adapter = Adapter(a_ErI[0], b_OrE[:, :, 0], update.scale, apart)
            found.setdefault(lora.parameter_name, []).append(adapter)
        lora = lora.base_layer
    return lora, [found.get(name, ()) for name in STACKS] if found else ()
