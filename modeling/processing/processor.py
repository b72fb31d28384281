"""transformers' `Llama4Processor`, extended for servers, trainers and early errors.

The stock class cuts pictures into tiles and writes their tokens into the prompt. This one also reads pictures from
files in one way, returns pixels in a dtype that NumPy has, tells servers how many tokens a picture will take, and
forwards the tokenizer's attributes that trainers ask of a processor.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.image_utils import SizeDict
from transformers.models.llama4.image_processing_llama4 import (
    Llama4ImageProcessor,
    find_supported_resolutions,
    get_best_fit,
)
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.processing_utils import MultiModalData

from ...configuration.hub import MODULE, MODULE_NAME, hub_arguments, is_ours
from ...configuration.json_files import write_whole
from ...serving import told_to_clients
from .image_processor import LlamoeImageProcessor
from .pictures import read_pictures_in


class _OfTokenizer:
    """Attribute that forwards reading and setting to the processor's tokenizer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, processor: Any, owner: type | None = None) -> Any:
        return self if processor is None else getattr(processor.tokenizer, self.name)

    def __set__(self, processor: Any, value: Any) -> None:
        setattr(processor.tokenizer, self.name, value)


class _ImageProcessor:
    """Attribute in whose place stock's image processor becomes ours.

    transformers reads the parts of a processor off the signature of `__init__`, which stays stock's.
    """

    def __set__(self, processor: Any, value: Any) -> None:
        ours = LlamoeImageProcessor.like(value) if type(value) is Llama4ImageProcessor else value
        processor.__dict__["image_processor"] = ours


