"""What the files of a Meta folder show: the weight files, the LLaMA generation and the sizes.

A size that a tensor shows is not taken from params.json. Where the two differ, the error names both.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ...configuration.errors import CheckpointError
from ..io import LazyTensor
from ..tokenizers import looks_like_table
from .params_to_config import LARGEST_SENTENCEPIECE, LLAMA3_THETA, Params, Seen, says_llama4

_SCALES = re.compile(r"(fp8|int4)_scales.*")


def weight_files(folder: Path, ending: str = "pth") -> list[Path]:
    """The weight files, sorted by number: consolidated.00.pth and so on, or one consolidated.pth."""
    pattern = re.compile(rf"consolidated(?:\.(\d+))?\.{ending}")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if "params.json" not in names:
        raise CheckpointError(f"{folder}: holds no params.json, which belongs to consolidated weights.")
    for name in names:
        if match := _SCALES.fullmatch(name):
            raise CheckpointError(
                f"{folder / name}: belongs to a release quantized to {match[1]}, which is not converted. Get the "
                "bfloat16 weights."
            )
    numbers = [(int(match[1]), name) for name in names if (match := pattern.fullmatch(name)) and match[1]]
    numbered = dict(numbers)
    if f"consolidated.{ending}" in names:
        if numbered:
            raise CheckpointError(
                f"{folder}: holds consolidated.{ending} and {numbered[min(numbered)]}. Remove what is not the model."
            )
        return [folder / f"consolidated.{ending}"]
    if not numbered:
        raise CheckpointError(f"{folder}: holds params.json, but no consolidated.00.{ending}.")
    width = len(next(iter(numbered.values()))) - len(f"consolidated..{ending}")
    gaps = (n for n in range(max(numbered)) if n not in numbered)
    missing = [f"consolidated.{n:0{width}d}.{ending}" for n in islice(gaps, 3)]
    if missing:
        raise CheckpointError(f"{folder}: {', '.join(missing)} missing; there is {numbered[max(numbered)]}.")
    if len(numbered) != len(numbers):
        raise CheckpointError(
            f"{folder}: a file of weights is there twice: {', '.join(filter(pattern.fullmatch, names))}."
        )
    return [folder / name for _, name in sorted(numbers)]


def find_generation(
    params: Params, files: Sequence[Mapping[str, LazyTensor]], tokenizer: bytes | None
) -> int:
    """The LLaMA generation, 1 to 4.

    Parameters and names identify Llama 4. Llama 3 has scaled rotary embeddings or a tiktoken tokenizer; without a
    tokenizer, a large vocabulary or Llama 3's rotary base counts. LLaMA 1 stores rotary frequencies in each layer,
    Llama 2 once. Where they were removed, norms of 1e-6 mean LLaMA 1, whose smaller sizes have it.
    """
    tensors = files[0]
    if says_llama4(params) or any(
        name.endswith(("attention.wqkv.weight", "feed_forward.router_DE"))
        or name.startswith("vision_embeddings.")
        for name in tensors
    ):
        return 4
    if params.flag("use_scaled_rope"):
        return 3
    output = tensors.get("output.weight")
    if tokenizer is not None:
        is_llama3 = looks_like_table(tokenizer)
    else:
        is_large = output is not None and output.ndim and output.shape[0] * len(files) > LARGEST_SENTENCEPIECE
        is_llama3 = is_large or params.entries.get("rope_theta") == LLAMA3_THETA
    if is_llama3:
        return 3
    if any(name.endswith("inner_attention.rope.freqs") for name in tensors):
        return 1
    if "rope.freqs" in tensors or "rope_theta" in params or "n_kv_heads" in params:
        return 2
    return 1 if params.number("norm_eps", 1e-5) == 1e-6 else 2


class _Measures:
    """Shapes of a folder's tensors, whole and in each file."""

    def __init__(self, params: Params, files: Sequence[Mapping[str, LazyTensor]]):
        self.params, self.first, self.count = params, files[0], len(files)

    def get(self, name: str, ndim: int) -> LazyTensor:
        """The first file's tensor of that name."""
        tensor = self.first.get(name)
        if tensor is None:
            origin = next((tensor.origin for tensor in self.first.values()), self.params.origin)
            raise CheckpointError(f"{origin.rpartition(': ')[0] or origin}: {name} missing.")
        if tensor.ndim != ndim:
            raise CheckpointError(f"{tensor.origin} has shape {list(tensor.shape)}; expected: {ndim} axes.")
        return tensor

    def whole(self, suffix: str, axis: int, ndim: int = 2) -> int | None:
        """Size over all files of an axis of the first tensor whose name has this suffix; None if there is none."""
        found = [name for name in self.first if name.endswith(suffix)]
        return self.get(found[0], ndim).shape[axis] * self.count if found else None

    def in_all(self, tensor: LazyTensor, axis: int) -> str:
        """The size of an axis in each file and in all, for messages."""
        size, what = tensor.shape[axis], ("rows", "columns")[axis]
        return f"{tensor.origin} has {size} {what} in {self.count} file(s), {size * self.count} in all, but"

    def check_rows(self, name: str, heads: str) -> None:
        """Compare the rows of the first layer's projection with params.json's number of heads."""
        if name not in self.first:
            return
        head_dim = _head_dim(self.params)
        count = sum(self.params.integer(part, self.params.integer("n_heads")) for part in heads.split())
        tensor = self.get(name, 2)
        if tensor.shape[0] * self.count != count * head_dim:
            raise CheckpointError(
                f"{self.in_all(tensor, 0)} {' + '.join(heads.split())} = {count} heads of {head_dim} "
                f"({self.params.origin}) need {count * head_dim}. A file is missing, or params.json is another model's."
            )


