"""The command line program, and how a command is declared.

A command of `llamoe.conversion` has the options of its function, and prints the function's report. Heavy imports stand
inside of functions: help and mistakes are shown before torch is imported, which takes seconds.
"""

import contextlib
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
    help="Convert, derive, quantize, inspect and compare checkpoints: LLaMA, Llama 4, Mistral and Mixtral, as Meta, "
    "Mistral AI and Hugging Face store them, and vision towers of open_clip and CLIP.\n\nA command reads SOURCE, whose "
    "format it recognises, and writes a new folder TARGET. It never changes SOURCE. Begin with `llamoe inspect PATH`.",
)


def load(module: str, is_silent: bool) -> ModuleType:
    """Import a module that imports torch and transformers, which takes seconds.

    transformers is told to draw its progress bars only where ours are.
    """
    with status("loading torch and transformers …", is_silent):
        loaded = importlib.import_module(module)
    from transformers.utils import logging

    # transformers' warnings about configurations are meant for model authors.
    logging.set_verbosity_error()
    if not shows_progress(is_silent):
        logging.disable_progress_bar()
    return loaded


def load_conversion(*sources: Path, is_silent: bool = False) -> ModuleType:
    """`llamoe.conversion`, imported once it is known that the sources exist: that takes seconds.

    Raises:
        ValueError: a source does not exist.
    """
    for path in sources:
        # The function reports a path that cannot be read.
        with contextlib.suppress(OSError):
            if not path.exists():
                raise ValueError(f"{path}: no such file or folder.")
    conversion = load("llamoe.conversion", is_silent)
    from transformers.utils import logging

    # The commands draw their own progress bars, and two at once overwrite each other.
    logging.disable_progress_bar()
    return conversion


def writes(function: str, without: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Register a command that calls a function of `llamoe.conversion`, and prints its report.

    The decorated function is the command's declaration: its arguments, its options besides the shared ones, its help.

    Args:
        function: the function's name.
        without: shared options that it does not have.
    """

    def register(declaration: Callable) -> Callable:
        shared = signatures.signature(shared_options).parameters.values()
        named = [*signatures.signature(declaration).parameters.values()]
        named += [option for option in shared if option.name not in without]

        @functools.wraps(declaration)
        def run(*, as_json: bool, quiet: bool, **given: Any) -> None:
            is_silent = as_json or quiet
            paths = {name: value for name, value in given.items() if isinstance(value, Path)}
            sources = (path for name, path in paths.items() if name != "target")
            conversion = load_conversion(*sources, is_silent=is_silent)
            with progress_bar(is_silent) as progress:
                report = getattr(conversion, function)(**given, progress=progress)
            print_sections(dataclasses.asdict(report), report.sections(), as_json)

        run.__signature__ = signatures.Signature(named)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {option.name: option.annotation for option in named}
        return app.command()(run)

    return register


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"llamoe {installed_version('llamoe')}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass
