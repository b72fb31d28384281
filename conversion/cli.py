"""The `llamoe` command.

Each command calls one function of this package with the same options. Results go to standard output, as text or with
`--json` as JSON; progress and errors go to standard error. Exit status: 0 for success, 1 if `verify` finds a
difference, 2 for wrong options or an unusable source, 3 if reading or writing failed, 130 if interrupted.
"""

import dataclasses
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from transformers.utils import logging

from .printing import print_report, print_sections, progress_bar

app = typer.Typer(
    name="llamoe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Weights in and out: LLaMA and Llama 4 checkpoints of Meta and Hugging Face, vision towers of open_clip and "
    "CLIP, and models made of others.\n\nA command reads SOURCE, never changes it, and writes a new folder TARGET. Its "
    "format is recognised from its files. Begin with `llamoe inspect PATH`.",
)


class Format(StrEnum):
    """Format of a language model."""

    hf = "hf"
    meta = "meta"


class Tower(StrEnum):
    """Format of a vision tower."""

    tower = "tower"
    open_clip = "open_clip"
    clip = "clip"


class Style(StrEnum):
    """Names of Llama 4's tensors in Meta's format."""

    release = "release"
    unfused = "unfused"


class Experts(StrEnum):
    """How experts are stored."""

    fused = "fused"
    split = "split"


class Layout(StrEnum):
    """Owner of the model type in config.json: transformers or llamoe."""

    stock = "stock"
    llamoe = "llamoe"


class Dtype(StrEnum):
    """Dtype of all floating tensors."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Activation(StrEnum):
    """Activation function of a tower's blocks."""

    quick_gelu = "quick_gelu"
    gelu = "gelu"


_INTERRUPTED = "interrupted; --resume goes on with what is on the disk, where a folder was being written"

