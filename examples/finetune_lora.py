"""Teach a model by LoRA: a folder of questions and answers in, about pictures or not, an adapter out.

    python examples/finetune_lora.py                                   # a lesson for examples/llamoe-tiny
    python examples/finetune_lora.py --model my_model --data my_data --out my_adapter
    accelerate launch --num_processes 2 examples/finetune_lora.py --data my_data      # on several devices

`my_data/data.jsonl` has an example in each line, {"image": "cat.png", "question": "...", "answer": "..."}, without
"image" where there is no picture, or {"text": "..."} to learn a text as it stands. The last tenth is held out: how many
of its answers the model gives word by word is printed before and after, for each "kind" if lines name one.

Without --data the small model learns "Which shape is bigger?", which it was never asked.

A training that was stopped goes on with the same command. The folder gets `adapter/`, in peft's own format, and the
loss as a picture, `loss.png`.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import shutil
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from training_options import check_options, fail, make_parser

HERE = Path(__file__).resolve().parent
LESSON, LESSON_HELD_OUT = 9000, 1000


def read_arguments() -> argparse.Namespace:
    """Read the command line; what is wrong with it ends the program."""
    parser = make_parser(__doc__, out="finetuned", epochs=4)
    parser.add_argument("--model", default=str(HERE / "llamoe-tiny"), help="folder; default: the small model")
    parser.add_argument("--dropout", type=float, default=0.0, help="of LoRA (default: %(default)s)")
    parser.add_argument("--sft", action="store_true", help="train with TRL's SFTTrainer instead of Trainer")
    arguments = parser.parse_args()
    check_options(parser, arguments)
    if not 0 <= arguments.dropout < 1:
        parser.error(f"argument --dropout: must be at least 0 and below 1, not {arguments.dropout}")
    for package, use in (("matplotlib", "draws the loss"), ("trl", "is what --sft asks for")):
        if (package != "trl" or arguments.sft) and importlib.util.find_spec(package) is None:
            fail(f"{package}, which {use}, is not installed: pip install {package}")
    return arguments


if __name__ == "__main__":
    # Help and mistakes are shown before torch is imported, which takes seconds.
    read_arguments()

import torch
from accelerate import PartialState
from peft import PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import unset_hf_deepspeed_config
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

import llamoe

Example = dict[str, str]


def read_examples(folder: Path) -> list[Example]:
    """The lines of `data.jsonl`; ends the program at a line that is no example, or whose picture is not there."""
    path = folder / "data.jsonl"
    examples = []
    # Other separators of lines may stand within JSON.
    for number, line in enumerate(path.read_text().rstrip("\n").split("\n"), start=1):
        where = f"{path}, line {number}"
        try:
            example = json.loads(line)
        except json.JSONDecodeError as error:
            fail(f"{where} is not JSON: {error}")
        keys = set(example) if isinstance(example, dict) else set()
        if not ({"question", "answer"} <= keys or "text" in keys):
            fail(f'{where} has neither "question" and "answer" nor "text"')
        wrong = [key for key, value in example.items() if not isinstance(value, str)]
        if wrong:
            fail(f'{where}: "{wrong[0]}" is no text')
        if "image" in keys and not (folder / example["image"]).is_file():
            fail(f"{where}: no such picture: {folder / example['image']}")
        examples.append(example)
    if len(examples) < 2:
        fail(f"{path} has {len(examples)} examples; one to learn and one to hold out are the least")
    return examples


def split(examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """What is learnt, and what is held out: the last tenth, one example at least."""
    count = len(examples) - max(1, len(examples) // 10)
    return examples[:count], examples[count:]


class Collator:
    """Makes a batch of examples: chats in the model's own template, where only answers carry a loss.

    Args:
        processor: of the model; a tokenizer for one without a tower.
        folder: of the pictures.
    """

    def __init__(self, processor: Any, folder: Path):
        self.processor, self.folder = processor, folder
        self.tokenizer = getattr(processor, "tokenizer", processor)

    def __call__(self, examples: list[Example]) -> dict[str, torch.Tensor]:
        """Returns inputs padded on the right, and `labels`, each `[examples, longest]`."""
        # A table of TRL's has None where an example has no such key.
        examples = [{key: value for key, value in each.items() if value is not None} for each in examples]
        pictures = [self.pictures(example) for example in examples]
        whole = self.inputs([self.text(example) for example in examples], pictures, "right")
        labels = whole["input_ids"].masked_fill(whole["attention_mask"] == 0, -100)
        for row, example in enumerate(examples):
            if "text" not in example:
                prompt = self.inputs([self.prompt(example)], [pictures[row]], "right")["input_ids"]
                labels[row, : prompt.shape[1]] = -100
        return {**whole, "labels": labels}

    def pictures(self, example: Example) -> list[Any]:
        """The picture of an example, if it has one; ends the program where it cannot be read."""
        try:
            return [llamoe.read_picture(self.folder / example["image"])] if "image" in example else []
        except OSError as error:
            fail(error)

    def prompt(self, example: Example) -> str:
        """The chat up to the answer."""
        content: Any = example["question"]
        if "image" in example:
            content = [{"type": "image"}, {"type": "text", "text": content}]
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

    def text(self, example: Example) -> str:
        """The whole chat, or the text as it stands."""
        if "text" in example:
            return f"{self.tokenizer.bos_token or ''}{example['text']}{self.tokenizer.eos_token}"
        return f"{self.prompt(example)}{example['answer']}{self.tokenizer.eos_token}"

    def inputs(self, texts: list[str], pictures: list[list[Any]], padding_side: str) -> Any:
        """Tokens and pixels. The template has written the first token already."""
        options: dict[str, Any] = {"padding": True, "padding_side": padding_side, "add_special_tokens": False}
        if any(pictures):
            options["images"] = pictures
        return self.processor(text=texts, return_tensors="pt", **options)


@torch.inference_mode()
def count_right(model: Any, collator: Collator, examples: list[Example]) -> dict[str, float]:
    """For each kind of question the fraction of answers that are given word by word."""
    right = defaultdict(list)
    asked = [example for example in examples if "text" not in example]
    for start in range(0, len(asked), 32):
        batch = asked[start : start + 32]
        prompts = [collator.prompt(example) for example in batch]
        pictures = [collator.pictures(example) for example in batch]
        inputs = collator.inputs(prompts, pictures, "left").to(model.device)
        longest = max(len(collator.tokenizer(example["answer"])["input_ids"]) for example in batch)
        given = model.generate(**inputs, max_new_tokens=longest + 1, do_sample=False)
        texts = collator.tokenizer.batch_decode(
            given[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for example, text in zip(batch, texts, strict=True):
            right[example.get("kind", "answers")].append(text.strip() == example["answer"].strip())
    return {kind: sum(values) / len(values) for kind, values in right.items()}


class StopAtNan(TrainerCallback):
    """Ends a training whose loss is no number: all that follows would be lost."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Called by Trainer with each line of its log."""
        logs = logs or {}
        loss = logs.get("loss", logs.get("train_loss", 0.0))
        if not math.isfinite(loss):
            fail(
                f"the loss is {loss} at step {state.global_step}: try a smaller --learning-rate and another --out"
            )


