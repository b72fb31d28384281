"""Teach a decoder to see with a tower that it never met: LLaMA and MetaCLIP, joined by `llamoe assemble`.

    llamoe assemble my_llama my_metaclip joined
    python examples/align_vision.py --model joined --data my_captions --out aligned

Two stages, as LLaVA's (Liu et al. 2023, arXiv 2304.08485). First only what stands between the two learns: the tower's
adapter and the projector. Then LoRA on the decoder learns with them. `my_captions` is a folder as `finetune_lora.py`
reads it; the last tenth is held out. The folder gets `model/`, a whole checkpoint with all that was learnt in its
weights, and the loss of both stages.

Without --model the small model's decoder and tower are joined anew, with adapter and projector drawn at random, and
learn captions of shapes. A training that was stopped goes on with the same command.
"""

import argparse
import copy
import shutil
from pathlib import Path
from typing import Any

from training_options import check_options, fail, make_parser

HERE = Path(__file__).resolve().parent
CAPTIONS, CAPTIONS_HELD_OUT = 5400, 600


def read_arguments() -> argparse.Namespace:
    """Read the command line; what is wrong with it ends the program."""
    parser = make_parser(__doc__, out="aligned", epochs=3)
    parser.add_argument("--model", help="folder of a joined model; default: the small model's parts")
    arguments = parser.parse_args()
    arguments.sft = False
    check_options(parser, arguments)
    return arguments


if __name__ == "__main__":
    # Help and mistakes are shown before torch is imported, which takes seconds.
    read_arguments()

import torch
from finetune_lora import (
    Collator,
    Example,
    check_run,
    count_right,
    draw_losses,
    last_checkpoint,
    lesson,
    load,
    make_trainer,
    read_examples,
    split,
)
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import set_seed

import llamoe
from llamoe.conversion import assemble

# The modules between tower and decoder.
BETWEEN = ("vision_adapter", "multi_modal_projector")


def join(out: Path, seed: int) -> Path:
    """The small model's decoder and tower, joined anew, in a folder; nothing between them knows anything."""
    folder = out / "joined"
    if not folder.is_dir():
        half = out / "half-joined"
        shutil.rmtree(half, ignore_errors=True)
        assemble(HERE / "llamoe-tiny", HERE / "llamoe-tiny", half, seed=seed, max_tiles=1)
        model, _ = load(str(half), "float32")
        # The tower brought its own adapter.
        for name, weight in between(model).items():
            weight.data.normal_(std=0.06, generator=torch.Generator().manual_seed(seed + len(name)))
        model.save_pretrained(half)
        half.rename(folder)
    return folder


def between(model: Any) -> dict[str, torch.nn.Parameter]:
    """The weights between tower and decoder, by name."""
    return {name: weight for name, weight in model.named_parameters() if set(BETWEEN) & set(name.split("."))}


def stage(
    number: int, arguments: argparse.Namespace, model: Any, collator: Collator, learnt: list[Example]
) -> None:
    """Train what may learn, from the last checkpoint of this stage if there is one."""
    own = copy.copy(arguments)
    own.out = arguments.out / f"stage{number}"
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    print(f"stage {number}: training {trained:,} weights")
    trainer = make_trainer(own, model, collator, learnt)
    trainer.train(resume_from_checkpoint=last_checkpoint(own.out / "checkpoints"))
    draw_losses(trainer.state.log_history, arguments.out / f"loss_stage{number}.png")


def main() -> None:
    """Train both stages, and print what each changed."""
    arguments = read_arguments()
    set_seed(arguments.seed)
    data = arguments.data or lesson(arguments.out, "ask_for_captions", CAPTIONS, CAPTIONS_HELD_OUT)
    examples = read_examples(data)
    check_run(arguments, data)
    learnt, held_out = split(examples)
    model, processor = load(arguments.model or str(join(arguments.out, arguments.seed)), arguments.dtype)
    collator = Collator(processor, data)
    if collator.tokenizer is processor or not between(model):
        fail(f"{arguments.model} has no vision tower: join one with it, llamoe assemble DECODER TOWER TARGET")

    def tell(when: str) -> None:
        for kind, share in count_right(model.eval(), collator, held_out).items():
            print(f"{when}: {share:.1%} of the {kind} right")

    first = arguments.out / "stage1.safetensors"
    if first.exists():
        model.load_state_dict(load_file(first), strict=False)
    else:
        tell("before")
        model.requires_grad_(False)
        for weight in between(model).values():
            weight.requires_grad_(True)
        stage(1, arguments, model, collator, learnt)
        half = first.with_suffix(".part")
        save_file({name: weight.detach() for name, weight in between(model).items()}, half)
        half.rename(first)
        tell("after stage 1")
    config = llamoe.lora_config(model, r=arguments.rank, modules_to_save=list(BETWEEN))
    adapted = get_peft_model(model, config)
    stage(2, arguments, adapted, collator, learnt)
    model = adapted.merge_and_unload()
    tell("after stage 2")
    half = arguments.out / "model-half-written"
    shutil.rmtree(half, ignore_errors=True)
    model.save_pretrained(half)
    processor.save_pretrained(half)
    half.rename(arguments.out / "model")
    first.unlink()
    for number in (1, 2):
        shutil.rmtree(arguments.out / f"stage{number}", ignore_errors=True)
    print(f"wrote {arguments.out / 'model'}")


if __name__ == "__main__":
    main()
