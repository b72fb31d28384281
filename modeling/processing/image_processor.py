"""transformers' `Llama4ImageProcessor`, which cuts tiles, for pictures in whatever form `read_picture` reads.

Tiles, resizing and normalization are stock's. Stock divides any numbers by 255, blends transparent objects, but not
files, into white, and does not turn photos that Pillow has opened.
"""

from typing import Any, cast

import numpy as np
import torch
from transformers.image_utils import ChannelDimension, infer_channel_dimension_format
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

from .pictures import read_pictures_in, upright_of_8_bits
from .pixels import PictureError, as_8_bits, as_given, as_rescaled

# Grey, RGB, RGBA; grey with transparency only where no axis has one of these.
_CHANNELS = ((1, 3, 4), (2,))


class LlamoeImageProcessor(Llama4ImageProcessor):
    """Cuts pictures into tiles; takes the arguments of `Llama4ImageProcessor`, and is saved under its name.

    A picture is what `read_pictures_in` describes. Its numbers are read by dtype and range, see `as_8_bits`;
    transparency is dropped. With `do_rescale=False` they must be floats in 0..1; without `do_normalize`, too, floats
    stay as they are.
    """

    @classmethod
    def like(cls, stock: Llama4ImageProcessor) -> "LlamoeImageProcessor":
        """One with the settings of stock's."""
        return cast("LlamoeImageProcessor", cls.from_dict(stock.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """Content of preprocessor_config.json, which loads without llamoe."""
        return {**super().to_dict(), "image_processor_type": Llama4ImageProcessor.__name__}

    def _prepare_images_structure(self, images, expected_ndims=3):
        pictures = read_pictures_in(images)
        return [one for row in pictures for one in (row if isinstance(row, list) else [row])]

    def process_image(self, image, do_convert_rgb=None, input_data_format=None, **kwargs) -> torch.Tensor:
        """One picture as `[C, height, width]`.

        Raises:
            PictureError: numbers that have no plain reading, or no axis of channels.
        """
        if not isinstance(image, (np.ndarray, torch.Tensor)):
            image = upright_of_8_bits(image)
            image = np.atleast_3d(np.asarray(image.convert("RGB") if do_convert_rgb else image))
            input_data_format = ChannelDimension.LAST
        pixels = self._reading_of(kwargs)(image)
        if input_data_format is None:
            input_data_format = _channels_of(pixels)
        if input_data_format == ChannelDimension.LAST:
            pixels = pixels.movedim(-1, 0)
        if do_convert_rgb and len(pixels) in (2, 4):
            pixels = pixels[:-1]
        return super().process_image(
            pixels, do_convert_rgb=do_convert_rgb, input_data_format=ChannelDimension.FIRST, **kwargs
        )

    @staticmethod
    def _reading_of(settings: dict[str, Any]) -> Any:
        if settings.get("do_rescale"):
            return as_8_bits
        if not settings.get("do_normalize"):
            return as_given
        # Mean and deviation are those of 0..255 where the rescaling is part of them.
        scale = np.max([*np.atleast_1d(settings["image_mean"]), *np.atleast_1d(settings["image_std"])])
        return as_rescaled if scale <= 1 else lambda picture: as_8_bits(picture).float()


def _channels_of(pixels: torch.Tensor) -> ChannelDimension:
    sides = {pixels.shape[0], pixels.shape[-1]}
    for channels in _CHANNELS:
        if sides & set(channels):
            return infer_channel_dimension_format(pixels, num_channels=channels)
    raise PictureError(
        f"a picture of shape {list(pixels.shape)} has no axis of 1 to 4 channels, neither the first nor the last."
    )
