"""The command `llamoe chat`, which opens a web page to talk with a model."""

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
        Path, typer.Argument(metavar="FOLDER", help="Folder of the model and its tokenizer or processor.")
    ],
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. The default accepts connections only from this machine."),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port to listen on. The default is the first free one from 7860 on."
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(
            metavar="<dtype>", help="Dtype of the weights: auto (as saved), bfloat16, float16 or float32."
        ),
    ] = "auto",
    device_map: Annotated[
        str, typer.Option(help="Device of the model: cpu, cuda, cuda:1, or auto.")
    ] = "auto",
    experts_memory: Annotated[
        str | None,
        typer.Option(
            metavar="<size>",
            help="Leave a mixture's experts on disk, and cache recently used experts in this much memory, such as "
            '"8GB". By default all experts are loaded.',
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="<file>",
            help="Load the model by a plan, a file that `llamoe inspect FOLDER --plan --save FILE` has written.",
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="<folder>", help="Folder of a peft adapter for the model; the page has a switch for it."
        ),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = True,
    quiet: Quiet = False,
) -> None:
    """Talk with a model on a local web page, and see which experts answer.

    Type a question; add a picture if the model takes pictures. For each mixture layer the page shows which expert was
    chosen for each part of the picture and for each token of the answer.

        llamoe chat examples/llamoe-tiny
    """
    for path in (folder, adapter):
        if path is not None and not path.exists():
            raise ValueError(f"{path}: no such file or folder.")
    placement: dict[str, Any] = {"device_map": device_map, "experts_memory": experts_memory, "dtype": dtype}
    if plan is not None:
        if device_map != "auto" or experts_memory is not None:
            raise ValueError("--plan has a device map: leave --device-map and --experts-memory out.")
        try:
            arguments = json.loads(plan.read_bytes())
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict) or not arguments.keys() <= placement.keys():
            raise ValueError(
                f"--plan {plan}: not a plan; `llamoe inspect FOLDER --plan --save FILE` writes one."
            )
        placement |= arguments
    if missing := [name for name in ("gradio", "matplotlib") if find_spec(name) is None]:
        raise ValueError(f"The page needs {' and '.join(missing)}: pip install 'llamoe[page]'")
    page = load("llamoe_command.page.serve", quiet)
    page.serve(folder, host, port, placement, adapter=adapter, open_browser=open_browser)
