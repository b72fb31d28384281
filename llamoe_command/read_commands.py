"""Commands that write no folder: what a checkpoint is, and whether two are the same."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from .app import app, load_conversion
from .options import AsJson, Quiet, Seed
from .printing import print_sections, progress_bar


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
    plan: Annotated[
        bool, typer.Option("--plan", help="Also say where each part would go on a machine.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(help="For --plan: number of GPUs. The default is those of this machine.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help='For --plan with --gpus: memory of each, such as "24GB". The default is 80GB.'),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(help='For --plan: such as "64GB". The default is what is free on this machine.'),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            help="For --plan: of a weight, 32 or 16, or 8 or 4 as bitsandbytes stores them. The default is what the "
            "files have."
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="<format>",
            help="For --plan: as `llamoe quantize` stores them, int8, int4, or int4:128 with the size of its groups.",
        ),
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(help="For --plan: tokens of the prompt in one pass. The default is all.")
    ] = None,
    headroom: Annotated[
        str | None,
        typer.Option(help='For --plan: kept free of each device, such as "2GB". The default is 4GB.'),
    ] = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train", help="For --plan: a step of training LoRA adapters, with --context tokens in a row."
        ),
    ] = False,
    rank: Annotated[int | None, typer.Option(help="For --train: of the adapters. The default is 8.")] = None,
    adapt_experts: Annotated[
        bool | None,
        typer.Option(
            "--experts/--no-experts", help="For --train: whether routed experts have adapters, too."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For --plan: write the arguments of from_pretrained as JSON."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what a checkpoint is and how much memory it needs.

    Only headers are read, no weights.
    The memory is that of the weights, and of the KV cache for this context and batch.

        llamoe inspect Llama-4-Maverick --context 32768 --batch 4

    With --plan it is said what goes to GPUs, to memory and to disk, and how fast that could run.

        llamoe inspect llama-4-scout --plan --gpus 1 --ram 64GB --quantization int4

    With --train it is said what a step of training adapters takes, and room is left for it.

        llamoe inspect mixtral-int4 --plan --train --gpus 0 --ram 16GB --rank 8

    With --save the plan is written, too, and from_pretrained(folder, **json.load(open("plan.json"))) loads so.

        llamoe inspect llama-4-scout --plan --gpus 4 --save plan.json
    """
    if save and not plan:
        raise ValueError("--save writes a plan: give --plan, too.")
    if save and not save.absolute().parent.is_dir():
        raise ValueError(f"--save {save}: there is no such folder.")
    # A name without a folder may be that of a preset.
    sources = [Path(path)] if os.sep in path else []
    conversion = load_conversion(*sources, is_silent=as_json or quiet)
    machine = {"gpus": gpus, "gpu_memory": gpu_memory, "ram": ram, "bits": bits}
    machine |= {"quantization": quantization, "prefill": prefill, "headroom": headroom}
    machine |= {"train": train, "rank": rank, "adapt_experts": adapt_experts}
    found = conversion.inspect(path, context=context, batch=batch, plan=plan, **machine)
    if save:
        save.write_text(json.dumps(found.placement.arguments(), indent=1) + "\n", encoding="utf-8")
    print_sections(dataclasses.asdict(found), found.sections(), as_json)


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any format.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another checkpoint, of any format.")],
    tokens: Annotated[int, typer.Option(help="Number of random tokens in each row.")] = 32,
    rows: Annotated[int, typer.Option(help="Number of rows.")] = 2,
    seed: Seed = 0,
    logits: Annotated[
        bool,
        typer.Option(help="Whether to run both models, or to compare only their weights and configurations."),
    ] = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check whether two checkpoints, in any formats, hold the same model.

    Keys, shapes and weights are compared first.
    Where they differ, both models run on random tokens, and their outputs are compared.

    The verdict is one of four: every number is equal; the weights are equal within rounding; the weights differ and the
    outputs agree on so many tokens; or the models are different, with the first tensor that differs. The exit status is
    1 for different models, else 0. Tokenizers and generation settings are not compared.

        llamoe verify llama-2-7b-chat chat      # before and after convert
    """
    options = {"tokens": tokens, "rows": rows, "seed": seed, "logits": logits}
    is_silent = as_json or quiet
    conversion = load_conversion(a, b, is_silent=is_silent)
    with progress_bar(is_silent) as progress:
        found = conversion.verify(a, b, **options, progress=progress)
    print_sections(found.as_dict(), found.sections(), as_json)
    if not found.same_function:
        raise typer.Exit(1)
