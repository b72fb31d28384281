"""The processor: transformers' `Llama4Processor`, and what servers, trainers and early mistakes ask for besides.

Cutting pictures into tiles and writing their tokens into the prompt is stock's work. Here pictures are read from files
in one way, pixels come in a dtype that NumPy has, servers learn how many tokens a picture will take before they see
one, and the processor answers for its tokenizer where trainers ask a processor as they would ask a tokenizer.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from transformers.image_utils import SizeDict
from transformers.models.llama4.image_processing_llama4 import find_supported_resolutions, get_best_fit
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.processing_utils import MultiModalData

from ...configuration.hub import MODULE_NAME, write_module
from .._compat import shifts_assistant_masks
from .pictures import read_pictures_in

# Whether the call in progress is made to find what the assistant wrote, by a release that looks in the wrong place.
_finds_assistant: ContextVar[bool] = ContextVar("llamoe_finds_assistant", default=False)


class _OfTokenizer:
    """An attribute that the processor has from its tokenizer, to read and to set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, processor: Any, owner: type | None = None) -> Any:
        return self if processor is None else getattr(processor.tokenizer, self.name)

    def __set__(self, processor: Any, value: Any) -> None:
        setattr(processor.tokenizer, self.name, value)


class LlamoeProcessor(Llama4Processor):
    """Pictures and prompts to model inputs; reads folders of `Llama4Processor` and takes the same arguments.

    Pictures that are named by text (a path, an address, base64) are read as `llamoe.read_picture` does. `pixel_values`
    are float32; their numbers are those of bfloat16, in which stock computes them.
    """

    # Trainers (TRL's) take a processor in the place of a tokenizer, and ask for tokens that end and pad.
    bos_token = _OfTokenizer()
    bos_token_id = _OfTokenizer()
    eos_token = _OfTokenizer()
    eos_token_id = _OfTokenizer()
    pad_token = _OfTokenizer()
    pad_token_id = _OfTokenizer()
    # Servers and constrained decoding look through the vocabulary, for tokens that may complete a stop string, say.
    get_vocab = _OfTokenizer()
    vocab_size = _OfTokenizer()
    backend_tokenizer = _OfTokenizer()
    convert_ids_to_tokens = _OfTokenizer()
    convert_tokens_to_ids = _OfTokenizer()
    convert_tokens_to_string = _OfTokenizer()

    def __call__(self, images=None, text=None, **kwargs):
        """Make inputs of texts and pictures; the arguments are those of `Llama4Processor`.

        Returns:
            `BatchFeature`: `input_ids`, `attention_mask`, and where there are pictures `pixel_values`, the tiles of all
            of them, `[tiles, C, height, width]`; without `return_tensors` a list of tiles.

        Raises:
            ValueError: as many markers as pictures were expected, or a picture cannot be read.
        """
        if not _finds_assistant.get():
            return super().__call__(images=images, text=text, **kwargs)
        inputs = super().__call__(images=images, text=text, return_text_replacement_offsets=True, **kwargs)
        rows = zip(inputs["offset_mapping"], inputs.pop("text_replacement_offsets"), strict=True)
        inputs["offset_mapping"] = [_as_written(offsets, expansions) for offsets, expansions in rows]
        return inputs

    def apply_chat_template(
        self,
        conversation,
        chat_template=None,
        tools=None,
        documents=None,
        add_generation_prompt=False,
        continue_final_message=False,
        return_assistant_tokens_mask=False,
        **kwargs,
    ):
        """Write a conversation as one text, or as its tokens; the arguments are those of `Llama4Processor`."""
        token = _finds_assistant.set(return_assistant_tokens_mask and not shifts_assistant_masks())
        try:
            return super().apply_chat_template(
                conversation,
                chat_template=chat_template,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                return_assistant_tokens_mask=return_assistant_tokens_mask,
                **kwargs,
            )
        finally:
            _finds_assistant.reset(token)

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

    def prepare_inputs_layout(self, images=None, text=None, **kwargs):
        """Read pictures that are named by text, each in the same way, before stock arranges them."""
        return super().prepare_inputs_layout(images=read_pictures_in(images), text=text, **kwargs)

    def _process_images(self, images, return_tensors=None, **kwargs):
        # Stock's pixels are bfloat16, which NumPy has not, and without `return_tensors` a tensor for each picture: no
        # array can be made of pictures with unlike numbers of tiles. TRL's GRPO fails on both.
        processed, replacements = super()._process_images(images, return_tensors="pt", **kwargs)
        tiles = processed["pixel_values"]
        tiles = tiles.float() if tiles.dtype is torch.bfloat16 else tiles
        processed["pixel_values"] = tiles if return_tensors else list(tiles)
        return processed.convert_to_tensors(return_tensors), replacements

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


def _as_written(offsets: Sequence[Sequence[int]], expansions: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Give where tokens stood in a text before pictures were written out in it; a picture's are all at its marker."""
    starts = [expansion["new_span"][0] for expansion in expansions]

    def before(place: int) -> int:
        if (index := bisect_right(starts, place) - 1) < 0:
            return place
        (first, last), (_, new_last) = expansions[index]["span"], expansions[index]["new_span"]
        return first if place < new_last else place - new_last + last

    return [(before(int(start)), before(int(end))) for start, end in offsets]
