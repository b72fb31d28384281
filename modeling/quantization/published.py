"""Folders that other programs have packed in 4 bits, read into int4 (`formats.packed` says what their bits mean).

transformers' loader collects the tensors of a matrix, or of all experts' matrices of a stack, and an operation of the
quantizer makes int4's parts of them. Which layers are packed is what the files say. Layers that int4 does not hold,
such as heads and routers, get the weight that theirs means in 16 bits.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict
from transformers.utils import logging

from ...configuration import LlamoeVisionConfig
from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ...configuration.quantization import QuantizationConfig
from ..checkpoints import Stored, headers_of, shape_of_one
from ..formats import Int4
from ..formats.packed import LAYOUTS, Layout, int4_parts, weight_of
from ..moe import PARTS_OF_STACKS, PLACES, Experts
from .packed import Packed

logger = logging.get_logger("llamoe")

# What may stand beside a packed layer: biases of 0, and schemes for activations.
_PASSED_OVER = ("bias", "input_scale", "output_scale")
_REMEDY = "Download or copy the checkpoint again."


def layout_of(stored: Any) -> Layout | None:
    """The layout that a folder's `quantization_config`, or its dict, means; None for methods that have none here.

    Raises:
        ConfigurationError: a method that has one, with something that is not read.
    """
    content: Any = stored if isinstance(stored, dict) else stored.to_dict()
    method = content.get("quant_method")
    # Or a member of transformers' `QuantizationMethod`.
    maker = LAYOUTS.get(getattr(method, "value", method))
    return maker and maker(content)


def own_config(layout: Layout) -> QuantizationConfig:
    """The config of int4 by which such a folder is loaded, and saved."""
    return QuantizationConfig("int4", layout.group_size or 128)


def reading_rules(layout: Layout) -> list[WeightConverter]:
    """Rules of transformers' loader that make weights of a layout's tensors."""
    stacks = {stack: [part for part in PLACES if PLACES[part][0] == stack] for stack in PARTS_OF_STACKS[True]}
    # On the CPU, where files are mapped: the loader would copy all of them to a GPU before it makes the first weight.
    return [
        *(
            WeightConverter(
                [f".experts.*.{part}.{kind}" for part in parts for kind in layout.kinds],
                f".experts.{stack}",
                [_ReadStack(layout)],
                force_cpu=True,
            )
            for stack, parts in stacks.items()
        ),
        WeightConverter(
            [f".{kind}" for kind in layout.kinds], ".weight", [_ReadLinear(layout)], force_cpu=True
        ),
    ]


class _Reads(ConversionOps):
    # What transformers casts, it would cast before: it looks for this attribute, which its own operations have.
    hf_quantizer = True

    def __init__(self, layout: Layout):
        self.layout = layout

    def matrix(self, tensors: Mapping[str, torch.Tensor], sizes: Any) -> torch.Tensor:
        """The matrix that a layer's tensors mean, which may be plain."""
        if set(tensors) == {"weight"}:
            return tensors["weight"]
        return weight_of(self.layout.unpack(tensors, sizes), self.layout)


class _ReadLinear(_Reads):
    """Make the parts of a linear layer's weight, or the weight if the layer is not packed here."""

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """The tensors by their names in the model."""
        path, _, name = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        tensors = {pattern.rpartition(".")[2]: tensors[0] for pattern, tensors in input_dict.items()}
        if not isinstance(module, Packed):
            sizes = tuple(module.weight.shape)
            return {full_layer_name: self.matrix(tensors, sizes).to(module.weight.dtype)}
        unpacked = self.layout.unpack(tensors, module.sizes[name])
        parts = int4_parts([unpacked], self.layout, module.format)
        return {
            f"{path}.{part}": tensor for part, tensor in zip(module.part_shapes(name), parts, strict=True)
        }