def load(folder: str, dtype: str) -> tuple[Any, Any]:
    """The model, and its processor; for a model without a tower its tokenizer."""
    try:
        # Folders of transformers' own LLaMA and Llama 4 are read as llamoe's models.
        with llamoe.adopt():
            has_tower = getattr(AutoConfig.from_pretrained(folder), "vision_config", None) is not None
            processor = (AutoProcessor if has_tower else AutoTokenizer).from_pretrained(folder)
            auto_class = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
            model = auto_class.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        fail(f"{folder}: {error}")
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer.eos_token is None:
        fail(f"{folder}: its tokenizer has no eos_token, by which an answer ends")
    # LLaMA 1 and 2 have none; padding carries no loss.
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, processor


def check_run(arguments: argparse.Namespace, data: Path) -> None:
    """Write down what is trained on what; ends the program where the folder has another training in it."""
    run = {name: str(value) for name, value in vars(arguments).items() if name not in ("out", "data")}
    run["processes"] = str(PartialState().num_processes)
    run["data.jsonl"] = hashlib.sha256((data / "data.jsonl").read_bytes()).hexdigest()
    path = arguments.out / "run.json"
    if (arguments.out / "adapter").exists() or (arguments.out / "model").exists():
        fail(f"{arguments.out} holds a training that is ready; name another folder with --out")
    if any(arguments.out.rglob("checkpoint-*")):
        begun = json.loads(path.read_text())
        other = [
            f"{name} {begun.get(name)}, not {value}"
            for name, value in run.items()
            if begun.get(name) != value
        ]
        if other:
            fail(f"{arguments.out} holds a training with {'; '.join(other)}: name another folder with --out")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1))


