"""Read and write folders in Meta's format: LLaMA 1, 2 and 3, and Llama 4 with its vision tower.

tokenizer.model lies in the folder or in the folder above.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

from ...configuration import LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeVisionConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from ...configuration.sizes import count_of
from ..checkpoint import Checkpoint, Report, carry_out, check_model, tied_head
from ..consolidated import (
    KEPT,
    Files,
    Params,
    is_tuned,
    measure,
    naming,
    open_files,
    read_kept,
    read_tensors,
    weight_files,
)
from ..io import DEFAULTS, Plan, WriteOptions, are_equal, read_json, write_through
from ..tokenizers import hf_files_from_meta, looks_like_table, meta_tokenizer_file
from .name_tables import llama4_table, llama_table
from .params import (
    LARGEST_SENTENCEPIECE,
    LLAMA3_THETA,
    is_llama_32,
    needs_own_scaling,
    note_defaults,
    read_config,
    says_llama4,
    write_params,
)

# Bytes of the largest weight file, and the largest number of files, in Meta's releases before Llama 4.
_LARGEST_FILE, _MOST_FILES = 17.5e9, 8


def open_meta(
    folder: str | os.PathLike, *, companions: bool = True, instruct: bool | None = None
) -> Checkpoint:
    """Open a folder in Meta's format; for the arguments see `open_checkpoint`."""
    folder = Path(folder)
    paths = weight_files(folder, "pth")
    params = Params.of(read_json(folder / "params.json"), str(folder / "params.json"))
    files, dropped = open_files(paths)
    path = _find_tokenizer(folder)
    tokenizer = path and path.read_bytes()
    generation = _find_generation(params, files, tokenizer)
    is_tied = _head_is_embedding(params, files)
    params, axis = measure(params, files, str(paths[0]))
    params = _measure_feed_forwards(params, files)
    tuned = is_tuned(folder, instruct)
    with naming(params):
        config = read_config(params, generation, bool(tuned), is_tied)
        read_kept(config, folder)
    table = llama4_table(config) if generation == 4 else llama_table(axis)
    tensors, left_out = read_tensors(table, files, config, str(paths[0]))
    translated, notes = {}, note_defaults(params, config)
    if path is None or tokenizer is None:
        notes.append(
            f"there is no tokenizer.model in {folder} or above it: the result has no tokenizer. Add the file, and "
            "convert again"
        )
    elif companions:
        translated = hf_files_from_meta(tokenizer, config, instruct=tuned, origin=str(path))
    kind = "meta-llama4" if generation == 4 else "meta-llama"
    return Checkpoint(folder, kind, config, tensors, dropped | left_out, translated, paths, notes)


def _find_tokenizer(folder: Path) -> Path | None:
    """Find tokenizer.model in the folder or, as in the releases of LLaMA 1 and 2, in the folder above."""
    paths = (folder / "tokenizer.model", folder.absolute().parent / "tokenizer.model")
    return next((path for path in paths if path.is_file()), None)


def _find_generation(params: Params, files: Files, tokenizer: bytes | None) -> int:
    """Infer the generation of LLaMA, 1 to 4.

    Llama 4 has parameters and tensors of its own. Llama 3 has scaled rotary embeddings or a tiktoken tokenizer; without
    a tokenizer, a large vocabulary or Llama 3's rotary base shows it. LLaMA 1 stores rotary frequencies in each layer,
    Llama 2 once; if they were removed, norm_eps = 1e-6 shows LLaMA 1.
    """
    tensors = files[0]
    of_llama4 = re.compile(r"vision_embeddings\..*|.*(attention\.wqkv\.weight|feed_forward\.router_DE)")
    if says_llama4(params) or any(map(of_llama4.fullmatch, tensors)):
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


def _head_is_embedding(params: Params, files: Files) -> bool:
    """Return True for Llama 3.2 1B or 3B, which its sizes show, if its head equals the embedding or is not stored."""
    pairs = [(file.get("tok_embeddings.weight"), file.get("output.weight")) for file in files]
    return is_llama_32(params) and all(
        embedding is not None and (head is None or are_equal(embedding, head)) for embedding, head in pairs
    )


def _measure_feed_forwards(params: Params, files: Files) -> Params:
    """Add the inner sizes of feed-forwards, which tensors show, to the parameters."""
    first = files[0]

    def whole(suffix: str, axis: int) -> int | None:
        """Return an axis's size, summed over all files, for the first name with this suffix; None if there is none."""
        shapes = (tensor.shape for name, tensor in first.items() if name.endswith(suffix))
        return next((shape[axis] * len(files) for shape in shapes if len(shape) > axis), None)

    fused = whole("feed_forward.mlp.fc1_weight", 0)
    params = params.completed(hidden_dim=fused // 2 if fused else whole("feed_forward.w1.weight", 0))
    if experts := params.part("moe_args"):
        inner = whole("experts.moe_w_in_eD_F", 1) or whole("experts.w1", 2)
        params = params.completed(moe_args=experts.completed(hidden_dim=inner).entries)
    if vision := params.part("vision_args"):
        inner = whole("resblocks.0.mlp.c_fc.weight", 0)
        params = params.completed(vision_args=vision.completed(hidden_dim=inner).entries)
    return params


def save_meta(
    checkpoint: Checkpoint,
    target: str | os.PathLike,
    options: WriteOptions = DEFAULTS,
    *,
    shards: int | None = None,
) -> Report:
    """Write a checkpoint in Meta's format; for `shards` see `convert`.

    A dense model is written as Llama 3 if its tokenizer, vocabulary or rotary embedding is Llama 3's, else as Llama 2.
    A model of Llama 4's family is written as Llama 4.

    Raises:
        ValueError: Meta's format or code has no such model.
    """
    target, config = Path(target), checkpoint.config
    if isinstance(config, LlamoeVisionConfig):
        raise ValueError(f"{checkpoint.path}: is a vision tower alone, for which Meta has no format.")
    if isinstance(config, LlamoeMixtralConfig):
        raise ValueError(f"{checkpoint.path}: is a Mixtral, which Meta's code does not compute.")
    notes: list[str] = []
    tokenizer: dict[str, bytes] = {}
    try:
        tokenizer = meta_tokenizer_file(checkpoint.companions, config)
        if not tokenizer:
            notes.append("the source has no tokenizer: no tokenizer.model is written")
    # The weights are still useful without a tokenizer.
    except CheckpointError as error:
        notes.append(f"no tokenizer.model is written: {error}")
    generation = _generation_to_write(config, tokenizer.get("tokenizer.model"))
    params, kept = write_params(config, generation)
    embedding_axis = 0 if generation > 2 else 1
    tensors = check_model(config, checkpoint.tensors, str(checkpoint.path))
    for head, embedding in tied_head(config).items():
        tensors[head] = tensors[embedding]
        notes.append(
            "the embedding is also the output head (tie_word_embeddings), which Meta's format cannot say: "
            "output.weight is a copy of it"
        )
    if needs_own_scaling(params):
        notes.append(
            "Llama 3's own code scales rotary embeddings by 8 and 4 whatever params.json says; rope_scaling_factor and "
            "rope_high_freq_factor are written for other readers"
        )
    tensors = options.cast(tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    shards = _number_of_files(config, nbytes, shards)
    table = llama_table(embedding_axis) if generation < 4 else llama4_table(config, to_write=True)
    parts = write_through(table, tensors, shards, config)
    files = {f"consolidated.{number:02d}.pth": part for number, part in enumerate(parts)}
    last = {**({KEPT: to_json(kept)} if kept else {}), "params.json": to_json(params)}
    plan = Plan(files, before=tokenizer, last=last)
    report = carry_out(plan, checkpoint, target, "meta", options)
    report.notes.extend(notes)
    return report


def _generation_to_write(config: LlamoeBaseConfig, tokenizer: bytes | None) -> int:
    """Choose 2, 3 or 4; for a dense model by its tokenizer, or without one by vocabulary size and rotary base."""
    if not isinstance(config, LlamoeDenseConfig):
        return 4
    rope = config.rope_parameters or {}
    if rope.get("rope_type") == "llama3":
        # LLaMA 2's code has no rotary scaling.
        return 3
    if tokenizer is not None:
        return 3 if looks_like_table(tokenizer) else 2
    return 3 if config.vocab_size > LARGEST_SENTENCEPIECE or rope.get("rope_theta") == LLAMA3_THETA else 2


def _number_of_files(config: LlamoeBaseConfig, nbytes: int, shards: int | None) -> int:
    """Return the number of files: `shards`, or if it is None, as many as Meta's releases of that size have.

    Raises:
        ValueError: with `shards` files a file would not hold whole heads.
    """
    parts: list[Any] = [config.get_text_config(), *filter(None, [getattr(config, "vision_config", None)])]
    counts = [getattr(part, "num_key_value_heads", part.num_attention_heads) for part in parts]
    heads = math.gcd(*counts, *(part.num_attention_heads for part in parts))
    if shards is None:
        shards = 1
        while shards < _MOST_FILES and nbytes / shards > _LARGEST_FILE and heads % (2 * shards) == 0:
            shards *= 2
        return shards
    if heads % count_of("shards", shards):
        raise ValueError(
            f"shards = {shards}: a file of Meta's holds whole heads, so the number has to divide {heads}, the greatest "
            "common divisor of the numbers of heads."
        )
    return shards
