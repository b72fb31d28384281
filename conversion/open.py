"""Open a checkpoint of any format; its files show which format it has."""

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
from ..modeling.checkpoints import check_whole, find_weights
from .checkpoint import Checkpoint, take_part
from .clip import open_clip, open_open_clip, tower_companions, tower_kind
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
        path: a folder in Meta's format (params.json, consolidated.00.pth and so on), in Mistral AI's (params.json,
            consolidated.safetensors or .pth) or in Hugging Face's (config.json); a GGUF file; or a vision tower: a
            file of open_clip, or a folder of open_clip or CLIP. In a folder with both Mistral AI's and Hugging Face's
            files, the latter are read.
        companions: read the tokenizer and related files, too; converting Meta's takes seconds.
        instruct: for Meta's and Mistral AI's folders: whether the model was tuned for conversations; None decides by
            the folder's name.
        model: for a tower of open_clip: the architecture's name, as in `convert_vision`.

    Raises:
        CheckpointError: the path does not exist, has another format, is damaged, or was not fully written.
        ValueError: `model` is given for a checkpoint that describes itself, or missing for one that does not.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder.")
    check_whole(path)
    if path.suffix == ".gguf":
        try:
            from .gguf import open_gguf
        except ModuleNotFoundError as error:
            raise CheckpointError(
                f"{path}: a GGUF file needs a package ({error}): pip install 'llamoe[packed]'."
            ) from error
        return open_gguf(path, companions=companions)
    # Before Hugging Face's format, since folders of open_clip on the Hub also have a config.json, of timm.
    kind = tower_kind(path)
    if kind == "open_clip":
        return open_open_clip(path, model)
    if model is not None:
        raise ValueError(
            f"model = {model!r}: only a file of open_clip needs a name, and {path} is none. Leave it out."
        )
    if is_mistral(path):
        # Mistral AI's repositories often have Hugging Face's files, too, which are then read.
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
    """Open a vision tower of any format, or the tower of a multimodal model; for the arguments see `convert_vision`.

    The result's `companions` include preprocessor_config.json if the source says how pictures are prepared; for
    open_clip they always do, with its defaults.

    Raises:
        CheckpointError: the model has no tower, or for the reasons of `open_checkpoint`.
    """
    tower = open_checkpoint(path, companions=False, model=model)
    if isinstance(tower.config, LlamoeConfig):
        tower = take_part(tower, "vision_config", "not part of the tower")
        tower.config.architectures = ["LlamoeVisionModel"]
    if not isinstance(tower.config, LlamoeVisionConfig):
        raise CheckpointError(f"{path}: is no vision tower but {family_of(tower.config)}.")
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
    """Open the source of a conversion, after checking that the target can be written.

    Raises:
        CheckpointError: for the reasons of `open_checkpoint`, or for quantized weights unless `may_be_packed`.
    """
    check_apart(Path(source), Path(target))
    check_target(Path(target), resume)
    checkpoint = open_checkpoint(source, instruct=instruct)
    if not may_be_packed:
        check_unpacked(checkpoint)
    return checkpoint


def check_unpacked(checkpoint: Checkpoint) -> None:
    """Raise a `CheckpointError` if the weights are quantized."""
    if checkpoint.quantization is not None:
        raise CheckpointError(
            f"{checkpoint.path}: is quantized already ({in_words(checkpoint.quantization)}). Give the model before it "
            "was quantized, or convert this one to 16 bits first (llamoe convert)."
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
