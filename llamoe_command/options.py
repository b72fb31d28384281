"""Arguments and options that several commands share.

Their names and defaults equal those of the functions of `llamoe.conversion`.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

Source = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="Folder or file to read. Its format is detected.")
]
Target = Annotated[
    Path, typer.Argument(metavar="TARGET", help="Folder to write. It must be empty or missing.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress bar.")]
Instruct = Annotated[
    bool | None,
    typer.Option(
        "--instruct/--no-instruct",
        help="Whether a model from Meta or Mistral AI was tuned for conversations, and gets a chat template, stop "
        "tokens and sampling settings. By default the name of SOURCE decides.",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.")]
ModelOfFile = Annotated[
    str | None,
    typer.Option(
        help='Name of an open_clip model, such as "ViT-L-14-quickgelu". Needed if SOURCE is an open_clip file without '
        "open_clip_config.json."
    ),
]


def shared_options(
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(
            metavar="<dtype>",
            help="Cast all weights to bfloat16, float16 or float32. By default weights keep their dtypes.",
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option(help='Largest size of a weight file, such as "5GB" or "500MB".')
    ] = "5GB",
    layout: Annotated[
        Literal["stock", "llamoe"] | None,
        typer.Option(
            help="Model type in config.json: stock, which transformers loads without llamoe, or llamoe, which needs "
            "llamoe. The default is stock if transformers has a class for the model."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an unfinished TARGET of an earlier run.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check SOURCE and the options and print the report, but write nothing."
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Declare the options of all commands that write a folder, by this signature; the function does nothing."""
