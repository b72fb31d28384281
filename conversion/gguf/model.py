"""Opens a GGUF file: its tensors under stock Hugging Face keys, its configuration and its tokenizer."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from ...configuration import LlamoeTextConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...modeling.quantization import names_in_16_bit
from ..checkpoint import Checkpoint, check_model
from ..consolidated import naming
from ..io import Drop, LazyTensor, Operation, Row, Table, permute_pairs, read_through, sources_of, stack
from .blocks import Blocks, Matrix
from .configuration import read_config
from .header import Tensor, read_header
from .tokenizer import read_tokenizer

_DTYPES = {"F32": torch.float32, "F16": torch.float16}


class _Linear(Operation):
    """A linear layer; LLaMA's q and k rows are permuted from neighbouring pairs to rotated halves."""

    def __init__(self, heads: str | None = None):
        self.heads = heads

    def convert(self, tensors, sizes):
        [tensor] = tensors
        if self.heads is not None and not sizes.rope_interleave:
            heads = getattr(sizes, self.heads)
            if isinstance(tensor, Blocks):
                tensor = tensor.with_rows(lambda stored: permute_pairs(stored, heads, to_halves=True))
            else:
                tensor = permute_pairs(tensor, heads, to_halves=True)
        return [Matrix([tensor]) if tensor.ndim == 2 else tensor]


class _Experts(Operation):
    """A stack of experts; gate and up may be two tensors."""

    def convert(self, tensors, sizes):
        if {(tensor.ndim, *tensor.shape[:1]) for tensor in tensors} != {(3, sizes.num_local_experts)}:
            raise CheckpointError(
                f"{tensors[0].origin}: has shape {list(tensors[0].shape)}; expected: "
                f"{sizes.num_local_experts} matrices."
            )
        is_input_first = isinstance(sizes, LlamoeTextConfig)
        rows = range(sizes.num_local_experts)
        return [stack([Matrix([tensor.row(i) for tensor in tensors], is_input_first) for i in rows])]


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
        Row("token_embd.weight", "model.embed_tokens.weight"),
        Row("output_norm.weight", "model.norm.weight"),
        Row("output.weight", "lm_head.weight"),
        Row(f"{_BLK}attn_norm.weight", f"{_LAYER}input_layernorm.weight"),
        Row(f"{_BLK}ffn_norm.weight", f"{_LAYER}post_attention_layernorm.weight"),
        *(
            Row(f"{_BLK}{name}.{kind}", f"{target}.{kind}", _Linear(_ROTATED.get(name)))
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
        others = [
            file.name for file in files[1:] if file.name.split("-00")[0] != files[0].name.split("-00")[0]
        ]
        if not files or others:
            raise CheckpointError(
                f"{path}: has {len(files)} GGUF files; name the one to read, or the first part of it."
            )
        path = files[0]
    params, stored, files = read_header(path)
    with naming(params):
        config = read_config(params, stored)
    counts = Counter()
    for tensor in stored.values():
        counts[tensor.kind.name] += tensor.numbers
    config.dtype = _DTYPES.get(max(counts, key=counts.__getitem__), torch.bfloat16)
    table = _table(config)
    tensors, dropped = read_through(table, [_with_stacks(stored, config.dtype)], config)
    tensors = check_model(config, tensors, str(path))
    notes = [
        f"types of blocks, by numbers: {', '.join(f'{kind} {count:,}' for kind, count in counts.most_common())}"
    ]
    written = read_tokenizer(params, config, notes) if companions else {}
    targets = {name: target for target in tensors for name in sources_of(table, target)}
    of_files = {name: targets.get(_SINGLE.sub(r"\1_exps.weight", name), "") for name in stored}
    packed = {of_files[name].rpartition(".")[0] for name, tensor in stored.items() if not tensor.is_plain}
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


def _with_stacks(stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, LazyTensor]:
    """View all tensors dequantized, and single experts as stacks."""
    tensors: dict[str, LazyTensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in stored.items():
        if match := _SINGLE.fullmatch(name):
            experts.setdefault(f"{match[1]}_exps.weight", {})[int(match[2])] = tensor
        else:
            tensors[name] = tensor.read_as(dtype)
    for name, group in experts.items():
        ordered = [tensor for _, tensor in sorted(group.items())]
        if len({(tensor.kind, tensor.shape) for tensor in ordered}) > 1 or max(group) >= len(group):
            raise CheckpointError(
                f"{ordered[0].origin}: another expert's tensor is missing, or of another type or shape."
            )
        whole = stack(ordered)
        tensors[name] = whole.cast(dtype) if ordered[0].is_plain else Blocks(whole, ordered[0].kind, dtype)
    return tensors
