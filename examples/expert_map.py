r"""Draw which experts of a mixture compute what: their shares of the tokens, and each part of a picture.

    pip install matplotlib
    python examples/expert_map.py --image examples/pictures/two_shapes.png --out experts.png

The first panel is a heat map of layers and experts. Each further one is the picture as the model gets it, the last tile
of it, with the colour and the number of the expert that each image token was sent to (the first choice, where a token
has several).
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

TINY = str(Path(__file__).with_name("llamoe-tiny"))


def fail(message: str) -> NoReturn:
    """Print one line and exit with status 2, as argparse does."""
    print(f"expert_map: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def read_arguments() -> argparse.Namespace:
    """Read the command line, and exit where a file or folder in it does not exist."""
    parser = argparse.ArgumentParser(description="Draw which experts compute which tokens.")
    parser.add_argument("--model", default=TINY, help="folder of a multimodal mixture (default: %(default)s)")
    parser.add_argument("--image", required=True, metavar="FILE", help="a picture")
    parser.add_argument("--prompt", default="What is in the picture?", help="default: %(default)s")
    parser.add_argument("--out", default="experts.png", metavar="FILE", help="default: %(default)s")
    parser.add_argument(
        "--experts-memory",
        metavar="SIZE",
        help='keep experts on disk, and recently used ones in so much memory: "8GB"',
    )
    parser.add_argument("--layers", type=int, default=8, help="panels at most (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.layers < 1:
        parser.error(f"argument --layers: must be at least 1, not {arguments.layers}")
    if not Path(arguments.image).is_file():
        fail(f"no such image: {arguments.image}")
    if not (Path(arguments.model) / "config.json").is_file():
        fail(f"{arguments.model} is no model folder: it has no config.json")
    if not Path(arguments.out).absolute().parent.is_dir():
        fail(f"no such folder: {Path(arguments.out).absolute().parent}")
    return arguments


if __name__ == "__main__":
    # Help and mistakes are shown before torch is imported, which takes seconds.
    read_arguments()

import torch
from transformers import AutoProcessor
from transformers.utils import logging

import llamoe


@torch.inference_mode()
def first_choices(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The expert of each token, `[mixture layers, T]`."""
    with llamoe.trace_experts(model) as trace:
        model(**inputs)
    return trace.experts()[..., 0]


def draw(shares: torch.Tensor, names: list[str], tile: torch.Tensor, maps: list, path: str) -> None:
    """Draw the figure.

    Args:
        shares: each expert's part of a layer's tokens, `[mixture layers, experts]`.
        names: of the layers.
        tile: the picture, `[3, size, size]`, 0 to 1.
        maps: the name of each layer that is shown, and the experts of its image tokens, `[side, side]`.
        path: file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    size, (num_layers, num_experts) = tile.shape[-1], shares.shape
    columns = min(4, 1 + len(maps))
    rows = -(-(1 + len(maps)) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(3.2 * columns, 3.2 * rows), squeeze=False)
    first, *others = panels.flat
    heat = first.imshow(shares.numpy(), aspect="auto", vmin=0, cmap="viridis")
    first.set(title="share of the tokens", xlabel="expert", yticks=range(num_layers), yticklabels=names)
    if num_experts <= 16:
        first.set_xticks(range(num_experts))
    figure.colorbar(heat, ax=first, format=ticker.PercentFormatter(1, decimals=0))
    colours = pyplot.get_cmap("hsv", num_experts + 1)
    for panel, (name, experts) in zip(others, maps, strict=False):
        panel.imshow(tile.permute(1, 2, 0).numpy(), extent=(0, size, size, 0))
        panel.imshow(
            experts.numpy(), extent=(0, size, size, 0), cmap=colours, vmin=0, vmax=num_experts, alpha=0.35
        )
        cell = size / len(experts)
        for row, column in torch.cartesian_prod(*(torch.arange(len(experts)),) * 2).tolist():
            panel.text(
                (column + 0.5) * cell, (row + 0.5) * cell, str(int(experts[row, column])),
                ha="center", va="center", fontsize=min(9, 60 / len(experts)),
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
            )  # fmt: skip
        panel.set_title(name)
    for panel in others:
        panel.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the model once and draw."""
    arguments = read_arguments()
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        fail("it draws with matplotlib, which is not installed: pip install matplotlib")
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        picture = llamoe.read_picture(arguments.image)
        processor = AutoProcessor.from_pretrained(arguments.model)
        model = llamoe.LlamoeForConditionalGeneration.from_pretrained(
            arguments.model, dtype="auto", experts_memory=arguments.experts_memory
        ).eval()
    except (OSError, ValueError) as error:
        fail(str(error))
    text = model.config.get_text_config()
    if not getattr(text, "moe_layers", None):
        fail(f"{arguments.model} is no mixture: its layers have no experts")
    content = [{"type": "image", "image": picture}, {"type": "text", "text": arguments.prompt}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    ).to(dtype=model.dtype)  # fmt: skip

    chosen = first_choices(model, inputs)
    shares = torch.stack([experts.bincount(minlength=text.num_local_experts) for experts in chosen]).float()
    shares /= shares.sum(-1, keepdim=True)
    is_image = inputs["input_ids"][0] == model.config.image_token_id
    tokens_per_tile = model.config.vision_config.tokens_per_tile
    side = round(tokens_per_tile**0.5)
    # The whole picture is the last tile, behind its parts.
    maps = [experts[is_image][-tokens_per_tile:].view(side, side) for experts in chosen]
    tile = inputs["pixel_values"][-1].float()
    mean, std = (
        torch.tensor(values)[:, None, None]
        for values in (processor.image_processor.image_mean, processor.image_processor.image_std)
    )
    step = -(-len(maps) // arguments.layers)
    names = [f"layer {index}" for index in sorted(text.moe_layers)]
    maps = list(zip(names, maps, strict=True))[::step]
    draw(shares, names, (tile * std + mean).clamp(0, 1), maps, arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
