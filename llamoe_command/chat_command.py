"""The command that opens a page to talk with a model."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .app import app, load
from .options import Quiet

_PLANNED = {"device_map", "experts_memory", "dtype"}


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
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise ValueError(
            f"--adapter {adapter}: give the folder of an adapter; there is no adapter_config.json in it."
        )
    if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} is an adapter, not a model: give the folder of its model, and --adapter {folder}."
        )
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} is not a model folder: it has no config.json. `llamoe convert` makes one of other formats."
        )
    placement: dict[str, Any] = {"device_map": device_map, "experts_memory": experts_memory, "dtype": dtype}
    if plan is not None:
        if device_map != "auto" or experts_memory is not None:
            raise ValueError("--plan places the model: leave --device-map and --experts-memory out.")
        placement |= _read_plan(plan)
    if missing := [name for name in ("gradio", "matplotlib") if find_spec(name) is None]:
        raise ValueError(f"the page needs {' and '.join(missing)}: pip install 'llamoe[page]'")
    load("llamoe_command.page.serve", quiet).serve(
        folder,
        host,
        port,
        placement,
        adapter=adapter,
        pictures=pictures,
        open_browser=open_browser,
    )


def _read_plan(path: Path) -> dict[str, Any]:
    """Read the arguments of `from_pretrained` from a file.

    Raises:
        ValueError: it holds something else.
    """
    advice = "Give what `llamoe inspect FOLDER --plan --save FILE` wrote."
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"--plan {path}: {error.strerror}. {advice}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--plan {path}: is not a JSON file. {advice}") from error
    if not isinstance(found, dict) or "device_map" not in found or not found.keys() <= _PLANNED:
        raise ValueError(f"--plan {path}: is not a plan of where a model goes. {advice}")
    return found
