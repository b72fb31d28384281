"""Join a decoder and a vision tower into one multimodal checkpoint, ready for training: `llamoe assemble`.

The result gives the decoder's logits for every text of the decoder's tokens, and the tower's features for every
picture. The adapter behind the tower (unless the tower has one) and the projector are new. New tokens' rows of the
embedding and the output head are the mean of the old rows.

Ids below the decoder's vocabulary size keep their meaning. If the embedding has more rows than the tokenizer has
tokens, unused tokens are added for these rows before the new tokens. So the embedding gets as many rows as the
tokenizer has tokens, and a tool that resizes the embedding to the tokenizer changes nothing.

A dense decoder is written as a Llama 4 decoder without mixture layers, which computes the same (see `upcycle`).
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..configuration import (
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeMixtralConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
)
from ..configuration.sizes import count_of
from .checkpoint import Checkpoint, Report, expected_shapes, take_part
from .clip import CLIP_MEAN, CLIP_STD, PROCESSOR, normalization, read_processor, resize
from .hf import save_hf
from .io import LazyTensor, Progress, WriteOptions, check_apart
from .open import family_of, open_source, open_tower
from .tokenizers import Vocabulary, extend_vocabulary, processor_files
from .upcycle import as_text_model, fresh, zeros

# Rows of the embedding that are summed at once.
_ROWS = 4096


def assemble(
    text: str | Path,
    vision: str | Path,
    target: str | Path,
    *,
    image_size: int | None = None,
    max_tiles: int = 16,
    model: str | None = None,
    seed: int = 0,
    layout: str | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: int | str = "5GB",
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Join a decoder and a vision tower into one multimodal checkpoint.

    The result loads with `AutoModelForImageTextToText` and `AutoProcessor`. Until it is trained, its answers about
    pictures are nonsense. Missing tokens for pictures and messages are added to the vocabulary.

    Args:
        text: a decoder with its tokenizer: a dense LLaMA, a mixture, or a multimodal model, whose decoder is used.
        vision: a tower of any format that `open_tower` reads, or a multimodal model, whose tower is used.
        target: the folder to write.
        image_size: side of a tile in pixels, a multiple of the tower's patch size; None keeps the tower's.
        max_tiles: largest number of tiles that a picture is cut into.
        model: the tower's architecture in open_clip, if its file does not describe it, as in `convert_vision`.
        seed: random seed of new adapter and projector, at least 0.
        layout, dtype, shard_size, resume, dry_run, progress: as in `WriteOptions`. With `dtype` None, all weights get
            the decoder's. The layout "stock" cannot express a model with a CLIP tower.

    Returns:
        a report, whose notes name the new weights.

    Raises:
        ValueError: `text` has no decoder or no tokenizer, `vision` has no tower, or sizes do not fit.
        CheckpointError: a missing or damaged file (also a ValueError).
    """
    options = WriteOptions(layout, dtype, shard_size, resume, dry_run, progress)
    count_of("seed", seed, 0)
    count_of("max_tiles", max_tiles)
    check_apart(Path(vision), Path(target))
    decoder = _open_decoder(text, target, resume)
    tower = open_tower(vision, model=model)
    if image_size is not None:
        tower = resize(tower, image_size)
    tower = _with_adapter(tower, decoder.config.hidden_size)
    vocabulary = extend_vocabulary(decoder.companions, decoder.config)
    whole = _join(decoder, tower, vocabulary, seed)
    pixels, note = _pixels(tower)
    whole.companions |= processor_files(whole.config, whole.companions, max_patches=max_tiles, **pixels)
    whole.notes.append(note)
    if dtype is None:
        options = replace(options, dtype=decoder.tensors["model.embed_tokens.weight"].dtype)
    identity = {"vision": str(vision), "image_size": image_size, "seed": seed}
    return save_hf(whole, target, options, identity=identity)


def _open_decoder(text: str | Path, target: str | Path, resume: bool) -> Checkpoint:
    """Open a decoder, or that of a multimodal model, as a decoder of Llama 4's family."""
    checkpoint = open_source(text, target, resume)
    config = checkpoint.config
    if isinstance(config, LlamoeVisionConfig):
        raise ValueError(
            f"assemble: {text} is a {family_of(config)}; give the decoder first (LLaMA or a mixture), then the tower."
        )
    is_windowed = isinstance(config, LlamoeDenseConfig) and "sliding_attention" in config.attention_types()
    if is_windowed or isinstance(config, LlamoeMixtralConfig):
        raise ValueError(
            f"assemble: {text} is a {config.stock_type()}; a multimodal decoder has no sliding window and no experts "
            "of Mixtral's. Give a dense LLaMA without a window, or a mixture of Llama 4's family."
        )
    if isinstance(config, LlamoeDenseConfig):
        return as_text_model(checkpoint)
    if isinstance(config, LlamoeConfig):
        reason = "belongs to the decoder's former tower"
        return take_part(checkpoint, "text_config", reason)
    assert isinstance(config, LlamoeTextConfig)
    return checkpoint


