"""Open a GGUF file: its tensors under stock Hugging Face keys, its configuration and its tokenizer."""

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from ...configuration import LlamoeTextConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...modeling.quantization import names_in_16_bit
from ..checkpoint import Checkpoint, check_model
from ..consolidated import Params, naming
from ..io import Drop, Operation, PackedMatrix, Row, Table, permute_pairs, read_through, sources_of, stack
from .blocks import PLAIN, GgufLayout
from .configuration import read_config
from .header import Tensor, read_header, without_part
from .tokenizer import read_tokenizer

_DTYPES = {"F32": torch.float32, "F16": torch.float16}
_LAYOUT = GgufLayout()


class _Matrix(Operation):
    """A matrix or vector; LLaMA's q and k rows are permuted from neighbouring pairs to rotated halves."""

    def __init__(self, heads: str | None = None):
        self.heads = heads

    def forward(self, parts, axis, sizes):
        tensor = stored = parts[0][0]
        if self.heads is not None and not sizes.rope_interleave:
            stored = permute_pairs(tensor, getattr(sizes, self.heads), to_halves=True)
        if tensor.ndim == 1:
            return [stored.cast(sizes.dtype)]
        return [PackedMatrix(_LAYOUT, [{tensor.kind: stored}], tensor.sizes, sizes.dtype)]


class _Experts(Operation):
    """A stack of experts, in one file, or as matrices in a "file" for each expert (`_by_expert`).

    Gate and up may be two tensors.
    """

    def forward(self, parts, axis, sizes):
        matrices = [
            [{tensor.kind: tensor.row(number)} for tensor in files for number in range(tensor.shape[0])]
            if files[0].ndim == 3
            else [{tensor.kind: tensor} for tensor in files]
            for files in parts
        ]
        shape, is_input_first = parts[0][0].sizes[-2:], isinstance(sizes, LlamoeTextConfig)
        # `check_model` compares the number of experts with the configuration's.
        experts = zip(*matrices, strict=False)
        return [stack([PackedMatrix(_LAYOUT, each, shape, sizes.dtype, is_input_first) for each in experts])]


# The first files of Mixtral have a tensor for each expert.
_SINGLE = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight")
_BLK, _LAYER = "blk.{i}.", "model.layers.{i}."
_ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def _table(config: LlamoeBaseConfig) -> Table:
    """Return the names of an architecture's tensors; a feed-forward is `mlp`, or `feed_forward` in Llama 4."""
    is_llama4 = isinstance(config, LlamoeTextConfig)
    mlp = _LAYER + ("feed_forward." if is_llama4 else "mlp.")
    experts = f"{mlp}experts."
    linears = {
        "attn_q": f"{_LAYER}self_attn.q_proj",
        "attn_k": f"{_LAYER}self_attn.k_proj",
        "attn_v": f"{_LAYER}self_attn.v_proj",
        "attn_output": f"{_LAYER}self_attn.o_proj",
        **{f"ffn_{part}": f"{mlp}{part}_proj" for part in ("gate", "up", "down")},
        **{f"ffn_{part}_shexp": f"{mlp}shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        "ffn_gate_inp": mlp + ("router" if is_llama4 else "gate"),
    }
    return (
        Row("token_embd.weight", "model.embed_tokens.weight", _Matrix()),
        Row("output_norm.weight", "model.norm.weight", _Matrix()),
        Row("output.weight", "lm_head.weight", _Matrix()),
        Row(f"{_BLK}attn_norm.weight", f"{_LAYER}input_layernorm.weight", _Matrix()),
        Row(f"{_BLK}ffn_norm.weight", f"{_LAYER}post_attention_layernorm.weight", _Matrix()),
        *(
            Row(f"{_BLK}{name}.{kind}", f"{target}.{kind}", _Matrix(_ROTATED.get(name)))
            for name, target in linears.items()
            for kind in ("weight", "bias")
        ),
        Row(
            (f"{_BLK}ffn_gate_exps.weight", f"{_BLK}ffn_up_exps.weight"), f"{experts}gate_up_proj", _Experts()
        ),
        Row(f"{_BLK}ffn_gate_up_exps.weight", f"{experts}gate_up_proj", _Experts()),
        Row(f"{_BLK}ffn_down_exps.weight", f"{experts}down_proj", _Experts()),
        Drop("rope_freqs.weight", "is in the configuration, as rope_parameters"),
    )


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a folder with some and without config.json."""
    if path.is_dir():
        return not (path / "config.json").is_file() and any(path.glob("*.gguf"))
    return path.suffix == ".gguf"


def open_gguf(path: Path, *, companions: bool = True) -> Checkpoint:
    """Open a GGUF file, one of the parts of a split one, or a folder with one; see `open_checkpoint`.

    Numbers are read in float32 or float16 where most are stored so, else in bfloat16.

    Raises:
        CheckpointError: a file is missing or damaged, or of another architecture; tensors are missing, unknown, or
            contradict the keys.
    """
    if path.is_dir():
        files = sorted(file for file in path.glob("*.gguf") if not file.stem.startswith("mmproj"))
        if len({without_part(file.name) for file in files}) != 1:
            raise CheckpointError(
                f"{path}: has {len(files)} GGUF files; name the one to read, or the first part of it."
            )
        path = files[0]
    keys, stored, files = read_header(path)
    params = Params(keys, str(files[0]))
    with naming(params):
        config = read_config(params, stored)
    counts = Counter()
    for tensor in stored.values():
        counts[tensor.kind] += prod(tensor.sizes)
    types = counts.most_common()
    config.dtype = _DTYPES.get(types[0][0], torch.bfloat16)
    table = _table(config)
    tensors, dropped = read_through(table, _by_expert(stored), config)
    tensors = check_model(config, tensors, str(path), lambda name: sources_of(table, name) or [name])
    notes = [f"types of blocks, by numbers: {', '.join(f'{kind} {count:,}' for kind, count in types)}"]
    written = read_tokenizer(params, config, notes) if companions else {}
    targets = {name: target for target in tensors for name in sources_of(table, target)}
    of_files = {name: targets.get(_SINGLE.sub(r"\1_exps.weight", name), "") for name in stored}
    packed = {
        of_files[name].rpartition(".")[0] for name, tensor in stored.items() if tensor.kind not in PLAIN
    }
    linears = [*dict.fromkeys(target.rpartition(".")[0] for target in tensors if "_proj" in target)]
    return Checkpoint(
        path,
        "gguf",
        config,
        tensors,
        dropped,
        written,
        files,
        notes,
        # `inspect` finds a tensor's part of the model by its Hugging Face name, and shows its name in the file.
        stored={f"{of_files[name]} {name}": tensor for name, tensor in stored.items()},
        in_16_bit=names_in_16_bit(linears, packed.intersection(linears)) if packed else (),
    )


def _by_expert(stored: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split tensors that hold one expert into a "file" for each expert, which has all other tensors, too.

    Tensors of one expert get the names of stacks.
    """
    others: dict[str, Tensor] = {}
    experts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        if match := _SINGLE.fullmatch(name):
            experts.setdefault(int(match[2]), {})[f"{match[1]}_exps.weight"] = tensor
        else:
            others[name] = tensor
    return [{**others, **experts[number]} for number in sorted(experts)] or [others]