def lesson(out: Path, name: str, train: int, held_out: int) -> Path:
    """The folder of one of the small model's lessons, `tiny/lessons.py`, drawn if it is not there."""
    folder = out / "lesson"
    if not folder.is_dir():
        sys.path.insert(0, str(HERE / "tiny"))
        import lessons  # pyright: ignore[reportMissingImports]

        half = out / "lesson-half-drawn"
        shutil.rmtree(half, ignore_errors=True)
        print(f"drawing {train + held_out} pictures")
        lessons.write_lesson(half, getattr(lessons, name), train, held_out)
        half.rename(folder)
    return folder


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint; Trainer writes `trainer_state.json` last, and removes none that is cut short."""
    for path in folder.glob("checkpoint-*"):
        if not (path / "trainer_state.json").is_file():
            shutil.rmtree(path)
    return get_last_checkpoint(str(folder)) if folder.is_dir() else None


def make_trainer(
    arguments: argparse.Namespace, model: Any, collator: Collator, examples: list[Example]
) -> Trainer:
    """Trainer, or TRL's, with the same arguments."""
    options: dict[str, Any] = {
        "output_dir": str(arguments.out / "checkpoints"),
        "num_train_epochs": arguments.epochs,
        "per_device_train_batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "logging_steps": 10,
        "logging_first_step": True,
        "save_steps": arguments.save_every,
        "save_total_limit": 2,
        "seed": arguments.seed,
        "use_cpu": not torch.accelerator.is_available(),
        "remove_unused_columns": False,
        "report_to": [],
        # Else a loss that is no number is logged as the last one that was.
        "logging_nan_inf_filter": False,
    }
    given: dict[str, Any] = {"train_dataset": examples, "data_collator": collator, "callbacks": [StopAtNan()]}
    if not arguments.sft:
        training = TrainingArguments(**options)
        # Rows of a batch may have pictures or not, and cannot be dealt out: several cards need `accelerate launch`.
        training._n_gpu = min(training.n_gpu, 1)
        return Trainer(model, training, **given)
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    # TRL's own defaults are another training. The collator makes batches of the examples as they are.
    plain = {"bf16": False, "gradient_checkpointing": False, "router_aux_loss_coef": 0.0, "max_length": None}
    config = SFTConfig(**options, **plain, dataset_kwargs={"skip_prepare_dataset": True})
    columns = dict.fromkeys(key for example in examples for key in example)
    given["train_dataset"] = Dataset.from_list([{key: each.get(key) for key in columns} for each in examples])
    return SFTTrainer(model, config, processing_class=collator.processor, **given)


def draw_losses(history: list[dict[str, Any]], path: Path) -> None:
    """The loss over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axes.semilogy(*zip(*points, strict=True))
    axes.set(xlabel="step", ylabel="loss")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Train, and print what the adapter changed."""
    arguments = read_arguments()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    state = PartialState(cpu=not torch.accelerator.is_available())
    set_seed(arguments.seed)
    with state.main_process_first():
        data = arguments.data or lesson(arguments.out, "ask_for_the_bigger", LESSON, LESSON_HELD_OUT)
        examples = read_examples(data)
    if state.is_main_process:
        check_run(arguments, data)
    state.wait_for_everyone()
    learnt, held_out = split(examples)
    model, processor = load(arguments.model, arguments.dtype)
    collator = Collator(processor, data)
    if any("image" in example for example in examples) and collator.tokenizer is processor:
        fail(f"{arguments.model} has no vision tower, and {data / 'data.jsonl'} names pictures")
    model = get_peft_model(model, llamoe.lora_config(model, r=arguments.rank, dropout=arguments.dropout))
    model.to(state.device)
    trained, total = model.get_nb_trainable_parameters()
    state.print(
        f"training {trained:,} of {total:,} weights ({trained / total:.1%}) on {len(learnt)} examples"
    )
    before = count_right(model.eval(), collator, held_out) if state.is_main_process else {}
    trainer = make_trainer(arguments, model, collator, learnt)
    trainer.train(resume_from_checkpoint=last_checkpoint(arguments.out / "checkpoints"))
    # Processes that share the weights gather them together.
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not state.is_main_process:
        return
    half = arguments.out / "adapter-half-written"
    shutil.rmtree(half, ignore_errors=True)
    model.save_pretrained(half, state_dict=weights)
    # What was saved is asked, over a model that no other process has a part of; ZeRO-3 would share this one, too.
    unset_hf_deepspeed_config()
    model = PeftModel.from_pretrained(load(arguments.model, arguments.dtype)[0], half).to(state.device)
    after = count_right(model.eval(), collator, held_out)
    asked = Counter(example.get("kind", "answers") for example in held_out if "text" not in example)
    for kind, share in after.items():
        print(f"{kind}: {before[kind]:.1%} of {asked[kind]} held-out answers right before, {share:.1%} now")
    draw_losses(trainer.state.log_history, arguments.out / "loss.png")
    half.rename(arguments.out / "adapter")
    shutil.rmtree(arguments.out / "checkpoints")
    print(f"wrote {arguments.out / 'adapter'} and {arguments.out / 'loss.png'}")


if __name__ == "__main__":
    main()
