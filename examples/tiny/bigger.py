"""A lesson that the small model never had, as a folder of pictures and a file of questions: which shape is bigger?

Every second question is one that it knows, so that it does not forget. `examples/finetune_lora.py` teaches it.
"""

import json
import random
from pathlib import Path

import evaluate
import grammar
import questions
import shapes

WORDINGS = (
    "Which shape is bigger?",
    "Which shape is larger?",
    "Which one is bigger?",
    "Which of the two is larger?",
    "What is the bigger shape?",
    "Name the larger shape.",
    "Tell me which shape is the bigger one.",
    "Which is the larger of the shapes?",
)
# Held out with their pictures.
OTHER_WORDINGS = ("Which of them is bigger?", "What's the larger one?", "Which object is the bigger one?")
# About the area of each shape whose farthest point is one away from its middle.
AREA = {"circle": 3.1, "square": 2.0, "triangle": 1.3, "star": 1.3}
# Longest side of a picture; the processor of the small model would make them smaller yet.
SIDE = 128


def draw_two_sizes(rng: random.Random) -> tuple[shapes.Scene, str]:
    """A plain scene of two shapes of which one is both wider and larger by far, and the answer."""
    while True:
        scene = shapes.random_scene(rng, 2, frozenset())
        small, big = sorted(scene.items, key=lambda item: item.radius)
        area, smaller_area = (AREA[item.shape] * item.radius**2 for item in (big, small))
        if big.radius > 1.2 * small.radius and area > 1.3 * smaller_area:
            return scene, f"the {big.name} is bigger."


def write_lesson(folder: Path, train: int, held_out: int, seed: int = 0) -> None:
    """Write `data.jsonl`, and the pictures that it names.

    Args:
        folder: written anew.
        train: number of examples to learn.
        held_out: number of examples behind them: half of the new questions, and all known ones, in wordings that are
            not among the others.
        seed: of everything.
    """
    folder.mkdir(parents=True)
    lines = []
    for number in range(train + held_out):
        rng = random.Random(f"bigger/{seed}/{number}")
        if number % 2 == 0:
            scene, answer = draw_two_sizes(rng)
            is_other = number >= train and number % 4 == 0
            question = rng.choice(OTHER_WORDINGS if is_other else WORDINGS)
            kind = "bigger"
        else:
            kind, asked = "known", None
            write = grammar.write_question if number < train else evaluate.write_question("near")
            while asked is None:
                scene = shapes.random_scene(rng)
                asked = questions.ask(rng, scene, rng.choice(questions.KINDS), write)
            question, answer = asked
        scene.picture.thumbnail((SIDE, SIDE))
        name = f"{number:05}.png"
        scene.picture.save(folder / name)
        lines.append(json.dumps({"image": name, "question": question, "answer": answer, "kind": kind}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
