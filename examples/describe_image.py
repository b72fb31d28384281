r"""Ask a multimodal checkpoint about one or more pictures and stream its answer.

    python examples/describe_image.py --model examples/llamoe-tiny --image examples/pictures/two_shapes.png \
        --prompt "What is in the picture?"

Pictures come before the prompt, in the order given, unless the prompt marks their places with `<|image|>`.
All arguments are checked before the weights are read.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

DTYPES = ("auto", "float32", "bfloat16", "float16")
MARKER = "<|image|>"


def fail(message: str) -> NoReturn:
    """Print one line and exit with status 2, as argparse does."""
    print(f"describe_image: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def read_arguments() -> argparse.Namespace:
    """Read the command line, and exit where a file or folder in it does not exist."""
    parser = argparse.ArgumentParser(description="Ask a multimodal checkpoint about pictures.")
    parser.add_argument("--model", required=True, help="folder with config.json, weights and processor files")
    parser.add_argument("--image", required=True, nargs="+", metavar="FILE", help="one or more pictures")
    parser.add_argument("--prompt", default="Describe the picture.", help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: as the weights were saved")
    parser.add_argument("--device-map", default="auto", help="auto, cpu, cuda, ...; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.max_new_tokens < 1:
        parser.error(f"argument --max-new-tokens: must be at least 1, not {arguments.max_new_tokens}")
    for path in arguments.image:
        if not Path(path).exists():
            fail(f"no such image: {path}")
    if not Path(arguments.model).is_dir():
        fail(f"no such model folder: {arguments.model}")
    if not (Path(arguments.model) / "config.json").is_file():
        fail(f"{arguments.model} has no config.json, so it is not a model folder")
    return arguments


if __name__ == "__main__":
    # Help and mistakes are shown before torch is imported, which takes seconds.
    read_arguments()

from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, TextStreamer
from transformers.utils import logging

# The import registers llamoe's model types with the Auto classes.
import llamoe


def read_picture(path: str) -> Image.Image:
    """Read every pixel of a picture now, or exit."""
    try:
        return llamoe.read_picture(path)
    except ValueError as error:
        fail(f"cannot read the image {error}")


def check_model(path: str) -> None:
    """Exit unless the folder has a configuration with a vision tower."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        fail(f"cannot read {path}/config.json: {error}")
    if getattr(config, "vision_config", None) is None:
        fail(f"{path} is a {config.model_type!r} model without a vision tower, it cannot see pictures")


def typed_content(prompt: str, pictures: list[Image.Image]) -> list[dict]:
    """Split a prompt at its markers into the typed parts of a chat message; pictures without a marker come first."""
    pieces = prompt.split(MARKER)
    marked = len(pieces) - 1
    if marked > len(pictures):
        fail(f"the prompt has {marked} {MARKER} markers, the pictures given are {len(pictures)}")
    unmarked = len(pictures) - marked
    content = [{"type": "image", "image": picture} for picture in pictures[:unmarked]]
    for index, piece in enumerate(pieces):
        if index > 0:
            content.append({"type": "image", "image": pictures[unmarked + index - 1]})
        if piece:
            content.append({"type": "text", "text": piece})
    return content


def main() -> None:
    """Load the model and print the answer token by token."""
    arguments = read_arguments()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    pictures = [read_picture(path) for path in arguments.image]
    content = typed_content(arguments.prompt, pictures)
    check_model(arguments.model)

    processor = AutoProcessor.from_pretrained(arguments.model)
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    model: Any = AutoModelForImageTextToText.from_pretrained(
        arguments.model, dtype=arguments.dtype, device_map=arguments.device_map
    )
    # Casts pixels only: token ids stay integers.
    inputs = inputs.to(model.device, dtype=model.dtype)
    streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs, streamer=streamer, do_sample=False, max_new_tokens=arguments.max_new_tokens)


if __name__ == "__main__":
    main()