class LlamoeProcessor(Llama4Processor):
    """Turns pictures and prompts into model inputs; reads folders of `Llama4Processor` and takes the same arguments.

    Pictures are paths, URLs, base64, bytes of files, PIL images, arrays, tensors or numbers in lists, and each is read
    as `llamoe.read_picture` reads its file. Its `image_processor` alone does the same. `pixel_values` are float32
    with the values of bfloat16, in which the stock class computes them.
    """

    image_processor = _ImageProcessor()
    # Trainers (TRL's) take a processor in place of a tokenizer, and read its end and padding tokens.
    bos_token = _OfTokenizer()
    bos_token_id = _OfTokenizer()
    eos_token = _OfTokenizer()
    eos_token_id = _OfTokenizer()
    pad_token = _OfTokenizer()
    pad_token_id = _OfTokenizer()
    # Servers and constrained decoding search the vocabulary, for example for tokens that may complete a stop string.
    get_vocab = _OfTokenizer()
    vocab_size = _OfTokenizer()
    backend_tokenizer = _OfTokenizer()
    convert_ids_to_tokens = _OfTokenizer()
    convert_tokens_to_ids = _OfTokenizer()
    convert_tokens_to_string = _OfTokenizer()

    def __call__(self, images=None, text=None, **kwargs):
        """Model inputs of texts and pictures; arguments as in `Llama4Processor`.

        Returns:
            `BatchFeature` with `input_ids`, `attention_mask` and, if there are pictures, `pixel_values`: the tiles of
            all pictures, `[tiles, C, height, width]`; a list of tiles without `return_tensors`.

        Raises:
            ValueError: the numbers of markers and pictures differ, in a text where each has a list of its pictures, a
                picture cannot be read, or there is no text.
        """
        if isinstance(text, (list, tuple)) and not text:
            raise ValueError("text is an empty list; expected one text or more.")
        return super().__call__(images=images, text=text, **kwargs)

    @told_to_clients()
    def apply_chat_template(self, conversation, *args, **kwargs):
        """A conversation as one text or as its tokens; arguments as in `Llama4Processor`.

        Raises:
            ValueError: a conversation without a message, or a picture that cannot be read. `transformers serve` answers
                with what it says, as status 400.
        """
        is_list = isinstance(conversation, (list, tuple))
        if conversation in (None, [], ()) or is_list and any(chat in ([], ()) for chat in conversation):
            raise ValueError(
                f"The conversation is {conversation!r}; expected one message or more: "
                '[{"role": "user", "content": "..."}].'
            )
        return super().apply_chat_template(conversation, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load as `ProcessorMixin.from_pretrained`; for `AutoProcessor`, the tokenizer where that is all there is.

        The tokenizer of a multimodal folder names this class, also where it is saved by itself beside a text model.
        """
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except OSError:
            config = config_beside(pretrained_model_name_or_path, kwargs) if kwargs.get("_from_auto") else {}
            if not config or "vision_config" in config:
                raise
            return AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """Save as `ProcessorMixin.save_pretrained`, and in a form that loads without llamoe imported."""
        if is_ours(type(self)) and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            write_whole(Path(save_directory, f"{MODULE_NAME}.py"), MODULE)
        return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_dict(self, *args, **kwargs) -> dict[str, Any]:
        """Content of processor_config.json."""
        content = super().to_dict(*args, **kwargs)
        if is_ours(type(self)):
            content["auto_map"] = {"AutoProcessor": f"{MODULE_NAME}.{type(self).__name__}"}
        return content

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoProcessor"):
        """Do nothing for llamoe's own class: its folders name how they are loaded already."""
        if not is_ours(cls):
            super().register_for_auto_class(auto_class)

    @property
    def image_token_ids(self) -> list[int]:
        """The token that image features replace; stock returns the marker here."""
        return [self.tokenizer.convert_tokens_to_ids(self.img_patch_token)]

    def prepare_inputs_layout(self, images=None, text=None, **kwargs):
        """Read the pictures, and let stock arrange the texts."""
        _, text, *others = super().prepare_inputs_layout(text=text, **kwargs)
        return None if images is None else read_pictures_in(images), text, *others

    def _process_images(self, images, return_tensors=None, **kwargs):
        # Stock returns bfloat16, which NumPy lacks, and without `return_tensors` one tensor a picture: pictures with
        # different numbers of tiles cannot become one array. TRL's GRPO fails on both.
        if not any(not isinstance(row, list) or row for row in images):
            # No text has a picture.
            return {}, []
        processed, replacements = super()._process_images(images, return_tensors="pt", **kwargs)
        tiles = processed["pixel_values"]
        tiles = tiles.float() if tiles.dtype is torch.bfloat16 else tiles
        processed["pixel_values"] = tiles if return_tensors else list(tiles)
        return processed.convert_to_tensors(return_tensors), replacements

    def validate_inputs(self, images=None, text=None, **kwargs) -> None:
        """Refuse prompts whose number of markers differs from the number of pictures.

        Raises:
            ValueError: the numbers differ, in a prompt where each has a list of its pictures, otherwise in all.
        """
        prompts = [text] if isinstance(text, str) else text
        if isinstance(prompts, (list, tuple)) and all(isinstance(prompt, str) for prompt in prompts):
            self._count_markers([prompt.count(self.fake_image_token) for prompt in prompts], images or [])
        # Older releases count them, too, as if there were no lists for each text.
        flat = images and [each for row in images for each in (row if isinstance(row, list) else [row])]
        super().validate_inputs(images=flat, text=text, **kwargs)

    def _count_markers(self, markers: Sequence[int], images: Sequence[Any]) -> None:
        what, found, given = "The prompts hold", sum(markers), len(images)
        if images and isinstance(images[0], list):
            if len(images) != len(markers):
                raise ValueError(
                    f"images holds {len(images)} lists of pictures for {len(markers)} texts. Give one list for each "
                    "text."
                )
            wrong = [row for row, count in enumerate(markers) if count != len(images[row])]
            row = wrong[0] if wrong else 0
            what = f"Text {row} (of {len(markers)}, from 0) holds"
            found, given = markers[row], len(images[row])
        if found != given:
            raise ValueError(
                f"{what} {found} image markers ({self.fake_image_token}), but {given} images were given. Write one "
                "marker for each image, or use apply_chat_template with the images in it."
            )

    def _get_num_multimodal_tokens(
        self, image_sizes: Sequence[Sequence[int]] | None = None, **kwargs
    ) -> MultiModalData:
        """Numbers of tokens and tiles for pictures of these sizes; vLLM's transformers backend plans with them.

        Args:
            image_sizes: (height, width) of each picture, in pixels.
            **kwargs: `size`, `max_patches`, `resize_to_max_canvas` of the image processor, to override its own.

        Returns:
            for each picture `num_image_tokens`, the tokens that features replace, and `num_image_patches`, its tiles:
            rows times columns, plus one with the whole picture if that is more than one.
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


def config_beside(name_or_path: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Content of the config.json beside a processor; empty where there is no model."""
    try:
        return PreTrainedConfig.get_config_dict(name_or_path, **hub_arguments(options))[0]
    except (OSError, ValueError):
        return {}
