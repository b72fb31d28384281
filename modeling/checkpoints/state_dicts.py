"""State dicts of every layout that our folders have, through `load_state_dict`.

`from_pretrained` renames what files name otherwise, and fuses experts that they have one by one. Trainer, accelerate,
torch's FSDP and users read files themselves and call `load_state_dict`. There the same rules give each tensor its name
in the model, below wrappers too (peft, DDP, FSDP, a compiler, a user's module), and the experts' modules fuse what is
theirs (`moe.state_dicts`).

torch takes what fits, and with `strict=False` only returns the rest. So here a mixture is never loaded in part: the
error comes before the first weight changes. Where a loader reads several state dicts (`in_parts`), experts wait for the
others of their layer.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ..moe import ExpertMatrix, Experts, fuse, like, take_matrices
from .model_names import HIDDEN, ModelNames


@dataclass
class _Given:
    """What one or several state dicts have given a model, by its names."""

    names: ModelNames
    prefix: str
    whole: set[str] = field(default_factory=set)
    single: dict[str, set[ExpertMatrix]] = field(default_factory=dict)
    renamed: set[str] = field(default_factory=set)

    def check_mixture(self) -> None:
        """Raise a `CheckpointError` if all other weights were given, and of the routed ones some and not all."""
        for owner, routed in self.names.routed.items():
            others = self.names.others.get(owner, ())
            if not others or not self.whole.issuperset(others) or any("_flat_param" in n for n in others):
                continue
            lost = self._missing(routed)
            if lost and (self.single or not self.whole.isdisjoint(routed)):
                raise CheckpointError(
                    f"The state dict has half a mixture: {listed(f'{self.prefix}{name}' for name in lost)} "
                    "missing, though it has other routers or experts. Nothing was loaded."
                )

    def _missing(self, routed: list[str]) -> list[str]:
        lost = []
        for name in routed:
            if name in self.whole:
                continue
            path, _, stack = name.rpartition(".")
            found = self.single.get(name)
            if not found:
                lost.append(name)
                continue
            lost += [f"{path}.{matrix}" for matrix in self.names.experts[path].lacks(stack, found)]
        return lost


class _Parts:
    """Several state dicts that together are a checkpoint.

    Args:
        fuses: whether experts are fused here, for loaders that set one tensor after the other.
    """

    def __init__(self, model: nn.Module, fuses: bool):
        self.model = model
        self.fuses = fuses
        self.given: dict[int, _Given] = {}
        self.taken: set[str] = set()
        self._waiting: dict[str, dict[ExpertMatrix, torch.Tensor]] = {}

    def take(self, state_dict: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """The tensors that a loader can set now, by the model's names; single experts wait until a layer is whole."""
        for prefix, model in outermost(self.model):
            _, names = _settle(model, state_dict, prefix)
            if self.fuses:
                # A loader of single tensors would tie the new one to the old one again.
                for tied, own, value in _halves_of_ties(state_dict, prefix, names):
                    if not own.is_meta:
                        state_dict.update({prefix + name: value for name in tied})
            self.fuse_whole(state_dict, prefix, names)
        return state_dict

    def fuse_whole(self, state_dict: MutableMapping[str, Any], prefix: str, names: ModelNames) -> set[str]:
        """Take single experts out of a state dict; put in the stacks of which all are there now.

        Returns:
            the names of these stacks in the model.
        """
        whole = set()
        for name, experts in names.experts.items():
            path, is_transposed = f"{prefix}{name}.", experts.is_transposed
            for stack, found in take_matrices(state_dict, path, is_transposed).items():
                waiting = self._waiting.setdefault(path + stack, {})
                waiting |= found
                if not experts.lacks(stack, set(waiting)):
                    state_dict[path + stack] = fuse(self._waiting.pop(path + stack), is_transposed, path)
                    whole.add(f"{name}.{stack}")
        return whole

    def check(self) -> None:
        """Check that the parts were a whole."""
        for given in self.given.values():
            given.check_mixture()
        if self._waiting:
            stack, found = next(iter(self._waiting.items()))
            raise CheckpointError(
                f"The checkpoint has half a mixture: {stack} lacks all experts but "
                f"{listed(sorted({matrix.number for matrix in found}))}, or some of their matrices."
            )

    def gave(self, name: str) -> bool:
        """Whether a tensor of the model was given, under whatever name."""
        return any(
            name.removeprefix(given.prefix) in given.whole or name.removeprefix(given.prefix) in given.single
            for given in self.given.values()
            if name.startswith(given.prefix)
        )


