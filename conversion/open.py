"""Opens a checkpoint of any format; the format is recognised by its files."""

import os
from dataclasses import replace
from pathlib import Path

from ..configuration import (
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeMixtralConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
)
from ..configuration.base import LlamoeBaseConfig
from ..configuration.errors import CheckpointError
from ..modeling.checkpoints import find_weights
from .checkpoint import Checkpoint, check_source, take_part
from .clip import open_clip, open_open_clip, tower_companions, tower_kind
from .gguf import open_gguf
from .hf import in_words, open_hf
from .io import check_apart, check_target
from .meta import open_meta
from .mistral import is_mistral, open_mistral


def open_checkpoint(
    path: str | os.PathLike,
    *,
    companions: bool = True,
    instruct: bool | None = None,
    model: str | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format that llamoe supports.

    Args:
        path: a folder in Meta's format (params.json, consolidated.00.pth), Mistral AI's (params.json, one
            consolidated.safetensors or .pth) or Hugging Face's (config.json), or a vision tower of open_clip or CLIP,
            which may be a single file, or a GGUF file. Of a folder in both Mistral AI's and Hugging Face's format
            the latter is read.
        companions: whether to read the tokenizer and related files; converting Meta's takes seconds.
        instruct: for Meta's and Mistral AI's folders, whether the model was tuned for conversations; None goes by the
            folder's name.
        model: for open_clip, the architecture's name, as in `convert_vision`.

    Raises:
        CheckpointError: the path does not exist, has another format, is damaged, or is an unfinished target.
        ValueError: a model is given for a checkpoint that describes itself, or is missing.
    """
    path = Path(path)
    check_source(path)
    if path.suffix == ".gguf":
        return open_gguf(path, companions=companions)
    # Tested before Hugging Face's format: folders of open_clip on the Hub have timm's config.json, too.
    kind = tower_kind(path)
    if kind == "open_clip":
        return open_open_clip(path, model)
    if model is not None:
        raise ValueError(f"model = {model!r}: {path} is not an open_clip checkpoint, and describes itself.")
    if is_mistral(path):
        # Mistral AI's repositories have Hugging Face's files, too.
        if not (path / "config.json").is_file() or find_weights(path) is None:
            return open_mistral(path, companions=companions, instruct=instruct)
    elif (path / "params.json").is_file() or any(path.glob("consolidated*.pth")):
        return open_meta(path, companions=companions, instruct=instruct)
    if kind == "clip":
        return open_clip(path)
    if (path / "config.json").is_file():
        return open_hf(path, companions=companions)
    raise CheckpointError(
        f"{path}: unrecognised checkpoint format; expected one of: params.json with consolidated.00.pth (Meta) or "
        "consolidated.safetensors (Mistral AI), config.json (Hugging Face), open_clip_model.safetensors, "
        "a file of GGUF (llama.cpp)."
    )


def open_tower(path: str | os.PathLike, *, model: str | None = None) -> Checkpoint:
    """Open a vision tower of any format, or that of a multimodal model; for the arguments see `convert_vision`.

    `companions` of the result hold preprocessor_config.json if the source says how pictures are prepared, and always
    for a source of open_clip, which has defaults.

    Raises:
        CheckpointError: beside the reasons of `open_checkpoint`, there is no tower.
    """
    tower = open_checkpoint(path, companions=False, model=model)
    if isinstance(tower.config, LlamoeConfig):
        tower = take_part(tower, "vision_config", "not part of the tower")
        tower.config.architectures = ["LlamoeVisionModel"]
    if not isinstance(tower.config, LlamoeVisionConfig):
        raise CheckpointError(f"{path}: is no vision tower, but {family_of(tower.config)}.")
    if tower.kind in ("open_clip", "clip"):
        return tower
    return replace(tower, companions=tower_companions(Path(path)))


def open_source(
    source: str | os.PathLike,
    target: str | os.PathLike,
    resume: bool,
    *,
    instruct: bool | None = None,
    may_be_packed: bool = False,
) -> Checkpoint:
    """Open the source of a conversion, after checking that the target is not in use.

    Raises:
        CheckpointError: beside the reasons of `open_checkpoint`, quantized weights where the result should be made of
            the original ones.
    """
    check_apart(Path(source), Path(target))
    check_target(Path(target), resume)
    checkpoint = open_checkpoint(source, instruct=instruct)
    if not may_be_packed:
        check_unpacked(checkpoint)
    return checkpoint


def check_unpacked(checkpoint: Checkpoint) -> None:
    """Refuse quantized weights with a `CheckpointError`."""
    if checkpoint.quantization is not None:
        raise CheckpointError(
            f"{checkpoint.path}: is quantized already ({in_words(checkpoint.quantization)}). Give the weights that it "
            "was made of, or what `llamoe convert` makes of it in 16 bit."
        )


def family_of(config: LlamoeBaseConfig) -> str:
    """Name the kind of model that a configuration describes."""
    if isinstance(config, LlamoeDenseConfig):
        return "LLaMA 1, 2, 3 or Mistral (dense decoder)"
    if isinstance(config, LlamoeMixtralConfig):
        return "Mixtral (mixture of experts)"
    if isinstance(config, LlamoeTextConfig):
        return "Llama 4 text (mixture of experts)" if config.moe_layers else "Llama 4 text (no experts)"
    if isinstance(config, LlamoeConfig):
        return "Llama 4 multimodal (tower, projector, decoder)"
    return "vision tower of Llama 4" if config.use_rope or config.use_adapter else "vision tower of CLIP"
