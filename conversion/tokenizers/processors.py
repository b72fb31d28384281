"""Make the processor's files of a multimodal folder.

The processor is transformers' `Llama4Processor`, so the files also load without llamoe. It cuts a picture into tiles of
the tower's size, and writes a `<|patch|>` token for each output of the tower's adapter.
"""

import json
from collections.abc import Mapping, Sequence

from ...configuration import LlamoeConfig
from ...configuration.errors import CheckpointError
from ...configuration.hub import MODULE_NAME, entries_of_others
from ...configuration.json_files import to_json

# Tokens that Llama4Processor writes for a picture.
IMAGE_TOKENS = (
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image|>",
    "<|patch|>",
)


def processor_files(
    config: LlamoeConfig,
    tokenizer_files: Mapping[str, bytes],
    *,
    image_mean: Sequence[float] = (0.5, 0.5, 0.5),
    image_std: Sequence[float] = (0.5, 0.5, 0.5),
    resample: int = 2,
    max_patches: int = 16,
) -> dict[str, bytes]:
    """Make the processor's files for a model, by name: processor_config.json and tokenizer_config.json.

    Args:
        config: the model's configuration.
        tokenizer_files: the folder's tokenizer.json, whose image tokens are compared with the configuration, and its
            tokenizer_config.json, to which the processor's name is added.
        image_mean, image_std: mean and standard deviation of pixels between 0 and 1, a number for each color channel.
        resample: PIL's number of the resampling filter: 2 is bilinear, 3 bicubic.
        max_patches: most tiles that a picture is cut into, besides the tile of the whole picture.

    Raises:
        CheckpointError: the tokenizer lacks a token that the processor writes, or has another id for it than `config`.
        ValueError: the parts of `config` do not fit together.
    """
    config.check_multimodal()
    vision = config.vision_config
    side = {"height": vision.image_size, "width": vision.image_size}
    content = {
        "processor_class": "Llama4Processor",
        "patch_size": vision.patch_size,
        "pixel_shuffle_ratio": vision.pixel_shuffle_ratio,
        "image_token": "<|image|>",
        "fake_image_token": "<|image|>",
        "image_processor": {
            "image_processor_type": "Llama4ImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": side,
            "resample": resample,
            "max_patches": max_patches,
            "resize_to_max_canvas": False,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(image_mean),
            "image_std": list(image_std),
        },
    }
    _check_tokens(config, tokenizer_files)
    settings = json.loads(tokenizer_files.get("tokenizer_config.json", b"{}"))
    # The processor writes special tokens as text, so the tokenizer must not split them.
    settings.pop("split_special_tokens", None)
    settings |= {"processor_class": "Llama4Processor", "padding_side": "left"}
    return {"processor_config.json": to_json(content), "tokenizer_config.json": to_json(settings)}


def processor_of_layout(companions: Mapping[str, bytes], layout: str) -> dict[str, bytes]:
    """Return a folder's small files with processor_config.json adapted to the layout of config.json.

    For the layout "llamoe" it gets an `auto_map`, so that `trust_remote_code=True` finds `LlamoeProcessor`. For "stock"
    it names `Llama4Processor`, which reads the same files, and has no `auto_map` of llamoe's.
    """
    if "processor_config.json" not in companions:
        return dict(companions)
    content = json.loads(companions["processor_config.json"])
    if content.get("processor_class") not in ("Llama4Processor", "LlamoeProcessor"):
        return dict(companions)
    wanted = {name: value for name, value in content.items() if name != "auto_map"}
    auto_map = entries_of_others(content.get("auto_map"))
    if layout == "llamoe":
        auto_map["AutoProcessor"] = f"{MODULE_NAME}.LlamoeProcessor"
    else:
        wanted["processor_class"] = "Llama4Processor"
    if auto_map:
        wanted["auto_map"] = auto_map
    return {**companions, **({"processor_config.json": to_json(wanted)} if wanted != content else {})}


def _check_tokens(config: LlamoeConfig, tokenizer_files: Mapping[str, bytes]) -> None:
    added = json.loads(tokenizer_files["tokenizer.json"]).get("added_tokens", [])
    ids = {token["content"]: token["id"] for token in added}
    missing = [token for token in IMAGE_TOKENS if token not in ids]
    if missing:
        raise CheckpointError(
            f"tokenizer.json: has no {', '.join(missing)}, which the processor writes for a picture. Take the "
            "tokenizer of this model's release."
        )
    named = {
        "boi_token_index": "<|image_start|>",
        "eoi_token_index": "<|image_end|>",
        "image_token_index": "<|patch|>",
    }
    for field, token in named.items():
        if getattr(config, field) != ids[token]:
            raise CheckpointError(
                f"tokenizer.json: {token} has the id {ids[token]}, and {type(config).__name__}.{field} is "
                f"{getattr(config, field)}. Set it to {ids[token]}, or take the model's own tokenizer."
            )