def _head_dim(params: Params) -> int:
    return params.integer("head_dim", params.integer("dim") // params.integer("n_heads") or 1)


def measure(
    params: Params, files: Sequence[Mapping[str, LazyTensor]], generation: int, is_tied: bool
) -> tuple[Params, Seen, int]:
    """Read sizes off the tensors and compare them with params.json; of a tied head there may be none.

    Returns:
        the parameters, completed from the tensors; the sizes; and the axis along which files slice the embedding.
    """
    if is_tied and (embedding := files[0].get("tok_embeddings.weight")) is not None:
        files = [{"output.weight": embedding, **files[0]}, *files[1:]]
    see = _Measures(params, files)
    dim, count = params.integer("dim"), len(files)
    norm = see.get("norm.weight", 1)
    if norm.shape[0] != dim:
        raise CheckpointError(
            f"{norm.origin} has {norm.shape[0]} elements, but {params.origin} says dim = {dim}."
        )
    layers = {int(match[1]) for name in see.first if (match := re.match(r"layers\.(\d+)\.", name))}
    if len(layers) != params.integer("n_layers") or layers != set(range(len(layers))):
        shown = f"{len(layers)} layers, up to {max(layers)}" if layers else "none"
        raise CheckpointError(
            f"{norm.origin.rpartition(': ')[0]}: holds {shown}, but {params.origin} says n_layers = "
            f"{params.integer('n_layers')}."
        )
    vocab_size, axis = _measure_embedding(see, dim, generation)
    kv_heads = params.integer("n_kv_heads", params.integer("n_heads"))
    for name in ("n_heads", "n_kv_heads"):
        if (heads := params.integer(name, kv_heads)) % count:
            raise CheckpointError(
                f"{params.origin}: {name} = {heads} cannot be divided by the {count} files; each holds whole heads. A "
                "file is missing or too many, or params.json is another model's."
            )
    see.check_rows("layers.0.attention.wq.weight", "n_heads")
    see.check_rows("layers.0.attention.wk.weight", "n_kv_heads")
    see.check_rows("layers.0.attention.wqkv.weight", "n_heads n_kv_heads n_kv_heads")
    for name, tensor in see.first.items():
        if name.endswith("rope.freqs") and tensor.ndim == 1 and 2 * tensor.shape[0] != _head_dim(params):
            raise CheckpointError(
                f"{tensor.origin} has {tensor.shape[0]} frequencies, half of a head's channels, but {params.origin} "
                f"says n_heads = {params.integer('n_heads')}, heads of {_head_dim(params)}."
            )
    inner = see.whole("feed_forward.w1.weight", 0)
    if fused := see.whole("feed_forward.mlp.fc1_weight", 0):
        inner = fused // 2
    seen = Seen(
        generation,
        vocab_size,
        inner=inner,
        expert_inner=see.whole("experts.moe_w_in_eD_F", 1) or see.whole("experts.w1", 2, ndim=3),
        vision_inner=see.whole("resblocks.0.mlp.c_fc.weight", 0),
        dtype=norm.dtype_name,
    )
    return (_check_parts_of_llama4(see) if generation == 4 else params), seen, axis


def _measure_embedding(see: _Measures, dim: int, generation: int) -> tuple[int, int]:
    """Rows of the embedding, and the axis along which files slice it: rows in Llama 3 and 4, columns before."""
    embedding, output = see.get("tok_embeddings.weight", 2), see.get("output.weight", 2)
    rows, columns = embedding.shape
    if columns == dim:
        vocab_size, axis = rows * see.count, 0 if see.count > 1 or generation > 2 else 1
    elif columns * see.count == dim and generation < 4:
        vocab_size, axis = rows, 1
    else:
        raise CheckpointError(
            f"{see.in_all(embedding, 1)} {see.params.origin} says dim = {dim}. A file is missing or too many, or "
            "params.json is another model's."
        )
    if output.shape[0] * see.count != vocab_size:
        raise CheckpointError(f"{see.in_all(output, 0)} {embedding.origin} gives {vocab_size} tokens.")
    return vocab_size, axis


def _check_parts_of_llama4(see: _Measures) -> Params:
    """Compare mixture layers, experts and tower with params.json; replace an expert count of -1."""
    params, origin = see.params, next(iter(see.first.values())).origin.rpartition(": ")[0]
    routers = {
        int(match[1]): name
        for name in see.first
        if (match := re.fullmatch(r"layers\.(\d+)\.feed_forward\.router_DE", name))
    }
    experts = params.part("moe_args")
    if experts is None:
        if routers:
            raise CheckpointError(
                f"{origin}: {next(iter(routers.values()))} is there, but {params.origin} has no moe_args."
            )
    else:
        step, count = experts.integer("interleave_moe_layer_step", 1), params.integer("n_layers")
        expected = list(range(step - 1, count, step))
        if sorted(routers) != expected:
            raise CheckpointError(
                f"{origin}: layers {sorted(routers)} have a router, but {params.origin} says moe_args."
                f"interleave_moe_layer_step = {step}, which means layers {expected}."
            )
        for name in routers.values():
            router = see.get(name, 2)
            if experts.entries.get("num_experts", -1) == -1:
                experts = replace(experts, entries={**experts.entries, "num_experts": router.shape[1]})
            if router.shape[1] != experts.integer("num_experts"):
                raise CheckpointError(
                    f"{router.origin} has {router.shape[1]} columns, but {params.origin} says moe_args.num_experts = "
                    f"{experts.integer('num_experts')}."
                )
        params = replace(params, entries={**params.entries, "moe_args": experts.entries})
    tower = [name for name in see.first if name.startswith(("vision_embeddings.", "vision_projection."))]
    if bool(tower) != (params.part("vision_args") is not None):
        has, lacks = (tower[0], "vision_args") if tower else ("vision_args", "vision_embeddings")
        raise CheckpointError(
            f"{origin} and {params.origin}: {has} is there, but no {lacks}. A tower has both tensors and parameters."
        )
    return params