class _ReadStack(_Reads):
    """Make the parts of a stack, one expert after the other."""

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """The tensors by their names in the model."""
        path, _, stack = full_layer_name.rpartition(".")
        experts = model.get_submodule(path)
        places: dict[int, dict[str, list[torch.Tensor]]] = {}
        for pattern, tensors in input_dict.items():
            part, kind = pattern.split(".")[-2:]
            places.setdefault(PLACES[part][1], {})[kind] = tensors
        num_out, num_in = experts.sizes_of(stack)
        sizes = num_out // len(places), num_in
        by_expert = (
            [{kind: tensors[number] for kind, tensors in places[place].items()} for place in sorted(places)]
            for number in range(experts.num_experts)
        )
        if not isinstance(experts, Packed):
            whole = torch.empty(experts.stack_shape(stack), dtype=experts.dtype)
            for matrix, tensors in zip(whole.mT if experts.is_transposed else whole, by_expert, strict=True):
                matrix.copy_(torch.cat([self.matrix(each, sizes) for each in tensors]))
            return {full_layer_name: whole}
        wholes = experts.empty_parts(stack, torch.device("cpu"))
        for number, tensors in enumerate(by_expert):
            matrices = [self.layout.unpack(each, sizes) for each in tensors]
            parts = int4_parts(matrices, self.layout, experts.formats[stack])
            for whole, part in zip(wholes.values(), parts, strict=True):
                whole[number] = part
        return {f"{path}.{part}": whole for part, whole in wholes.items()}


Matrices = dict[str, dict[str, dict[str, Stored]]]
"""By a weight's name in the model, and by the names of its linear layers in files, the tensors by kind."""


def find_packed(
    model: PreTrainedModel, files: Iterable[str], layout: Layout, rules: Iterable[Any]
) -> Matrices:
    """What files have packed of a model's weights.

    Biases that GPTQ's programs write for layers without one are passed over, and so are scales of activations.

    Args:
        model: empty, without packed modules.
        files: of the checkpoint.
        layout: of the packed matrices.
        rules: of transformers' loader, with those of `reading_rules`.

    Raises:
        CheckpointError: none, a tensor is missing or has another shape, or such a bias is not 0.
    """
    rules, state, headers = list(rules), model.state_dict(), headers_of(files)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def name_in_model(name: str) -> str:
        return rename_source_key(name, renamings, converters, model.base_model_prefix, state)[0]

    matrices: Matrices = {}
    packed = set()
    for stored in headers:
        layer, _, kind = stored.name.rpartition(".")
        if layout.holds(kind, stored.dtype) and (weight := name_in_model(stored.name)) in state:
            matrices.setdefault(weight, {}).setdefault(layer, {})[kind] = stored
            packed.add(layer)
    # A tower alone is mostly plain.
    if not matrices and not isinstance(model.config, LlamoeVisionConfig):
        raise CheckpointError(
            f"{listed(sorted({stored.origin for stored in headers}), 3)}: no weight of this model is packed, as "
            f"quantization_config in config.json says (no {layout.kinds[0]})."
        )
    for weight, layers in matrices.items():
        _check_matrices(model, weight, layers, layout)
    content = cache(load_state_dict)
    for stored in headers:
        layer, _, kind = stored.name.rpartition(".")
        if layer not in packed or kind not in _PASSED_OVER or name_in_model(stored.name) in state:
            continue
        if kind == "bias" and content(stored.origin)[stored.name][...].any():
            raise CheckpointError(f"{stored} is not 0, but this model's layer has no bias.")
        model._keys_passed_over = [*model._keys_passed_over, f"^{re.escape(name_in_model(stored.name))}$"]
    return matrices


