"""Measure a model made by `train.py`: exact answers about pictures, and in wordings, that it was not trained on.

Everything works as for a user: `AutoProcessor`, `AutoModelForImageTextToText`, chat template, greedy `generate`. An
answer counts only if it equals the expected one, character by character.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grammar
import questions
import shapes
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import llamoe  # noqa: F401  (registers the model types)

BATCH_SIZE = 64
PLAIN = "none of these"
WORDINGS = ("trained", "near", "far")


@dataclass(frozen=True)
class Case:
    """One question about one picture, with the expected answer."""

    kind: str
    stresses: frozenset[str]
    picture: Image.Image
    question: str
    answer: str


def write_question(wording: str):
    """Returns how a question is written: in wordings of the training, or in those that it never saw."""
    if wording == "trained":
        return grammar.write_question

    def write(rng: random.Random, kind: str, slots: questions.Slots) -> str:
        frame = rng.choice(grammar.HELD_OUT[kind][wording])
        return questions.type_carelessly(rng, questions.fill(rng, frame, slots))

    return write


def draw_cases(count: int, wording: str, seed: str = "held out") -> list[Case]:
    """Draw `count` scenes with one question each; all kinds of `questions.KINDS` are equally frequent.

    Scenes of the training have seeds of another form, so that none is among them.
    """
    cases: list[Case] = []
    number = 0
    while len(cases) < count:
        rng = random.Random(f"{seed}/{wording}/{number}")
        number += 1
        stresses = shapes.random_stresses(rng)
        scene = shapes.random_scene(rng, stresses=stresses)
        kind = questions.KINDS[len(cases) % len(questions.KINDS)]
        found = questions.ask(rng, scene, kind, write_question(wording))
        if found:
            cases.append(Case(kind, stresses, scene.picture, *found))
    return cases


def prompts(model, processor, pictures: list[Image.Image], questions: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the model's inputs batch by batch: one question about each picture, padded on the left."""
    for start in range(0, len(questions), BATCH_SIZE):
        rows = slice(start, start + BATCH_SIZE)
        contents = [
            [{"type": "image", "image": picture}, {"type": "text", "text": question}]
            for picture, question in zip(pictures[rows], questions[rows], strict=True)
        ]
        yield processor.apply_chat_template(
            [[{"role": "user", "content": content}] for content in contents],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(model.device, dtype=model.dtype)


@torch.inference_mode()
def answer(model, processor, pictures: list[Image.Image], questions: list[str]) -> list[str]:
    """Ask one question about each picture."""
    answers = []
    for inputs in prompts(model, processor, pictures, questions):
        generated = model.generate(**inputs)
        new_tokens = generated[:, inputs["input_ids"].shape[1] :]
        answers += processor.batch_decode(new_tokens, skip_special_tokens=True)
    return [text.strip() for text in answers]


@torch.inference_mode()
def expert_shares(model, processor, cases: list[Case]) -> list[list[float]]:
    """For each mixture layer, each expert's share of the prompts' tokens."""
    pictures, questions = [case.picture for case in cases], [case.question for case in cases]
    loads = [
        model(**inputs, output_expert_load=True).expert_load
        for inputs in prompts(model, processor, pictures, questions)
    ]
    load = torch.stack(loads).sum(0)
    return (load / load.sum(-1, keepdim=True)).tolist()


def accuracy(model, processor, cases: list[Case]) -> dict[str, float]:
    """Fraction of exact answers for each kind of question, for each stress of pictures, and for "all"."""
    texts = answer(model, processor, [case.picture for case in cases], [case.question for case in cases])
    right = defaultdict(list)
    for case, text in zip(cases, texts, strict=True):
        for key in ("all", case.kind, *(case.stresses or [PLAIN])):
            right[key].append(text == case.answer)
    return {key: sum(values) / len(values) for key, values in right.items()}


def report(folder: str | Path, count: int, dtype: str = "auto") -> str:
    """The accuracy of the model in a folder as a table, and how its experts share the tokens.

    Raises:
        OSError, ValueError: there is no model in the folder, or it cannot be read.
    """
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    model.eval()
    cases = {wording: draw_cases(count, wording) for wording in WORDINGS}
    lines = [table({wording: accuracy(model, processor, drawn) for wording, drawn in cases.items()}), ""]
    for layer, shares in enumerate(expert_shares(model, processor, cases["trained"])):
        lines.append(f"mixture {layer}: {', '.join(f'{share:.0%}' for share in shares)} of the tokens")
    return "\n".join(lines)


def table(measured: dict[str, dict[str, float]]) -> str:
    """A Markdown table with a row for each kind of question and each stress of pictures that occurred."""
    lines = ["| | trained wordings | wordings of others | unusual ones |", "|:--|--:|--:|--:|"]
    for group, keys in (("questions", ("all", *questions.KINDS)), ("pictures", (*shapes.STRESSES, PLAIN))):
        lines.append(f"| **{group}** | | | |")
        for key in keys:
            if any(key in column for column in measured.values()):
                cells = (f"{column[key]:.1%}" if key in column else "-" for column in measured.values())
                lines.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(Path(__file__).parents[1] / "llamoe-tiny", 3840))