_parts: ContextVar[_Parts | None] = ContextVar("llamoe_state_dict_parts", default=None)


@contextmanager
def in_parts(model: nn.Module, fuses: bool = False) -> Iterator[_Parts]:
    """Context in which `model` is given its weights in several state dicts, which are a whole at the end."""
    parts = _Parts(model, fuses)
    token = _parts.set(parts)
    try:
        yield parts
    finally:
        _parts.reset(token)
    parts.check()


def outermost(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, "TakesStateDicts"]]:
    """Our models in a module, without those inside of others; with the prefixes of their names in state dicts."""
    if isinstance(model, TakesStateDicts):
        yield prefix, model
        return
    for name, child in model._modules.items():
        if child is not None:
            yield from outermost(child, prefix if name in HIDDEN else f"{prefix}{name}.")


def is_read_in_parts() -> bool:
    """Whether a loader that fuses experts is at work."""
    parts = _parts.get()
    return parts is not None and parts.fuses


def part_of_checkpoint(content: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The tensors of a file that a loader may set one by one; all, outside of `in_parts(model, fuses=True)`."""
    parts = _parts.get()
    return content if parts is None or not parts.fuses else parts.take(content)


class TakesStateDicts(PreTrainedModel):
    """`load_state_dict` for every layout of our folders; a base class to name before `PreTrainedModel`."""

    _checkpoint_prefixes: ClassVar[dict[str, str]]

    def _load_from_state_dict(
        self,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
    ) -> None:
        given, names = _settle(self, state_dict, prefix)
        if not local_metadata.get("assign_to_params_buffers"):
            _check_memory(given, names, state_dict)
        _tie(state_dict, prefix, names)
        parts = _parts.get()
        fused = set() if parts is None else parts.fuse_whole(state_dict, prefix, names)
        for name in given.renamed & given.whole | fused:
            # torch distributes what has the model's names already.
            state_dict[prefix + name] = like(names.tensors[name], state_dict[prefix + name])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _settle(
    model: PreTrainedModel, state_dict: MutableMapping[str, Any], prefix: str
) -> tuple[_Given, ModelNames]:
    """Give the tensors of a state dict their names in the model, and refuse what would load half a mixture.

    Returns:
        what this state dict gives the model, and the model's names.

    Raises:
        CheckpointError: a tensor is there twice, or is of integers or of the experts of a layer and fits nowhere; or a
            mixture that is not whole.
    """
    names = ModelNames(model)
    given = _Given(names, prefix)
    found: dict[str, str] = {}
    unknown = []
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = names.name_of(key[len(prefix) :])
        if name is None:
            unknown.append(key)
            continue
        if name in found:
            own = names.tensors.get(name)
            first, key = sorted((found[name], key), key=lambda each: state_dict[each] is own)
            if state_dict[key] is not own:
                raise CheckpointError(f"{key} is there a second time: {first} has it, too.")
            # torch's set_model_state_dict adds the model's own tensors.
            del state_dict[key]
            key = first
        found[name] = key
    for name, key in found.items():
        path, matrix = names.single_of(name)
        if matrix is None:
            _check_dtype(key, state_dict[key], names.tensors[name])
            if state_dict[key] is not names.tensors[name]:
                given.whole.add(name)
            continue
        _check_single(key, path, matrix, names.experts[path])
        given.single.setdefault(f"{path}.{matrix.stack}", set()).add(matrix)
    if key := next((key for key in unknown if names.has_layer_of(key[len(prefix) :])), None):
        raise CheckpointError(
            f"{key} belongs to the experts of a layer, and this {type(model).__name__} takes no such tensor: it is of "
            "another architecture or format. Load the folder by from_pretrained."
        )
    for stack in given.single:
        if stack in given.whole:
            raise CheckpointError(
                f"{prefix}{stack} is there a second time: its experts are there one by one, too."
            )
        if stack in found:
            del state_dict[found.pop(stack)]
    parts = _parts.get()
    if parts is None:
        given.check_mixture()
    else:
        known = parts.given.setdefault(id(model), given)
        known.whole |= given.whole
        for stack, matrices in given.single.items():
            known.single[stack] = known.single.get(stack, set()) | matrices
        parts.taken.update(found.values())
    for name, key in found.items():
        if key != prefix + name:
            given.renamed.add(name)
    values = {name: state_dict.pop(found[name]) for name in given.renamed}
    state_dict.update({prefix + name: tensor for name, tensor in values.items()})
    return given, names


def _check_single(key: str, path: str, matrix: ExpertMatrix, experts: Experts) -> None:
    if experts.storage is not None:
        raise CheckpointError(
            f"{key} is of one expert in 16 or 32 bits, and the experts {path} are {experts.storage}: load the "
            "folder by from_pretrained."
        )
    if matrix.number >= experts.num_experts:
        raise CheckpointError(
            f"{key} is of expert {matrix.number}, but num_local_experts of this model is {experts.num_experts}."
        )


def _check_dtype(key: str, tensor: Any, own: torch.Tensor | None) -> None:
    if not isinstance(tensor, torch.Tensor) or own is None:
        return
    # torch would cast: packed codes would become weights, or weights codes.
    if not own.is_floating_point() and tensor.dtype != own.dtype:
        raise CheckpointError(f"{key} is {tensor.dtype}, where this packed weight has {own.dtype}.")
    if own.is_floating_point() and not tensor.is_floating_point():
        raise CheckpointError(
            f"{key} has dtype {tensor.dtype}, where this model has {own.dtype}: weights that are quantized "
            "load by from_pretrained, or into a model that was loaded from such a folder."
        )


def _check_memory(given: _Given, names: ModelNames, state_dict: Mapping[str, Any]) -> None:
    """Refuse to load into parameters without memory, of which torch would only warn."""
    for name in (*given.whole, *given.single):
        own, tensor = names.tensors[name], state_dict.get(given.prefix + name)
        is_empty = isinstance(tensor, torch.Tensor) and tensor.is_meta
        if own is not None and own.is_meta and not is_empty and name not in names.offloaded:
            raise CheckpointError(
                f"{given.prefix}{name} of this model is on the meta device, where no weight can be copied to: give "
                "assign=True, or load the folder by from_pretrained."
            )


def _tie(state_dict: MutableMapping[str, Any], prefix: str, names: ModelNames) -> None:
    """Give tied weights, of which files have one, the tensor of the other; assigned, they stay one parameter."""
    for tied, own, value in _halves_of_ties(state_dict, prefix, names):
        if not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=own.requires_grad)
        state_dict.update({prefix + name: value for name in tied})


def _halves_of_ties(
    state_dict: Mapping[str, Any], prefix: str, names: ModelNames
) -> Iterator[tuple[list[str], nn.Parameter, Any]]:
    """The names of tied weights that a state dict has not all of, with the model's tensor and the one given."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in names.tensors.items():
        if isinstance(tensor, nn.Parameter):
            by_tensor.setdefault(id(tensor), []).append(name)
    for tied in by_tensor.values():
        own: Any = names.tensors[tied[0]]
        values = [state_dict.get(prefix + name) for name in tied]
        given = [value for value in values if value is not None and value is not own]
        if given and len(given) < len(tied):
            yield tied, own, given[0]
