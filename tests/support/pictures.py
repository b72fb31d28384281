"""Small pictures without symmetry, and a processor with a vocabulary of a few words."""

import io

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Llama4ImageProcessor, Llama4Processor, PreTrainedTokenizerFast

SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eot|>",
    "<|finetune_right_pad|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image|>",
    "<|patch|>",
]
WORDS = ["user", "assistant", "what", "is", "in", "the", "picture", "and", "this", "one", "?"]


def make_processor(processor_class=Llama4Processor, size=56, max_patches=16):
    """Return a processor with tiles of `size` x `size` pixels; the default tile has four tokens."""
    vocabulary = {token: index for index, token in enumerate(["[UNK]", *WORDS, *SPECIAL])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot|>",
        pad_token="<|finetune_right_pad|>",
        extra_special_tokens=SPECIAL[6:],
    )
    image_processor = Llama4ImageProcessor(size={"height": size, "width": size}, max_patches=max_patches)
    return processor_class(image_processor, fast, patch_size=14, pixel_shuffle_ratio=0.5)


def drawn(mode):
    """Return a picture of 60 x 40 pixels in a mode of PIL, whose channels grow differently along x and y."""
    y, x = np.mgrid[:40, :60]
    picture = Image.fromarray(np.stack([x * 4, y * 6, (x + y) * 2], axis=-1).astype(np.uint8))
    if mode in ("RGBA", "LA"):
        picture.putalpha(Image.fromarray(np.where(x > 20, 255, x * 9).astype(np.uint8)))
    return picture if mode in ("RGB", "RGBA") else picture.convert(mode)


def encode(picture, file_format, **options):
    """Return the bytes of a picture's file."""
    content = io.BytesIO()
    picture.save(content, format=file_format, **options)
    return content.getvalue()
