"""`LlamoeProcessor`: transformers' `Llama4Processor` with checks of pictures and of their number, and float32 pixels.

transformers' class cuts pictures into tiles, and puts their image tokens into the prompt.
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

    Pictures become RGB of 8 bits, as by `llamoe.read_picture`. `pixel_values` are float32, where transformers' class
    returns the same values as bfloat16.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a folder as `ProcessorMixin.from_pretrained` does; return the tokenizer if the folder has nothing else.

        For a text model with a multimodal model's tokenizer, which names this class, `AutoProcessor` calls this, too.
        """
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except OSError:
            config = config_beside(pretrained_model_name_or_path, kwargs) if kwargs.get("_from_auto") else {}
            if not config or "vision_config" in config:
                raise
            return AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """Save as `ProcessorMixin.save_pretrained` does, with a file that loads the folder without `import llamoe`."""
        if is_ours(type(self)) and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            write_whole(Path(save_directory, f"{MODULE_NAME}.py"), MODULE)
        return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_dict(self, *args, **kwargs) -> dict[str, Any]:
        """Return the content of processor_config.json, which names this class for `AutoProcessor`."""
        content = super().to_dict(*args, **kwargs)
        if is_ours(type(self)):
            content["auto_map"] = {"AutoProcessor": f"{MODULE_NAME}.{type(self).__name__}"}
        return content

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoProcessor"):
        """Register a user's subclass; do nothing for this class, whose folders have their loader already."""
        if not is_ours(cls):
            super().register_for_auto_class(auto_class)

    @property
    def image_token_ids(self) -> list[int]:
        """ID of the image token, which features replace; transformers' class returns that of the prompt's marker."""
        return [self.tokenizer.convert_tokens_to_ids(self.img_patch_token)]

    def prepare_inputs_layout(self, images=None, text=None, **kwargs):
        """Return pictures and texts as lists, with all pictures read and converted to RGB.

        Raises:
            ValueError: a text has more or fewer image markers than pictures, or a picture cannot be read.
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
            # With do_rescale=False the caller's pictures are arrays of rescaled values, which stay as they are.
            options = {**kwargs, **(kwargs.get("images_kwargs") or {})}
            is_rescaled = not options.get("do_rescale", self.image_processor.do_rescale)
            images = [self._read(picture, is_rescaled) for picture in pictures] or None
        return super().prepare_inputs_layout(images=images, text=text, **kwargs)

    def _read(self, picture: Any, is_rescaled: bool) -> Any:
        """Return a picture in RGB from a path, URL, base64, bytes, file, or object."""
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
                    f"{picture[:99]!r}: neither a file, nor a URL (http, https), nor base64 of a picture ({error})"
                ) from error
        return picture if is_rescaled else as_rgb(picture)

    def _process_images(self, images, return_tensors=None, **kwargs):
        # transformers' class returns bfloat16, which NumPy does not have; and without `return_tensors` one tensor for
        # each picture, which cannot become an array if the numbers of tiles differ. TRL's GRPO fails in both cases.
        processed, replacements = super()._process_images(images, return_tensors="pt", **kwargs)
        tiles = processed["pixel_values"]
        tiles = tiles.float() if tiles.dtype is torch.bfloat16 else tiles
        processed["pixel_values"] = tiles if return_tensors else list(tiles)
        return processed.convert_to_tensors(return_tensors), replacements


def config_beside(name_or_path: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the config.json in a processor's folder; an empty dict if there is none."""
    try:
        return PreTrainedConfig.get_config_dict(name_or_path, **hub_arguments(options))[0]
    except (OSError, ValueError):
        return {}
