"""Measure the small model: the share of exact answers about pictures that it was not trained on.

    python examples/tiny/examine.py              # of `examples/llamoe-tiny`

An answer counts only if each of its characters is right.
"""

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from questions import WORDINGS, ask
from shapes import draw_scene
from transformers import AutoModelForImageTextToText, AutoProcessor

import llamoe  # noqa: F401  (registers the model types)

FOLDER = Path(__file__).parents[1] / "llamoe-tiny"
COUNT = 1400
BATCH_SIZE = 50

# A picture, a question about it, the answer, and the kind of the question.
Example = tuple[Image.Image, str, str, str]


def draw_examples(count: int, seed: str = "held out") -> list[Example]:
    """Draw pictures with a question each, of all kinds equally often, from seeds that training does not use."""
    examples, kinds = [], list(WORDINGS)
    for number in range(count):
        rng, kind = random.Random(f"{seed}/{number}"), kinds[number % len(kinds)]
        # Questions about places need two or three shapes.
        scene = draw_scene(rng, count=rng.randint(2, 3) if kind in ("which", "where") else None)
        examples.append((scene.picture, *ask(rng, scene, (kind,))))
    return examples


@torch.inference_mode()
def answer(model: Any, processor: Any, pictures: list[Image.Image], questions: list[str]) -> list[str]:
    """Ask one question about each picture, and return the answers."""
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
        ids = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
        answers += processor.batch_decode(ids, skip_special_tokens=True)
    return [text.strip() for text in answers]


def accuracy(model: Any, processor: Any, examples: list[Example]) -> dict[str, float]:
    """Return the share of exact answers for each kind of question, and for "all"."""
    answers = answer(
        model, processor, [example[0] for example in examples], [example[1] for example in examples]
    )
    right = defaultdict(list)
    for (_, _, expected, kind), text in zip(examples, answers, strict=True):
        for key in ("all", kind):
            right[key].append(text == expected)
    return {key: sum(values) / len(values) for key, values in right.items()}


def report(folder: Path) -> str:
    """Return a Markdown table of the accuracy of the model in a folder."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval()
    measured = accuracy(model, processor, draw_examples(COUNT))
    rows = [f"| {kind} | {share:.1%} |" for kind, share in measured.items()]
    return "\n".join([f"| {COUNT:,} questions | right |", "|:--|--:|", *rows])


if __name__ == "__main__":
    print(report(FOLDER))
