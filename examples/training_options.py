"""The options that `finetune_lora.py` and `align_vision.py` share, without torch, whose import takes seconds."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn


def fail(message: object) -> NoReturn:
    """Print one line and exit with status 2, as argparse does."""
    print(f"{Path(sys.argv[0]).stem}: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


def make_parser(description: str | None, out: str, epochs: int) -> argparse.ArgumentParser:
    """A parser with the options of a training.

    Args:
        description: text above the options.
        out: default of `--out`.
        epochs: default of `--epochs`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with data.jsonl; default: pictures of shapes")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder (default: %(default)s)")
    parser.add_argument("--epochs", type=float, default=epochs, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="a device's (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: %(default)s")
    parser.add_argument("--rank", type=int, default=8, help="of LoRA (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=100, help="steps (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    return parser


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program where a number is not above zero, or a folder lacks its file."""
    for name in ("epochs", "batch_size", "learning_rate", "rank", "save_every"):
        if not getattr(arguments, name) > 0:
            parser.error(
                f"argument --{name.replace('_', '-')}: must be above 0, not {getattr(arguments, name)}"
            )
    for folder, file in ((arguments.model, "config.json"), (arguments.data, "data.jsonl")):
        if folder is not None and not (Path(folder) / file).is_file():
            fail(f"no such file: {Path(folder) / file}")
