"""What is known of modules for passes of few rows, as long as nothing of them has changed.

What kernels need to know of a module is worked out once (`recall`), and again whenever its class, its hooks, its
`forward`, or the address, dtype or shape of its tensors have changed. So hooks, adapters, casts and moves between two
passes are seen. Where nothing watches any module of a decoder, nothing can change during a pass: then all of them are
looked at once, when it begins (`state_of`).

A `forward` whose formula is known says which one it is, by `computes` or, an adapter's, by `adapts`. One that took its
place, in the class or in a subclass, is called.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._private_api import are_watching
from .cpu import has_hooks

_PLAIN = (torch.Tensor, nn.Parameter)


class State:
    """All modules of a decoder as they were in one pass, and in those that followed without a change."""

    def __init__(self, signature: list[Any]):
        self.signature = signature
        # For each kind of pass what is known of all layers, by their number.
        self.decoders: dict[Any, dict[int, Any]] = {}


# What is known of a module, the signature that it was known for, and its decoder's state at that time, if it had one.
# No tensor is kept: weights that were replaced are freed.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], Any, State | None]] = (
    weakref.WeakKeyDictionary()
)
# The state of each decoder, by the first of its modules.
_STATES: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()


def computes(formula: str, *reads: str) -> Callable[[Callable], Callable]:
    """A decorator of a `forward`, which says what it computes, and by which attributes beside modules and tensors."""

    def mark(forward: Callable) -> Callable:
        # `marked` tells it from a function that wraps it, and has its attributes.
        vars(forward).update(formula=formula, reads=reads, marked=forward)
        return forward

    return mark


def adapts(
    forward: Callable, facts: Callable[[Any], tuple], parts: Callable[[Any], tuple[nn.Module, Any] | None]
) -> None:
    """Say of an adapter's `forward` that it computes what its base layer does, and adds products of low rank.

    Args:
        forward: of a class whose modules have the base layer as `base_layer`.
        facts: by what else than its tensors and children a module computes, as values that stay as they are.
        parts: the base layer, and what `unadapted` returns beside it; None of a module that computes something else.
    """
    vars(forward).update(facts=facts, parts=parts, marked=forward)


def unadapted(module: nn.Module) -> tuple[nn.Module, Any]:
    """The layer inside of an adapter that nothing watches, and what is added to its products.

    That is a sequence of `Adapter`s, of experts one for each stack in order. Other modules come back with nothing.
    """
    if _is_adapter(module) and not any(map(has_hooks, module.modules())):
        found = _forward_of(module).parts(module)
        if found is not None:
            return found
    return module, ()


def base_of(module: nn.Module) -> nn.Module:
    """The layer inside of adapters."""
    while _is_adapter(module):
        module = module._modules["base_layer"]  # pyright: ignore[reportAssignmentType]
    return module


def unwatched_formula(module: nn.Module) -> str | None:
    """As `formula_of`; None also where something watches the module."""
    return None if has_hooks(module) else formula_of(module)


def formula_of(module: nn.Module) -> str | None:
    """The formula that a module's class computes; None if it is not known."""
    return getattr(_forward_of(module), "formula", None)


def _is_adapter(module: nn.Module) -> bool:
    forward = _forward_of(module)
    return hasattr(forward, "parts") and forward.marked is forward


def _forward_of(module: nn.Module) -> Any:
    return type(module).__dict__.get("forward")


def is_own_forward(module: nn.Module) -> bool:
    """Whether a module computes a known formula that its class may inherit, and nothing watches it."""
    forward = type(module).forward
    return getattr(forward, "marked", None) is forward and not has_hooks(module)


def state_of(modules: Sequence[nn.Module], kept: list[torch.Tensor | None]) -> State | None:
    """The state of modules and their children; None where something watches one of them.

    `kept` gets their tensors, so that these stay as long as the pass, whatever another thread does to the modules.
    """
    signature: list[Any] = []
    remaining, classes = list(modules), dict[type, tuple[Any, tuple[str, ...]]]()
    for module in remaining:
        own, kind = module.__dict__, type(module)
        hooks = own["_forward_hooks"]
        # Asked where there are any: a pass looks at hundreds of modules.
        if (hooks and are_watching(hooks)) or own["_forward_pre_hooks"] or "forward" in own:
            return None
        if kind not in classes:
            forward = kind.__dict__.get("forward")
            classes[kind] = forward, _reads(forward)
        forward, reads = classes[kind]
        signature.append(kind)
        if reads:
            signature += map(own.get, reads)
        if own["_parameters"]:
            _sign_tensors(own["_parameters"], signature, kept)
        if own["_buffers"]:
            _sign_tensors(own["_buffers"], signature, kept)
        if hasattr(forward, "facts"):
            signature += forward.facts(module)
        remaining += filter(None, own["_modules"].values())
    signature += classes.values()
    state = _STATES.get(modules[0]) if modules else None
    if modules and (state is None or state.signature != signature):
        state = _STATES[modules[0]] = State(signature)
    return state


def recall(
    key: Any,
    state: State | None,
    kept: list[torch.Tensor | None],
    watched: Sequence[Any],
    work_out: Callable[[], Any],
) -> Any:
    """What `work_out` returns of the first module; worked out again if anything of the watched ones has changed.

    None where the first one must be called, because something watches it.

    Args:
        key: of the kind of pass.
        state: of all modules of the decoder, if they were looked at once.
        kept: as in `state_of`.
        watched: modules.
        work_out: what is to be known of the first one.
    """
    known = _KNOWN.get(watched[0])
    if state is not None and known is not None and known[2] is state and known[0][0] == key:
        return known[1]
    signature: list[Any] = [key]
    remaining = list(watched)
    for each in remaining:
        own, forward = each.__dict__, _forward_of(each)
        if hasattr(forward, "facts"):
            signature += forward.facts(each)
            remaining += list(each.modules())[1:]
        signature += (type(each), forward, "forward" in own, not are_watching(each._forward_hooks))
        signature += (not each._forward_pre_hooks, *map(own.get, _reads(forward)))
        _sign_tensors(each._parameters, signature, kept)
        _sign_tensors(each._buffers, signature, kept)
    if known is not None and known[0] == signature:
        found = known[1]
    else:
        found = None if has_hooks(watched[0]) else work_out()
    _KNOWN[watched[0]] = signature, found, state
    return found


def _sign_tensors(
    tensors: Mapping[str, torch.Tensor | None], signature: list[Any], kept: list[torch.Tensor | None]
) -> None:
    found = [*tensors.values()]
    kept += found
    for tensor in found:
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            strides = tensor.is_contiguous() or tensor.stride()
            signature += (tensor.data_ptr(), tensor.dtype, tensor.shape, strides)
        else:
            signature.append(type(tensor))


def _reads(forward: Any) -> tuple[str, ...]:
    """The attributes by which a `forward` computes its formula: they can be set between two passes."""
    return getattr(forward, "reads", ())
