"""The typer application, and the decorator that declares a command.

A command that calls a function of `llamoe.conversion` has the function's options, and prints its report. Importing
torch takes seconds, so such imports stand inside functions: help and errors in options are shown at once.
"""

import dataclasses
import functools
import importlib
import inspect as signatures
from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from .options import shared_options
from .printing import print_sections, progress_bar, shows_progress, status

app = typer.Typer(
    name="llamoe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Convert, derive, quantize, inspect and compare checkpoints of LLaMA, Llama 4, Mistral and Mixtral in the "
    "formats of Meta, Mistral AI and Hugging Face, and vision towers of open_clip and CLIP.\n\nA command detects the "
    "format of SOURCE and writes a new folder TARGET. It never changes SOURCE. Begin with `llamoe inspect PATH`.",
)


def load(module: str, is_silent: bool) -> ModuleType:
    """Import and return a module that imports torch and transformers; show a status line meanwhile.

    transformers' progress bars are disabled if `is_silent`, or if standard error is no terminal.
    """
    with status("loading torch and transformers …", is_silent):
        loaded = importlib.import_module(module)
    from transformers.utils import logging

    # transformers' warnings about configurations are for authors of models.
    logging.set_verbosity_error()
    if not shows_progress(is_silent):
        logging.disable_progress_bar()
    return loaded


def load_conversion(*sources: Path, is_silent: bool = False) -> ModuleType:
    """Check that the sources exist, then import and return `llamoe.conversion`.

    Raises:
        ValueError: a source does not exist.
    """
    for path in sources:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder.")
    conversion = load("llamoe.conversion", is_silent)
    from transformers.utils import logging

    # The commands draw their own progress bars, and two bars at once overwrite each other.
    logging.disable_progress_bar()
    return conversion


def writes(function: str, without: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Return a decorator that registers a command, which calls a function of `llamoe.conversion` and prints its report.

    The decorated function has no body. Its signature declares the command's arguments, and its options besides those of
    `shared_options`. Its docstring is the command's help.

    Args:
        function: name of the function in `llamoe.conversion`.
        without: names of shared options that the command does not have.
    """

    def register(declaration: Callable) -> Callable:
        shared = signatures.signature(shared_options).parameters.values()
        options = [*signatures.signature(declaration).parameters.values()]
        options += [option for option in shared if option.name not in without]

        @functools.wraps(declaration)
        def run(*, as_json: bool, quiet: bool, **arguments: Any) -> None:
            is_silent = as_json or quiet
            paths = {name: value for name, value in arguments.items() if isinstance(value, Path)}
            sources = (path for name, path in paths.items() if name != "target")
            conversion = load_conversion(*sources, is_silent=is_silent)
            with progress_bar(is_silent) as progress:
                report = getattr(conversion, function)(**arguments, progress=progress)
            print_sections(dataclasses.asdict(report), report.sections(), as_json)

        run.__signature__ = signatures.Signature(options)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {option.name: option.annotation for option in options}
        return app.command()(run)

    return register


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"llamoe {installed_version('llamoe')}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass
