"""The commands and their options.

Each command calls one function of `llamoe.conversion` with the same options. Results go to standard output, as text or
with `--json` as JSON; progress and errors go to standard error. Exit status: 0 for success, 1 if `verify` finds a
difference, 2 for wrong options or an unusable source, 3 if reading or writing failed, 130 if interrupted.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect as signatures
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NoReturn

import typer

from .options import (
    ActivationOfFile,
    AsJson,
    Fold,
    Heads,
    Seed,
    Source,
    Tag,
    Target,
    shared_options,
)
from .printing import print_report, print_sections, progress_bar

app = typer.Typer(
    name="llamoe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Convert, derive, quantize, inspect and compare checkpoints: LLaMA and Llama 4 of Meta and Hugging Face, and "
    "vision towers of open_clip and CLIP.\n\nA command reads SOURCE, whose format it recognises, and writes a new "
    "folder TARGET. It never changes SOURCE. Begin with `llamoe inspect PATH`.",
)


_INTERRUPTED = "interrupted; --resume goes on with what is on the disk, where a folder was being written"


def _load(*sources: Path) -> ModuleType:
    """`llamoe.conversion`, imported once it is known that the sources exist: that takes seconds.

    Raises:
        ValueError: a source does not exist.
    """
    for path in sources:
        # What cannot be looked at is told by the function.
        with contextlib.suppress(OSError):
            if not path.exists():
                raise ValueError(f"{path}: no such file or folder.")
    from transformers.utils import logging

    conversion = importlib.import_module("llamoe.conversion")

    # transformers' advice about configurations is meant for their authors.
    logging.set_verbosity_error()
    return conversion


def _writes(function: str, without: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
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
        def run(*, as_json: bool, **given: Any) -> None:
            paths = {name: value for name, value in given.items() if isinstance(value, Path)}
            conversion = _load(*(path for name, path in paths.items() if name != "target"))
            with progress_bar(as_json) as progress:
                report = getattr(conversion, function)(**given, progress=progress)
            print_report(report, as_json)

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


@_writes("convert")
def convert(
    source: Source,
    target: Target,
    to: Annotated[
        Literal["hf", "meta", "mistral"],
        typer.Option(help="Format of TARGET: Hugging Face's, Meta's or Mistral AI's."),
    ] = "hf",
    shards: Annotated[
        int | None,
        typer.Option(
            help="With --to meta: number of files that each tensor is split over. It must divide the key/value heads. "
            "The default is that of Meta's releases of this size."
        ),
    ] = None,
    style: Annotated[
        Literal["release", "unfused"],
        typer.Option(
            help="With --to meta, for Llama 4: tensor names of the published files, or of the modules in Meta's code."
        ),
    ] = "release",
    experts: Annotated[
        Literal["fused", "split"],
        typer.Option(
            help="With --to hf: stack the experts as transformers does, or write a linear layer for each."
        ),
    ] = "fused",
    checksums: Annotated[
        bool,
        typer.Option(
            "--checksums", help="First compare SOURCE with its checklist.chk and the checksums in .pth files."
        ),
    ] = False,
    instruct: Annotated[
        bool | None,
        typer.Option(
            "--instruct/--no-instruct",
            help="Whether a model of Meta's or Mistral AI's was tuned for conversations. This decides on chat "
            "template, stop tokens and sampling. The default goes by the folder's name.",
        ),
    ] = None,
) -> None:
    """Convert a checkpoint between Meta's or Mistral AI's format and Hugging Face's.

    The tokenizer, chat template, generation settings and processor settings are converted too. The result works with
    AutoTokenizer, AutoProcessor and generate.

        llamoe convert llama-2-7b-chat chat                     # from Meta's files

        llamoe convert chat meta --to meta --shards 2           # back, in two files

        llamoe convert Llama-4-Scout scout --experts split      # experts one by one
    """


@_writes("convert_vision", without=("shard_size", "layout"))
def vision(
    source: Source,
    target: Target,
    to: Annotated[
        Literal["tower", "open_clip", "clip"],
        typer.Option(help="Format of TARGET: llamoe's tower, open_clip's file, or transformers' CLIP."),
    ] = "tower",
    image_size: Annotated[
        int | None,
        typer.Option(
            help="New side of the pictures in pixels. The position grid is resized as open_clip does it."
        ),
    ] = None,
    fold_normalization: Fold = False,
    activation: ActivationOfFile = None,
    tag: Tag = None,
    heads: Heads = None,
) -> None:
    """Convert a vision tower: open_clip's MetaCLIP, Hugging Face's CLIP and MetaCLIP 2, or llamoe's.

    The weights do not show which activation they were trained with.
    MetaCLIP's first releases use QuickGELU.

        llamoe vision l14_400m.pt tower --activation quick_gelu --image-size 336
    """


@_writes("upcycle")
def upcycle(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A dense LLaMA or Mistral of any format.")],
    target: Target,
    experts: Annotated[int, typer.Option(help="Number of routed experts in each mixture layer.")],
    family: Annotated[
        Literal["llama4", "mixtral"] | None,
        typer.Option(
            help="Kind of mixture: Llama 4's, with a shared expert, or Mixtral's. The default is mixtral for a SOURCE "
            "with a sliding window, else llama4."
        ),
    ] = None,
    interleave: Annotated[
        int,
        typer.Option(
            help="Distance between mixture layers: 1 for every layer, as in Mixtral always, 2 for every second."
        ),
    ] = 1,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Number of experts that a token is sent to. The default is 1 in Llama 4's mixtures, 2 in Mixtral's."
        ),
    ] = None,
    noise: Annotated[
        float,
        typer.Option(
            help="Noise on the experts' weights, as a fraction of the dense weights' standard deviation. 0 keeps the "
            "function exactly."
        ),
    ] = 0.0,
    seed: Seed = 0,
) -> None:
    """Make a mixture of experts from a dense LLaMA or Mistral; before training it computes the same function.

    In Mixtral's mixtures every expert is a copy of the dense feed-forward (sparse upcycling, Komatsuzaki et al. 2022).
    In Llama 4's the dense feed-forward becomes the shared expert, and the routed experts are copies of it with an
    output of zero.

        llamoe upcycle llama-2-7b moe --experts 8 --interleave 2

        llamoe upcycle mistral-7b moe --family mixtral --experts 8
    """


@_writes("merge_kv_heads")
def gqa(
    source: Source,
    target: Target,
    kv_heads: Annotated[
        int, typer.Option(help="Number of key/value heads of the result. It must divide SOURCE's.")
    ],
) -> None:
    """Merge groups of key/value heads, to turn multi-head attention into grouped-query attention.

    Each group of heads is replaced by its mean (Ainslie et al. 2023).
    The result needs some further training.

        llamoe gqa llama-2-7b llama-2-7b-gqa --kv-heads 8
    """


@_writes("assemble")
def assemble(
    text: Annotated[
        Path,
        typer.Argument(
            metavar="TEXT", help="The decoder with its tokenizer: a LLaMA, a mixture, or a Llama 4."
        ),
    ],
    vision: Annotated[
        Path, typer.Argument(metavar="VISION", help="The vision tower: a folder, or an open_clip file.")
    ],
    target: Target,
    image_size: Annotated[
        int | None, typer.Option(help="Side of a tile in pixels. The default is the tower's.")
    ] = None,
    pixel_shuffle_ratio: Annotated[
        float | None,
        typer.Option(
            help="The adapter merges squares of 1/ratio by 1/ratio patches into one token. The default is 0.5."
        ),
    ] = None,
    projector_dim: Annotated[
        int | None, typer.Option(help="Width of the adapter's output. The default is the decoder's width.")
    ] = None,
    max_tiles: Annotated[int, typer.Option(help="Largest number of tiles that a picture is cut into.")] = 16,
    fold_normalization: Fold = False,
    activation: ActivationOfFile = None,
    tag: Tag = None,
    heads: Heads = None,
    seed: Seed = 0,
) -> None:
    """Join a decoder and a vision tower into one multimodal checkpoint, ready for training.

    The projector, and the adapter if the tower has none, are initialised at random.
    Image tokens, a processor and a chat template are added.

        llamoe assemble moe tower multimodal
    """


@_writes("quantize", without=("dtype", "layout"))
def quantize(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A model of any format, in 16 or 32 bit.")],
    target: Target,
    to: Annotated[
        Literal["int4", "int8"],
        typer.Option(
            help="4 bits with a scale for each group of inputs, or 8 bits with one for each output."
        ),
    ],
    group_size: Annotated[
        int | None,
        typer.Option(
            help="With --to int4: inputs that share a scale, 32, 64, 128 or 256. The default is 32."
        ),
    ] = None,
    experts: Annotated[
        bool, typer.Option("--experts/--no-experts", help="Whether routed experts are quantized.")
    ] = True,
    linears: Annotated[
        bool,
        typer.Option("--linears/--no-linears", help="Whether the decoder's linear layers are quantized."),
    ] = True,
    search: Annotated[
        bool,
        typer.Option(
            "--search/--no-search",
            help="Whether scales are searched that round best, or span the largest weights, which is faster.",
        ),
    ] = True,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<name>",
            help="A module that stays in 16 bit, or the end of the names of several. It can be given several times.",
        ),
    ] = None,
) -> None:
    """Store a model's experts and linear layers in 4 or 8 bits.

    Embeddings, output head, norms, routers, vision tower and projector stay in 16 bit.
    from_pretrained loads TARGET as it is, and convert makes 16 bit of it again.

        llamoe quantize mixtral-8x7b mixtral-int4 --to int4

        llamoe quantize mixtral-8x7b mixtral-int8 --to int8 --keep o_proj
    """


@app.command()
def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A checkpoint of any format, a config.json, or the name of a preset."
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(help="Tokens in the KV cache. The default is 8192, or the model's limit if lower."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences in the KV cache.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint is and how much memory it needs.

    Only headers are read, no weights.
    The memory is that of the weights, and of the KV cache for this context and batch.

        llamoe inspect Llama-4-Maverick --context 32768 --batch 4
    """
    # A name without a folder may be that of a preset.
    conversion = _load(*[Path(path)] if os.sep in path else [])
    found = conversion.inspect(path, context=context, batch=batch)
    print_sections(dataclasses.asdict(found), found.sections(), as_json)


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any format.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another checkpoint, of any format.")],
    tokens: Annotated[int, typer.Option(help="Number of random tokens in each row.")] = 32,
    rows: Annotated[int, typer.Option(help="Number of rows.")] = 2,
    seed: Seed = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference of outputs that counts as none, in standard deviations of the output. The "
            "default is 0.0001."
        ),
    ] = None,
    logits: Annotated[
        bool, typer.Option(help="Whether to run both models, or to compare only their weights.")
    ] = True,
    device: Annotated[str, typer.Option(help="Device that the models run on, such as cuda.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Check whether two checkpoints, in any formats, compute the same function.

    Keys, shapes and weights are compared first.
    Then both models run, and hidden states and logits are compared.

        llamoe verify llama-2-7b-chat chat      # before and after convert
    """
    options = {"tokens": tokens, "rows": rows, "seed": seed, "tolerance": tolerance, "logits": logits}
    conversion = _load(a, b)
    with progress_bar(as_json) as progress:
        found = conversion.verify(a, b, **options, device=device, progress=progress)
    print_sections(found.as_dict(), found.sections(), as_json)
    same = found.same_weights if found.same_function is None else found.same_function
    if not same:
        raise typer.Exit(1)


@app.command()
def chat(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model with its tokenizer or processor.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on. The default is reached from this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port, 0 for any free one. The default is the first free one from 7860 on."
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(metavar="<dtype>", help="auto (as saved), bfloat16, float16 or float32."),
    ] = "auto",
    device_map: Annotated[str, typer.Option(help="Where the model is placed: auto, cpu, cuda, ...")] = "auto",
    picture: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="<file>", help="A picture to click on in the page. It can be given several times."
        ),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Whether to open the page in a browser.")
    ] = True,
) -> None:
    """Talk with a model in a local web page, and see which experts answer.

    Drop a picture, ask, and watch the answer come. The page shows, for each layer, the expert that took each part of
    the picture and each token of the answer.

        llamoe chat examples/llamoe-tiny
    """
    pictures = picture or []
    for path in [folder, *pictures]:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder.")
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} is no model folder: it has no config.json. `llamoe convert` makes one of other formats."
        )
    if missing := [name for name in ("gradio", "matplotlib") if find_spec(name) is None]:
        raise ValueError(f"the page needs {' and '.join(missing)}: pip install 'llamoe[page]'")
    importlib.import_module("llamoe_command.page.serve").serve(
        folder, host, port, dtype, device_map, pictures, open_browser
    )


def main(args: list[str] | None = None) -> None:
    """Run the command and exit with its status."""
    given = sys.argv[1:] if args is None else args
    # Read here, since errors are JSON too where the options cannot be parsed.
    as_json = "--json" in given
    try:
        app(given)
    except SystemExit as end:
        if end.code == 130:
            _fail(_INTERRUPTED, 130, as_json)
        if end.code == 2 and as_json:
            print(json.dumps({"error": "wrong options; standard error says which", "status": 2}))
        raise
    except ValueError as error:
        _fail(error, 2, as_json)
    except OSError as error:
        told = error.strerror or str(error)
        _fail(f"{error.filename}: {told}" if error.filename else told, 3, as_json)
    except (ImportError, RuntimeError, MemoryError) as error:
        _fail(str(error) or type(error).__name__, 3, as_json)
    except KeyboardInterrupt:
        _fail(_INTERRUPTED, 130, as_json)


def _fail(error: object, status: int, as_json: bool) -> NoReturn:
    message = " ".join(str(error).split())
    if as_json:
        print(json.dumps({"error": message, "status": status}))
    print(f"llamoe: {message}", file=sys.stderr)
    sys.exit(status)