def _with_adapter(tower: Checkpoint, hidden_size: int) -> Checkpoint:
    """Configure an adapter for a tower that has none, and drop the tower's projection, which a decoder does not use.

    A new adapter has the decoder's hidden size, and merges two by two patches into one output, as Llama 4's does.
    """
    config = copy.deepcopy(tower.config)
    assert isinstance(config, LlamoeVisionConfig)
    if not config.use_adapter:
        config.projector_input_dim = config.projector_output_dim = hidden_size
        config.pixel_shuffle_ratio = 0.5
    config.vision_output_dim = config.projector_output_dim
    config.projection_dim = None
    config.vision_feature_select_strategy = "default"
    config.use_adapter = True
    config.validate()
    tensors = dict(tower.tensors)
    dropped = {f"{tower.path}: {key}": reason for key, reason in tower.dropped.items()}
    if tensors.pop("visual_projection.weight", None):
        reason = "projects the class token for CLIP's loss; the decoder reads the patches"
        dropped[f"{tower.path}: visual_projection.weight"] = reason
    return replace(tower, config=config, tensors=tensors, dropped=dropped)


def _join(decoder: Checkpoint, tower: Checkpoint, vocabulary: Vocabulary, seed: int) -> Checkpoint:
    """Join the tensors of decoder and tower under one configuration, and add the new weights."""
    text, vision = copy.deepcopy(decoder.config), copy.deepcopy(tower.config)
    assert isinstance(text, LlamoeTextConfig)
    assert isinstance(vision, LlamoeVisionConfig)
    before = text.vocab_size
    text.vocab_size = vocabulary.rows
    # The multimodal configuration sets these two fields for its parts.
    for part in (text, vision):
        part.architectures = part.dtype = None
    text.eos_token_id = json.loads(vocabulary.files["generation_config.json"])["eos_token_id"]
    text.pad_token_id = vocabulary.pad_token_id
    config = LlamoeConfig(
        text_config=text,
        vision_config=vision,
        boi_token_index=vocabulary.ids["<|image_start|>"],
        eoi_token_index=vocabulary.ids["<|image_end|>"],
        image_token_index=vocabulary.ids["<|patch|>"],
        tie_word_embeddings=text.tie_word_embeddings,
    )
    config.check_multimodal()
    dtype = decoder.tensors["model.embed_tokens.weight"].dtype
    tensors = {f"vision_model.{key}": tensor.cast(dtype) for key, tensor in tower.tensors.items()}
    for key, tensor in decoder.tensors.items():
        if key in ("model.embed_tokens.weight", "lm_head.weight"):
            tensor = _lengthen(tensor, min(before, vocabulary.known), vocabulary.rows)
        tensors[f"language_model.{key}"] = tensor
    missing = {key: shape for key, shape in expected_shapes(config).items() if key not in tensors}
    for key, shape in missing.items():
        assert key.startswith(("vision_model.vision_adapter.", "multi_modal_projector.")), key
        std = (vision if key.startswith("vision_model.") else text).initializer_range
        is_bias = key.endswith("bias")
        tensors[key] = zeros(shape, dtype, key) if is_bias else fresh(shape, dtype, std, seed, key)
    companions = dict(vocabulary.files)
    for name, content in tower.companions.items():
        # All other files of the tower are licences.
        if name != PROCESSOR:
            companions[f"vision_{name}" if companions.get(name, content) != content else name] = content
    notes = [
        *decoder.notes,
        *tower.notes,
        f"the tower is that of {tower.path}",
        f"fresh (normal, deviation initializer_range, seed {seed}): {', '.join(missing)}",
        *vocabulary.notes,
    ]
    return replace(
        decoder,
        config=config,
        tensors=tensors,
        dropped={**decoder.dropped, **tower.dropped},
        companions=companions,
        sources=[*decoder.sources, *tower.sources],
        notes=notes,
    )


def _lengthen(matrix: LazyTensor, known: int, rows: int) -> LazyTensor:
    """View a matrix extended to `rows` rows, each new one the mean of the first `known` rows."""
    before, width = matrix.shape
    if rows <= before:
        return matrix

    def lengthen(old: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(width, dtype=torch.float64)
        for start in range(0, known, _ROWS):
            total += old[start : min(start + _ROWS, known)].double().sum(0)
        new = torch.empty(rows, width, dtype=old.dtype)
        new[:before] = old
        new[before:] = (total / known).to(old.dtype)
        return new

    return matrix.map(lengthen, (rows, width))


def _pixels(tower: Checkpoint) -> tuple[dict[str, Any], str]:
    """Choose arguments of `processor_files` for the tower's pixels; return them and a note about their source."""
    processor = read_processor(tower)
    if processor is not None:
        mean, std = normalization(processor)
        resample = processor.get("resample")
        chosen = {"image_mean": mean, "image_std": std, "resample": 3 if resample is None else resample}
        return chosen, "pixels are normalized as the tower's source says"
    if tower.config.use_rope:
        return {}, "pixels are normalized as for Llama 4"
    note = f"{tower.path} does not say how its pixels are normalized: CLIP's mean and deviation were taken"
    return {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "resample": 3}, note
