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
            help="Tokens in the KV cache. The default is 8192, or the model's limit if lower; 1024 with --train."
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(help="Number of sequences in the KV cache, or in a training step.")
    ] = 1,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Also plan the device of each part of the model: GPUs, memory or disk."),
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(help="For --plan: number of GPUs. The default is those of this machine.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help='For --plan with --gpus: memory of each GPU, such as "24GB". The default is 80GB.'),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(
            help='For --plan: main memory, such as "64GB". The default is the free memory of this machine.'
        ),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(help="For --plan: bits of a plain weight, 32 or 16. The default is that of the files."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="<format>",
            help="For --plan: format of the weights after `llamoe quantize`: int8, int4, or int4:128 for groups of 128 "
            "inputs. The default is that of the files.",
        ),
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(help="For --plan: most tokens of the prompt in one forward pass. The default is all."),
    ] = None,
    headroom: Annotated[
        str | None,
        typer.Option(
            help='For --plan: memory to keep free on each device, such as "2GB". The default is 4GB.'
        ),
    ] = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train", help="For --plan: keep memory for training LoRA, --batch rows of --context tokens."
        ),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(help="For --train: rank of the adapters. The default is 8.")
    ] = None,
    adapt_experts: Annotated[
        bool | None,
        typer.Option(
            "--experts/--no-experts",
            help="For --train: whether routed experts get adapters, too. They do by default.",
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

    It reads the headers of the files and no weights. The memory is that of the weights, and of the KV cache for
    --context and --batch.

        llamoe inspect Llama-4-Maverick --context 32768 --batch 4

    --plan shows which parts go to GPUs, to memory and to disk, and estimates the speed.

        llamoe inspect llama-4-scout --plan --gpus 1 --ram 64GB --quantization int4

    --train shows the memory of a training step with LoRA adapters, and keeps it free.

        llamoe inspect mixtral-int4 --plan --train --gpus 0 --ram 16GB --rank 8

    --save writes the plan to a file; from_pretrained(folder, **json.load(open("plan.json"))) loads the model by it.

        llamoe inspect llama-4-scout --plan --gpus 4 --save plan.json
    """
    if save and not plan:
        raise ValueError("--save needs --plan.")
    if save and not save.absolute().parent.is_dir():
        raise ValueError(f"--save {save}: there is no such folder.")
    # A name without a path separator may be a preset, not a file.
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
    tokens: Annotated[int, typer.Option(help="Random tokens in each sequence that both models read.")] = 32,
    rows: Annotated[int, typer.Option(help="Number of sequences.")] = 2,
    seed: Seed = 0,
    logits: Annotated[
        bool,
        typer.Option(
            help="Run both models if their weights differ, or compare only weights and configurations."
        ),
    ] = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check whether two checkpoints, in any formats, hold the same model.

    Names, shapes and values of the weights are compared first. If they differ, both models run on random tokens, and
    their outputs are compared.

    The verdict is one of four: every number is equal; the weights are equal within rounding; the weights differ and the
    outputs agree on a number of tokens; or the models are different, with the first tensor that differs. The exit
    status is 1 for different models, else 0. Tokenizers and generation settings are not compared.

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
