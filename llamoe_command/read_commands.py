"""The commands `llamoe inspect` and `llamoe verify`, which only read checkpoints."""

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
        typer.Option(
            help="Number of tokens in the KV cache. The default is 8192, or the model's limit if that is lower; with "
            "--train 1024."
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(help="Number of sequences in the KV cache, or in a training step.")
    ] = 1,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Also plan where each part of the model goes: to GPUs, to memory or to disk."
        ),
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(help="For --plan: number of GPUs. The default is that of this machine.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help='For --plan with --gpus: memory of each GPU, such as "24GB". The default is 80GB.'),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(
            help='For --plan: main memory, such as "64GB". The default is the memory of this machine that is free now.'
        ),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(help="For --plan: bits of a weight, 32, 16, 8 or 4. The default is that of the files."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="<format>",
            help="For --plan: format of the weights after `llamoe quantize`: int8, int4, or int4:128 for groups of 128 "
            "inputs. The default is the format of the files.",
        ),
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(help="For --plan: most tokens of the prompt in one forward pass. The default is all."),
    ] = None,
    headroom: Annotated[
        str | None,
        typer.Option(
            help='For --plan: memory of each device that stays free, such as "2GB". The default is 4GB.'
        ),
    ] = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="For --plan: leave memory for training LoRA adapters with --batch rows of --context tokens.",
        ),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(help="For --train: rank of the adapters. The default is 8.")
    ] = None,
    adapt_experts: Annotated[
        bool | None,
        typer.Option(
            "--experts/--no-experts",
            help="For --train: whether routed experts get adapters, too. By default they do.",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For --plan: write the arguments for from_pretrained to FILE, as JSON."
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what a checkpoint is and how much memory it needs.

    Only the headers of the files are read. The memory is that of the weights, and of the KV cache for --context and
    --batch.

        llamoe inspect Llama-4-Maverick --context 32768 --batch 4

    --plan shows which parts of the model go to GPUs, to memory and to disk, and estimates the speed.

        llamoe inspect llama-4-scout --plan --gpus 1 --ram 64GB --quantization int4

    --train shows how much memory a training step with LoRA adapters takes, and leaves it free.

        llamoe inspect mixtral-int4 --plan --train --gpus 0 --ram 16GB --rank 8

    --save writes the plan to a file. from_pretrained(folder, **json.load(open("plan.json"))) loads the model as
    planned.

        llamoe inspect llama-4-scout --plan --gpus 4 --save plan.json
    """
    if save and not plan:
        raise ValueError("--save needs --plan.")
    # A name without a path separator may be that of a preset.
    sources = [Path(path)] if os.sep in path else []
    conversion = load_conversion(*sources, is_silent=as_json or quiet)
    machine = {"gpus": gpus, "gpu_memory": gpu_memory, "ram": ram, "bits": bits}
    machine |= {"quantization": quantization, "prefill": prefill, "headroom": headroom}
    machine |= {"train": train, "rank": rank, "adapt_experts": adapt_experts}
    report = conversion.inspect(path, context=context, batch=batch, plan=plan, **machine)
    if save:
        save.write_text(json.dumps(report.placement.arguments(), indent=1) + "\n", encoding="utf-8")
    print_sections(dataclasses.asdict(report), report.sections(), as_json)


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any format.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another checkpoint, of any format.")],
    tokens: Annotated[
        int, typer.Option(help="Number of random tokens in each sequence that both models read.")
    ] = 32,
    rows: Annotated[int, typer.Option(help="Number of sequences.")] = 2,
    seed: Seed = 0,
    logits: Annotated[
        bool,
        typer.Option(
            help="Whether to run both models if their weights differ; else compare only weights and configurations."
        ),
    ] = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check whether two checkpoints, in any formats, hold the same model.

    Names, shapes and values of the weights are compared first. If they differ, both models read random tokens, and
    their outputs are compared. Tokenizers and generation settings are not compared.

    There are four verdicts: every number is equal; the weights are equal within rounding; the weights differ but the
    outputs agree; or the models are different. For different models the first tensor that differs is named, and the
    exit status is 1, else 0.

        llamoe verify llama-2-7b-chat chat      # before and after convert
    """
    options = {"tokens": tokens, "rows": rows, "seed": seed, "logits": logits}
    is_silent = as_json or quiet
    conversion = load_conversion(a, b, is_silent=is_silent)
    with progress_bar(is_silent) as progress:
        report = conversion.verify(a, b, **options, progress=progress)
    print_sections(report.as_dict(), report.sections(), as_json)
    if not report.same_function:
        raise typer.Exit(1)
