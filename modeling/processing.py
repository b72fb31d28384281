"""The processor: transformers' `Llama4Processor`, and what servers and early mistakes ask for besides.

Cutting pictures into tiles and writing their tokens into the prompt is stock's work. Folders that name
`Llama4Processor` keep it; what is here matters to servers, which must know how many tokens a picture will take
before they see one.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.image_utils import SizeDict
from transformers.models.llama4.image_processing_llama4 import find_supported_resolutions, get_best_fit
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.processing_utils import MultiModalData

from ..configuration._hub import MODULE_NAME, write_module


class LlamoeProcessor(Llama4Processor):
    """Pictures and prompts to model inputs; reads folders of `Llama4Processor` and takes the same arguments."""

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """Save as `ProcessorMixin.save_pretrained` does, with what loads the folder where llamoe is not imported."""
        if self._is_ours() and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            write_module(Path(save_directory))
        return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_dict(self, *args, **kwargs) -> dict[str, Any]:
        """Give the content of processor_config.json."""
        content = super().to_dict(*args, **kwargs)
        if self._is_ours():
            content["auto_map"] = {"AutoProcessor": f"{MODULE_NAME}.{type(self).__name__}"}
        return content

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoProcessor"):
        """Do nothing for llamoe's own class, whose folders say already how they are loaded."""
        if not cls._is_ours():
            super().register_for_auto_class(auto_class)

    @classmethod
    def _is_ours(cls) -> bool:
        return cls.__module__.partition(".")[0] == "llamoe"

    @property
    def image_token_ids(self) -> list[int]:
        """The token that features replace; stock names the marker here."""
        return [self.tokenizer.convert_tokens_to_ids(self.img_patch_token)]

    def validate_inputs(self, images=None, text=None, **kwargs) -> None:
        """Refuse prompts whose markers are not as many as the pictures.

        Raises:
            ValueError: both numbers are named; stock of some releases takes markers without any picture.
        """
        prompts = [text] if isinstance(text, str) else text
        if isinstance(prompts, (list, tuple)) and all(isinstance(prompt, str) for prompt in prompts):
            markers = sum(prompt.count(self.fake_image_token) for prompt in prompts)
            if markers != (pictures := len(images) if images is not None else 0):
                raise ValueError(
                    f"The prompts hold {markers} image markers ({self.fake_image_token}), but {pictures} images were "
                    "given. Write one marker for each image, or use apply_chat_template with the images in it."
                )
        super().validate_inputs(images=images, text=text, **kwargs)

    def _get_num_multimodal_tokens(
        self, image_sizes: Sequence[Sequence[int]] | None = None, **kwargs
    ) -> MultiModalData:
        """Count what pictures of these sizes become; vLLM's backend for transformers models plans with it.

        Args:
            image_sizes: (height, width) of each picture, in pixels.
            **kwargs: `size`, `max_patches`, `resize_to_max_canvas` of the image processor, where a call changes them.

        Returns:
            for each picture `num_image_tokens`, the tokens that features replace, and `num_image_patches`, its tiles:
            rows times columns, and one more with the whole picture where there are several.
        """
        if image_sizes is None:
            return MultiModalData()
        settings = self.image_processor
        size = SizeDict(**dict(kwargs.get("size") or settings.size))
        canvases = torch.tensor(
            find_supported_resolutions(kwargs.get("max_patches") or settings.max_patches, patch_size=size)
        )
        fill = kwargs.get("resize_to_max_canvas", settings.resize_to_max_canvas)
        tokens_per_tile = (size.height // self.patch_size) * (size.width // self.patch_size)
        tokens_per_tile = int(tokens_per_tile // self.downsample_ratio)
        tiles = []
        for picture in image_sizes:
            height, width = get_best_fit(tuple(picture), canvases, resize_to_max_canvas=fill)
            count = int(height // size.height) * int(width // size.width)
            tiles.append(count + (count > 1))
        return MultiModalData(
            num_image_tokens=[count * tokens_per_tile for count in tiles], num_image_patches=tiles
        )