def _check_matrices(model: nn.Module, weight: str, layers: Mapping[str, Any], layout: Layout) -> None:
    """Check that a weight has all its matrices, and each all its tensors in the shapes of the model."""
    path, _, name = weight.rpartition(".")
    module = model.get_submodule(path)
    first, *_ = (stored for kinds in layers.values() for stored in kinds.values())
    if isinstance(module, Experts):
        sizes = shape_of_one(module, name)
        numbers = range(module.num_experts)
        here = sorted(layer.rpartition("experts.")[2] for layer in layers)
        if here not in [
            sorted(f"{n}.{part}" for n in numbers for part in of[name]) for of in PARTS_OF_STACKS.values()
        ]:
            raise CheckpointError(
                f"{first} is of {len(layers)} packed matrices of experts ({listed(here, 9)}), where each of "
                f"{module.num_experts} experts needs its own. {_REMEDY}"
            )
    else:
        sizes = tuple(module.weight.shape)
    # What an expert has beside that, such as g_idx, all must have: the loader collects it in lists.
    needed, beside = layout.shapes(sizes), set().union(*layers.values())
    for layer, kinds in layers.items():
        for kind in (*needed, *sorted(beside)):
            if kind not in kinds:
                raise CheckpointError(
                    f"{next(iter(kinds.values()))}: {layer}.{kind} is missing beside it. {_REMEDY}"
                )
            if kinds[kind].shape != needed.get(kind, kinds[kind].shape):
                raise CheckpointError(
                    f"{kinds[kind]} has shape {[*kinds[kind].shape]}, where config.json means {[*needed[kind]]}: its "
                    "sizes, or quantization_config's groups, are not those of the weights."
                )


def follow_files(
    config: QuantizationConfig, layout: Layout, candidates: Mapping[str, nn.Module], matrices: Matrices
) -> None:
    """Let a config name what files have packed: the modules that stay in 16 bits, and a size of groups.

    Args:
        config: changed in place.
        layout: of the packed matrices.
        candidates: the modules that int4 would take, by name.
        matrices: by `find_packed`.
    """
    paths = {weight.rpartition(".")[0] for weight in matrices}
    taken = {name: module for name, module in candidates.items() if name in paths}
    if layout.group_size is None:
        # One scale an output fits any group: the largest without padding.
        sizes = _sizes_in_int4(candidates, matrices).values()
        config.group_size = next(
            (size for size in (128, 64) if not any(num_in % size for _, num_in in sizes)), 32
        )
    # By what follows the layer's number, where that means no packed module of another layer.
    ends_taken = {_in_layer(name) for name in taken}
    kept = [name for name in candidates if name not in taken]
    ends = [
        name[name.find("layers.") :] if _in_layer(name) in ends_taken else _in_layer(name) for name in kept
    ]
    config.modules_to_not_convert = [*dict.fromkeys(ends)] or None


def check_int4(config: QuantizationConfig, candidates: Mapping[str, nn.Module], matrices: Matrices) -> None:
    """Check that int4 holds what files have packed, and warn of what stays in 16 bits; arguments as before.

    Raises:
        CheckpointError: a packed matrix that int4 cannot hold.
    """
    if others := sorted({weight.rpartition(".")[0] for weight in matrices} - set(candidates)):
        logger.warning("Packed in the folder, and held in 16 bits here: %s.", listed(others, 5))
    form = Int4(config.group_size or 0)
    for weight, each in _sizes_in_int4(candidates, matrices).items():
        if why := form.refusal(each):
            stored = next(iter(next(iter(matrices[weight].values())).values()))
            raise CheckpointError(f"{stored} cannot be held as {form.key}: {why}.")


def _sizes_in_int4(candidates: Mapping[str, nn.Module], matrices: Matrices) -> dict[str, tuple[int, int]]:
    """O and I of the packed weights whose modules int4 takes, by the weight's name."""
    return {
        weight: module.sizes_of(name) if isinstance(module, Experts) else tuple(module.weight.shape)
        for weight in matrices
        for path, _, name in [weight.rpartition(".")]
        if (module := candidates.get(path)) is not None
    }


def _in_layer(name: str) -> str:
    return re.sub(r".*layers\.\d+\.", "", name)
