"""The command that opens a page to talk with a model."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .app import app, load
from .options import Quiet


@app.command()
def chat(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A model with its tokenizer or processor.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. The default is reached from this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port. The default is the first free one from 7860 on."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(metavar="<dtype>", help="auto (as saved), bfloat16, float16 or float32."),
    ] = "auto",
    device_map: Annotated[str, typer.Option(help="Where the model is placed: auto, cpu, cuda, ...")] = "auto",
    experts_memory: Annotated[
        str | None,
        typer.Option(
            metavar="<size>",
            help="Leave a mixture's experts on disk, with so much memory for recent ones: 8GB.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="<file>",
            help="Place the model as `llamoe inspect FOLDER --plan --save FILE` has planned it.",
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="<folder>", help="An adapter for the model, which the page switches on and off."
        ),
    ] = None,
    picture: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="<file>", help="A picture to click on in the page. It can be given several times."
        ),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Whether to open the page in a browser.")
    ] = True,
    quiet: Quiet = False,
) -> None:
    """Talk with a model in a local web page, and see which experts answer.

    Drop a picture, ask, and watch the answer come. The page shows, for each layer, the expert that took each part of
    the picture and each token of the answer.

        llamoe chat examples/llamoe-tiny
    """
    pictures = picture or []
    for path in [folder, *pictures, *([adapter] if adapter else [])]:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder.")
    placement: dict[str, Any] = {"device_map": device_map, "experts_memory": experts_memory, "dtype": dtype}
    if plan is not None:
        if device_map != "auto" or experts_memory is not None:
            raise ValueError("--plan places the model: leave --device-map and --experts-memory out.")
        found = json.loads(plan.read_bytes())
        if not isinstance(found, dict) or not found.keys() <= placement.keys():
            raise ValueError(f"--plan {plan}: give what `llamoe inspect FOLDER --plan --save FILE` wrote.")
        placement |= found
    if missing := [name for name in ("gradio", "matplotlib") if find_spec(name) is None]:
        raise ValueError(f"the page needs {' and '.join(missing)}: pip install 'llamoe[page]'")
    page = load("llamoe_command.page.serve", quiet)
    page.serve(folder, host, port, placement, adapter=adapter, pictures=pictures, open_browser=open_browser)
