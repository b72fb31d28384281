"""Measure a model made by `train_tiny.py`: exact answers on scenes and on phrasings that it was not trained on.

Everything works as for a user: `AutoProcessor`, `AutoModelForImageTextToText`, chat template, greedy `generate`. An
answer counts only if it equals the expected one, character by character.
"""

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Accuracy of a checkpoint made by train_tiny.py.")
    parser.add_argument("--model", default="examples/llamoe-tiny", help="default: %(default)s")
    parser.add_argument("--count", type=int, default=800, help="questions per column (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    if arguments.count < 1:
        parser.error(f"argument --count: must be at least 1, not {arguments.count}")
    return arguments


if __name__ == "__main__":
    # Help and mistakes are shown before torch is imported, which takes seconds.
    read_arguments()

import questions
import shapes
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import llamoe  # noqa: F401  (registers the model types)

# Seed of the held-out scenes. Training numbers its scenes from zero with seeds of another form, so they never coincide.
SEED = "held out"
BATCH_SIZE = 64


@dataclass(frozen=True)
class Case:
    """One question about one picture, with the expected answer."""

    kind: str
    picture: Image.Image
    question: str
    answer: str


def held_out_cases(count: int, phrasings: dict[str, tuple[str, ...]], seed: str = SEED) -> list[Case]:
    """Draw `count` new scenes with one question each; all kinds of `questions.KINDS` are equally frequent."""
    cases = []
    number = 0
    while len(cases) < count:
        rng = random.Random(f"{seed}/{number}")
        number += 1
        scene = shapes.random_scene(rng)
        kind = questions.KINDS[len(cases) % len(questions.KINDS)]
        found = questions.ask(rng, scene, kind, phrasings)
        if found:
            cases.append(Case(kind, scene.picture, *found))
    return cases


@torch.inference_mode()
def answer(model, processor, pictures: list[Image.Image], questions: list[str]) -> list[str]:
    """Ask one question about each picture; a batch is padded on the left, as generation needs."""
    answers = []
    for start in range(0, len(questions), BATCH_SIZE):
        rows = slice(start, start + BATCH_SIZE)
        contents = [
            [{"type": "image", "image": picture}, {"type": "text", "text": question}]
            for picture, question in zip(pictures[rows], questions[rows], strict=True)
        ]
        inputs = processor.apply_chat_template(
            [[{"role": "user", "content": content}] for content in contents],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(model.device, dtype=model.dtype)
        generated = model.generate(**inputs, do_sample=False, max_new_tokens=48)
        new_tokens = generated[:, inputs["input_ids"].shape[1] :]
        answers += processor.batch_decode(new_tokens, skip_special_tokens=True)
    return [text.strip() for text in answers]


def accuracy(model, processor, cases: list[Case]) -> dict[str, float]:
    """Fraction of exact answers for each kind of question, and for all cases under "all"."""
    texts = answer(model, processor, [case.picture for case in cases], [case.question for case in cases])
    right: dict[str, list[bool]] = {"all": []}
    for case, text in zip(cases, texts, strict=True):
        for key in ("all", case.kind):
            right.setdefault(key, []).append(text == case.answer)
    return {key: sum(values) / len(values) for key, values in right.items()}


def report(folder: str, count: int, dtype: str = "auto") -> tuple[float, float]:
    """Print a row for each kind of question that was asked; return the accuracy on new pictures and on new phrasings.

    Raises:
        OSError, ValueError: there is no model in the folder, or it cannot be read.
    """
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    model.eval()
    pictures = accuracy(model, processor, held_out_cases(count, questions.TRAINED))
    phrasings = accuracy(
        model, processor, held_out_cases(count, questions.HELD_OUT, seed=f"{SEED} phrasings")
    )
    print(f"{'question':<10}{'new pictures':>14}{'and new phrasings':>20}   ({count} each, {model.dtype})")
    # Fewer questions than kinds leave some kinds out.
    for kind in (kind for kind in (*questions.KINDS, "all") if kind in pictures):
        print(f"{kind:<10}{pictures[kind]:>14.1%}{phrasings[kind]:>20.1%}")
    return pictures["all"], phrasings["all"]


def main() -> None:
    """Print the table."""
    arguments = read_arguments()
    try:
        report(arguments.model, arguments.count, arguments.dtype)
    except (OSError, ValueError) as error:
        is_there = Path(arguments.model).exists()
        reason = " ".join(str(error).split()) if is_there else "no such folder, nor such a model in reach"
        print(f"evaluate_tiny: {arguments.model}: {reason}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
