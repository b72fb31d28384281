"""Arguments and options that several commands have.

Names and defaults are those of the functions of `llamoe.conversion`.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

Source = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="Folder or file to read. Its format is recognised.")
]
Target = Annotated[
    Path, typer.Argument(metavar="TARGET", help="Folder to write. It must be empty, or not exist.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show no progress. Without a terminal a line is written each minute."),
]
Instruct = Annotated[
    bool | None,
    typer.Option(
        "--instruct/--no-instruct",
        help="Whether a model of Meta's or Mistral AI's was tuned for conversations. This decides on chat template, "
        "stop tokens and sampling. The default goes by the folder's name.",
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
ModelOfFile = Annotated[
    str | None,
    typer.Option(
        help="Architecture of an open_clip file without open_clip_config.json beside it, by open_clip's name, such as "
        '"ViT-L-14-quickgelu".'
    ),
]


def shared_options(
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(
            metavar="<dtype>",
            help="Cast all weights to bfloat16, float16 or float32. By default they keep their dtypes.",
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option(help='Largest size of a weight file, such as "5GB" or "500MB".')
    ] = "5GB",
    layout: Annotated[
        Literal["stock", "llamoe"] | None,
        typer.Option(
            help="Model type in config.json: that of transformers (stock) or of llamoe. The default is stock if "
            "transformers can express the model."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a TARGET that an earlier run left unfinished.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and plan everything, but write nothing.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Declares the options of the commands that write a folder."""
