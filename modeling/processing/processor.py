"""`LlamoeProcessor`: `Llama4Processor` with checked pictures, a count of them for each text, and float32 pixels.

The stock class cuts pictures into tiles and inserts their tokens into the prompt.
"""

import base64
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.image_utils import load_image
from transformers.models.llama4.processing_llama4 import Llama4Processor

from ...configuration.hub import MODULE, MODULE_NAME, hub_arguments, is_ours
from ...configuration.json_files import write_whole
from .pictures import PictureError, as_rgb, read_picture


class LlamoeProcessor(Llama4Processor):
    """Turns pictures and prompts into model inputs; reads folders of `Llama4Processor` and takes the same arguments.

    Pictures become RGB of 8 bits, as by `llamoe.read_picture`. `pixel_values` are float32 with the values of the stock
    class, which computes them in bfloat16.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load as `ProcessorMixin.from_pretrained`; return the tokenizer if the folder holds only that.

        A multimodal model's tokenizer names this class for `AutoProcessor`, even when saved with a text model.
        """
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except OSError:
            config = config_beside(pretrained_model_name_or_path, kwargs) if kwargs.get("_from_auto") else {}
            if not config or "vision_config" in config:
                raise
            return AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """Save as `ProcessorMixin.save_pretrained`, so that the folder also loads without llamoe imported."""
        if is_ours(type(self)) and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            write_whole(Path(save_directory, f"{MODULE_NAME}.py"), MODULE)
        return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_dict(self, *args, **kwargs) -> dict[str, Any]:
        """Return the content of processor_config.json."""
        content = super().to_dict(*args, **kwargs)
        if is_ours(type(self)):
            content["auto_map"] = {"AutoProcessor": f"{MODULE_NAME}.{type(self).__name__}"}
        return content

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoProcessor"):
        """Do nothing for llamoe's own class: its folders already name their loader."""
        if not is_ours(cls):
            super().register_for_auto_class(auto_class)

    @property
    def image_token_ids(self) -> list[int]:
        """The ID of the token that image features replace; the stock class returns the prompt's image marker."""
        return [self.tokenizer.convert_tokens_to_ids(self.img_patch_token)]

    def prepare_inputs_layout(self, images=None, text=None, **kwargs):
        """Return lists of read pictures and texts; each text has as many pictures as image markers.

        Raises:
            ValueError: the numbers of markers and pictures of a text differ, or a picture cannot be read.
        """
        if isinstance(images, (list, tuple)) and any(isinstance(row, (list, tuple)) for row in images):
            texts = [text] if isinstance(text, str) else text or []
            markers = [prompt.count(self.image_token) for prompt in texts]
            counts = [len(row) for row in images]
            if markers != counts:
                raise ValueError(
                    f"The texts have {markers} image markers, and their lists have {counts} pictures."
                )
            images = [picture for row in images for picture in row]
        if images is not None:
            pictures = images if isinstance(images, (list, tuple)) else [images]
            # Do not convert to 8 bits if the caller has rescaled the values already.
            options = {**kwargs, **(kwargs.get("images_kwargs") or {})}
            is_rescaled = not options.get("do_rescale", self.image_processor.do_rescale)
            images = [self._read(picture, is_rescaled) for picture in pictures] or None
        return super().prepare_inputs_layout(images=images, text=text, **kwargs)

    def _read(self, picture: Any, is_rescaled: bool) -> Any:
        is_path = isinstance(picture, os.PathLike) or (isinstance(picture, str) and os.path.isfile(picture))
        if is_path or isinstance(picture, (bytes, bytearray)) or hasattr(picture, "readinto"):
            return read_picture(picture)
        if isinstance(picture, str) and picture.startswith(("http://", "https://")):
            return load_image(picture)
        if isinstance(picture, str):
            encoded = picture.partition("base64,")[2] if picture.startswith("data:") else picture
            try:
                return read_picture(base64.b64decode(encoded))
            except ValueError as error:
                raise PictureError(
                    f"{picture[:99]!r}: neither a file, nor an address (http, https), nor base64 of a picture ({error})"
                ) from error
        return picture if is_rescaled else as_rgb(picture)

    def _process_images(self, images, return_tensors=None, **kwargs):
        # Stock returns bfloat16, which NumPy lacks, and without `return_tensors` one tensor per picture: pictures with
        # different numbers of tiles cannot become one array. TRL's GRPO fails on both.
        processed, replacements = super()._process_images(images, return_tensors="pt", **kwargs)
        tiles = processed["pixel_values"]
        tiles = tiles.float() if tiles.dtype is torch.bfloat16 else tiles
        processed["pixel_values"] = tiles if return_tensors else list(tiles)
        return processed.convert_to_tensors(return_tensors), replacements


def config_beside(name_or_path: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the config.json beside a processor; empty if there is none."""
    try:
        return PreTrainedConfig.get_config_dict(name_or_path, **hub_arguments(options))[0]
    except (OSError, ValueError):
        return {}
