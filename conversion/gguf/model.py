"""Open a GGUF file: its tensors under stock Hugging Face keys, its configuration and its tokenizer."""

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from gguf import MODEL_ARCH, get_tensor_name_map

from ...configuration import LlamoeTextConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ...modeling.moe import PARTS_OF_STACKS
from ...modeling.quantization import names_in_16_bit
from ..checkpoint import Checkpoint, check_model, expected_shapes
from ..consolidated import Params, naming
from ..io import LazyTensor, PackedMatrix, permute_pairs, stack
from .blocks import PLAIN, GgufLayout
from .configuration import read_config
from .header import Tensor, read_header
from .tokenizer import read_tokenizer

_DTYPES = {"F32": torch.float32, "F16": torch.float16}
_LAYOUT = GgufLayout()
_FACTORS = "rope_freqs.weight"
# The first GGUF files of Mixtral have a tensor for each expert; later ones have a tensor for all.
_SINGLE = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight")
# Projections whose rows LLaMA's files permute within each head, and the configuration's fields for their heads.
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def open_gguf(path: Path, *, companions: bool = True) -> Checkpoint:
    """Open a GGUF file, or all parts of a split one by the path of any part; see `open_checkpoint`.

    The weights' dtype is float32 or float16 if most numbers are stored so, else bfloat16.

    Raises:
        CheckpointError: a file is missing or damaged, or of another architecture; tensors are missing, unknown, or
            contradict the keys.
    """
    keys, stored, files = read_header(path)
    params = Params(keys, str(files[0]))
    with naming(params):
        config = read_config(params, stored)
    counts = Counter()
    for tensor in stored.values():
        counts[tensor.kind] += prod(tensor.sizes)
    config.dtype = _DTYPES.get(max(counts, key=counts.__getitem__), torch.bfloat16)
    sources = _sources(config, stored, path)
    tensors = {key: _convert(key, parts, config) for key, parts in sources.items()}
    notes: list[str] = []
    written = read_tokenizer(params, config, notes) if companions else {}
    in_files = {key: [tensor for part in parts for tensor in part] for key, parts in sources.items()}
    modules = {key: key.rpartition(".")[0] for key in in_files if "_proj" in key}
    packed = {modules[key] for key in modules if any(tensor.kind not in PLAIN for tensor in in_files[key])}
    return Checkpoint(
        path,
        "gguf",
        config,
        check_model(config, tensors, str(path)),
        dict.fromkeys(stored.keys() & {_FACTORS}, "is in the configuration, as rope_parameters"),
        written,
        files,
        notes,
        # `inspect` finds a tensor's part of the model by its Hugging Face name.
        stored={f"{key} {tensor.origin}": tensor for key, parts in in_files.items() for tensor in parts},
        in_16_bit=names_in_16_bit(modules.values(), packed) if packed else (),
    )


def _sources(
    config: LlamoeBaseConfig, stored: Mapping[str, Tensor], path: Path
) -> dict[str, list[list[Tensor]]]:
    """Return the tensors of each weight, by its Hugging Face key; leave out weights that lack a tensor.

    A weight has one list of tensors, except for `gate_up_proj`, which has one for gate and one for up. A list has one
    tensor, except for experts with a tensor each.

    Raises:
        CheckpointError: a tensor belongs to no weight.
    """
    groups = {}
    for name, tensor in stored.items():
        match = _SINGLE.fullmatch(name)
        stacked, number = (f"{match[1]}_exps.weight", int(match[2])) if match else (name, 0)
        groups.setdefault(stacked, {})[number] = tensor
    architecture = MODEL_ARCH.LLAMA4 if isinstance(config, LlamoeTextConfig) else MODEL_ARCH.LLAMA
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    sources = {}
    for key in expected_shapes(config):
        module, _, name = key.rpartition(".")
        is_stack = module.endswith(".experts")
        parts = [f"{module}.{part}.weight" for part in PARTS_OF_STACKS[True][name]] if is_stack else [key]
        names_in_file = [names.get_name(part, (".weight", ".bias")) for part in parts]
        found = [groups.pop(name, {}) for name in names_in_file]
        # `check_model` reports missing weights.
        if all(found):
            sources[key] = [[group[number] for number in sorted(group)] for group in found]
    if unknown := sorted(groups.keys() - {_FACTORS}):
        raise CheckpointError(
            f"{path}: unknown tensor {listed(unknown)}: the checkpoint is of another architecture, or was changed."
        )
    return sources


def _convert(key: str, parts: list[list[Tensor]], config: LlamoeBaseConfig) -> LazyTensor:
    """View a weight from its tensors: dequantized, with the model's order of axes and rows."""
    first, module = parts[0][0], key.rpartition(".")[0]
    if module.endswith(".experts"):
        experts = [
            [{tensor.kind: tensor.row(number)} for tensor in tensors for number in range(tensor.shape[0])]
            if first.ndim == 3
            else [{tensor.kind: tensor} for tensor in tensors]
            for tensors in parts
        ]
        # `check_model` compares the number of experts with the configuration's, also if gate and up differ in it.
        matrices = zip(*experts, strict=False)
        sizes, is_input_first = first.sizes[-2:], isinstance(config, LlamoeTextConfig)
        return stack([PackedMatrix(_LAYOUT, each, sizes, config.dtype, is_input_first) for each in matrices])
    rows: LazyTensor = first
    heads = _HEADS.get(module.rpartition(".")[2])
    if heads and not config.rope_interleave:
        # In files the two channels of a rotated pair are neighbours, in the model they are half a head apart.
        rows = permute_pairs(first, getattr(config, heads), to_halves=True)
    if first.ndim == 1:
        return rows.cast(config.dtype)
    return PackedMatrix(_LAYOUT, [{first.kind: rows}], first.sizes, config.dtype)