Source = Annotated[Path, typer.Argument(help="Folder or file to read; its format is recognised.")]
Target = Annotated[Path, typer.Argument(help="Folder to write; it must not exist or be empty.")]
ToDtype = Annotated[
    Dtype | None, typer.Option("--dtype", help="Cast all weights; the default keeps each one's.")
]
ShardSize = Annotated[str, typer.Option(help='Largest size of a weight file, such as "5GB" or "500MB".')]
ToLayout = Annotated[
    Layout | None,
    typer.Option(
        help="Whose config.json: transformers' own model type, or llamoe's. The default is stock where it can express "
        "the model."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a TARGET that an earlier run left unfinished.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and plan everything, write nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Seed = Annotated[int, typer.Option(help="Of everything that is random.")]


@app.command()
def convert(
    source: Source,
    target: Target,
    to: Annotated[Format, typer.Option(help="Format of the target.")] = Format.hf,
    shards: Annotated[
        int | None,
        typer.Option(
            help="For Meta's format: files, over which each tensor is split. Divides the key-value heads; the "
            "default is as Meta's releases of that size."
        ),
    ] = None,
    style: Annotated[
        Style, typer.Option(help="For Meta's format of Llama 4: the published files' names, or the modules'.")
    ] = Style.release,
    dtype: ToDtype = None,
    shard_size: ShardSize = "5GB",
    experts: Annotated[
        Experts,
        typer.Option(help="For hf: stacked as transformers keeps them, or one linear layer an expert."),
    ] = Experts.fused,
    layout: ToLayout = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    checksums: Annotated[
        bool,
        typer.Option(
            "--checksums", help="First compare the source with its checklist.chk and .pth checksums."
        ),
    ] = False,
    instruct: Annotated[
        bool | None,
        typer.Option(
            "--instruct/--no-instruct",
            help="Whether a model of Meta's was tuned for conversations: chat template, stop tokens, sampling. The "
            "default goes by the folder's name.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a LLaMA or Llama 4 checkpoint between Meta's format and Hugging Face's.

    The tokenizer, chat template, generation settings and processor settings are converted too. The result works with
    AutoTokenizer, AutoProcessor and generate.

        llamoe convert llama-2-7b-chat chat                      # Meta's files to Hugging Face's

        llamoe convert chat meta --to meta --shards 2            # and back, in two files

        llamoe convert Llama-4-Scout scout-split --experts split # a linear layer for each expert
    """
    from .convert import convert as run

    with progress_bar(as_json) as progress:
        report = run(
            source,
            target,
            to=to.value,
            shards=shards,
            style=style.value,
            dtype=_value(dtype),
            shard_size=shard_size,
            experts=experts.value,
            layout=_value(layout),
            resume=resume,
            dry_run=dry_run,
            checksums=checksums,
            instruct=instruct,
            progress=progress,
        )
    print_report(report, as_json)


@app.command()
def vision(
    source: Source,
    target: Target,
    to: Annotated[
        Tower, typer.Option(help="llamoe's tower, open_clip's file, or transformers' CLIP.")
    ] = Tower.tower,
    image_size: Annotated[
        int | None,
        typer.Option(help="Side of the pictures in pixels; the position grid is resized as open_clip does."),
    ] = None,
    fold_normalization: Annotated[
        bool,
        typer.Option(
            "--fold-normalization",
            help="Put CLIP's pixel normalization into the weights: pixels come as Llama 4's.",
        ),
    ] = False,
    activation: Annotated[
        Activation | None,
        typer.Option(help="Of an open_clip file that has no open_clip_config.json beside it."),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help='Or the release\'s tag in open_clip, such as "metaclip_fullcc".')
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Attention heads, where the file is of no published size.")
    ] = None,
    dtype: ToDtype = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Convert a vision tower: open_clip's MetaCLIP, Hugging Face's CLIP and MetaCLIP 2, or llamoe's.

    The weights do not show which activation they were trained with.
    MetaCLIP's first releases use QuickGELU.

        llamoe vision l14_fullcc2.5b.pt tower --activation quick_gelu --image-size 336
    """
    from .clip import convert_vision as run

    with progress_bar(as_json) as progress:
        report = run(
            source,
            target,
            to=to.value,
            image_size=image_size,
            fold_normalization=fold_normalization,
            activation=_value(activation),
            tag=tag,
            heads=heads,
            dtype=_value(dtype),
            resume=resume,
            dry_run=dry_run,
            progress=progress,
        )
    print_report(report, as_json)


@app.command()
def upcycle(
    source: Annotated[Path, typer.Argument(help="A dense LLaMA of any format.")],
    target: Target,
    experts: Annotated[int, typer.Option(help="Routed experts of each mixture layer.")],
    interleave: Annotated[
        int, typer.Option(help="Distance between mixture layers: 1 for all, 2 for every second.")
    ] = 1,
    top_k: Annotated[int, typer.Option(help="Experts that a token is sent to.")] = 1,
    noise: Annotated[
        float,
        typer.Option(
            help="Noise on the experts, as a part of the weights' deviation; 0 keeps the function exactly."
        ),
    ] = 0.0,
    seed: Seed = 0,
    dtype: ToDtype = None,
    shard_size: ShardSize = "5GB",
    layout: ToLayout = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make a mixture of experts from a dense LLaMA; before training it computes the same function.

    The dense feed-forward becomes the shared expert. The routed experts are copies of it with an output of zero
    (sparse upcycling, Komatsuzaki et al. 2022, adapted to Llama 4's mixtures).

        llamoe upcycle llama-2-7b moe --experts 8 --interleave 2
    """
    from .upcycle import upcycle as run

    with progress_bar(as_json) as progress:
        report = run(
            source,
            target,
            experts=experts,
            interleave=interleave,
            top_k=top_k,
            noise=noise,
            seed=seed,
            dtype=_value(dtype),
            shard_size=shard_size,
            layout=_value(layout),
            resume=resume,
            dry_run=dry_run,
            progress=progress,
        )
    print_report(report, as_json)


@app.command()
def gqa(
    source: Source,
    target: Target,
    kv_heads: Annotated[
        int, typer.Option(help="Key-value heads of the result; divides those of the source.")
    ],
    dtype: ToDtype = None,
    shard_size: ShardSize = "5GB",
    layout: ToLayout = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Merge groups of key-value heads, to turn multi-head attention into grouped-query attention.

    Each group of heads is replaced by its mean (Ainslie et al. 2023).
    The result needs some further training.

        llamoe gqa llama-2-7b llama-2-7b-gqa --kv-heads 8
    """
    from .merge_kv_heads import merge_kv_heads as run

    with progress_bar(as_json) as progress:
        report = run(
            source,
            target,
            kv_heads=kv_heads,
            dtype=_value(dtype),
            shard_size=shard_size,
            layout=_value(layout),
            resume=resume,
            dry_run=dry_run,
            progress=progress,
        )
    print_report(report, as_json)


@app.command()
def assemble(
    text: Annotated[
        Path, typer.Argument(help="The decoder, with its tokenizer: LLaMA, a mixture, or Llama 4.")
    ],
    vision_tower: Annotated[
        Path, typer.Argument(metavar="VISION", help="The tower: a folder or an open_clip file.")
    ],
    target: Target,
    image_size: Annotated[
        int | None, typer.Option(help="Side of a tile in pixels; the default keeps the tower's.")
    ] = None,
    pixel_shuffle_ratio: Annotated[
        float | None,
        typer.Option(help="The adapter merges 1/ratio by 1/ratio patches into one token; default 0.5."),
    ] = None,
    projector_dim: Annotated[
        int | None, typer.Option(help="Width of the adapter; default the decoder's.")
    ] = None,
    max_tiles: Annotated[int, typer.Option(help="Tiles that a picture is cut into at most.")] = 16,
    fold_normalization: Annotated[
        bool, typer.Option("--fold-normalization", help="Put CLIP's pixel normalization into the weights.")
    ] = False,
    activation: Annotated[Activation | None, typer.Option(help="See `llamoe vision`.")] = None,
    tag: Annotated[str | None, typer.Option(help="See `llamoe vision`.")] = None,
    heads: Annotated[int | None, typer.Option(help="See `llamoe vision`.")] = None,
    seed: Seed = 0,
    dtype: ToDtype = None,
    shard_size: ShardSize = "5GB",
    layout: ToLayout = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Join a decoder and a vision tower into one multimodal checkpoint, ready for training.

    The projector, and the adapter if the tower has none, are initialised at random.
    Image tokens, a processor and a chat template are added.

        llamoe assemble moe tower multimodal
    """
    from .assemble import assemble as run

    with progress_bar(as_json) as progress:
        report = run(
            text,
            vision_tower,
            target,
            image_size=image_size,
            pixel_shuffle_ratio=pixel_shuffle_ratio,
            projector_dim=projector_dim,
            max_tiles=max_tiles,
            fold_normalization=fold_normalization,
            activation=_value(activation),
            tag=tag,
            heads=heads,
            seed=seed,
            dtype=_value(dtype),
            shard_size=shard_size,
            layout=_value(layout),
            resume=resume,
            dry_run=dry_run,
            progress=progress,
        )
    print_report(report, as_json)


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(help="A checkpoint of any format, a config.json, or the name of a preset.")
    ],
    context: Annotated[
        int | None, typer.Option(help="Tokens that the cache is counted for; default 8192.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows that the cache is counted for.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint is and how much memory it needs.

    Only headers are read, no weights.
    The memory is that of the weights, and of the cache for this context and batch.

        llamoe inspect Llama-4-Maverick --context 32768 --batch 4
    """
    from .inspect import inspect as run

    found = run(path, context=context, batch=batch)
    print_sections(dataclasses.asdict(found), found.sections(), as_json)


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(help="A checkpoint of any format.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
    tokens: Annotated[int, typer.Option(help="Random tokens in a row.")] = 32,
    rows: Annotated[int, typer.Option(help="Rows.")] = 2,
    seed: Seed = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest difference that counts as the same, in deviations of the output."),
    ] = None,
    logits: Annotated[
        bool, typer.Option(help="Run both models; otherwise only weights are compared.")
    ] = True,
    device: Annotated[str, typer.Option(help="Where the models run.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Check whether two checkpoints, in any formats, compute the same function.

    Keys, shapes and weights are compared first.
    Then both models run, and hidden states and logits are compared.

        llamoe verify llama-2-7b-chat chat      # Meta's folder and the folder made from it
    """
    from .verify import verify as run

    with progress_bar(as_json) as progress:
        found = run(
            a,
            b,
            tokens=tokens,
            rows=rows,
            seed=seed,
            tolerance=tolerance,
            logits=logits,
            device=device,
            progress=progress,
        )
    print_sections(found.as_dict(), found.sections(), as_json)
    same = found.same_weights if found.same_function is None else found.same_function
    if not same:
        raise typer.Exit(1)


def main(args: list[str] | None = None) -> None:
    """Run the command and exit with its status."""
    given = sys.argv[1:] if args is None else args
    # Read here, since errors are JSON too where the options cannot be parsed.
    as_json = "--json" in given
    # transformers' advice about configurations is meant for their authors.
    logging.set_verbosity_error()
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


def _value(choice: StrEnum | None) -> str | None:
    return None if choice is None else choice.value


if __name__ == "__main__":
    main()
