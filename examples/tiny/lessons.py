"""Lessons as folders of pictures with a file of questions, for `examples/finetune_lora.py` and `align_vision.py`.

python examples/tiny/lessons.py lesson        # which shape is bigger?
python examples/tiny/lessons.py captions
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import examine
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
    "What is the larger one?",
    "What's bigger here?",
    "Bigger shape?",
    "Which is bigger?",
)
# Held out with their pictures.
OTHER_WORDINGS = ("Which of them is bigger?", "Which figure is larger?", "Which object is the bigger one?")
# About the area of each shape whose farthest point is one away from its middle.
AREA = {"circle": 3.1, "square": 2.0, "triangle": 1.3, "star": 1.3}
# Longest side of a picture; the processor of the small model would make them smaller yet.
SIDE = 128

# Scene, question, answer, and the kind of question.
Example = tuple[shapes.Scene, str, str, str]


def draw_two_sizes(rng: random.Random) -> tuple[shapes.Scene, str]:
    """A plain scene of two shapes of which one is both wider and larger by far, and the answer."""
    while True:
        scene = shapes.random_scene(rng, 2, frozenset())
        small, big = sorted(scene.items, key=lambda item: item.radius)
        area, smaller_area = (AREA[item.shape] * item.radius**2 for item in (big, small))
        if big.radius > 1.2 * small.radius and area > 1.3 * smaller_area:
            return scene, f"the {big.name}."


def ask_for_the_bigger(rng: random.Random, number: int, is_held_out: bool) -> Example:
    """Which shape is bigger? The small model never had this lesson.

    Every second question is one that it knows, so that it does not forget. Of those that are held out, half of the new
    ones and all known ones are in wordings that are not among the others.
    """
    if number % 2 == 0:
        scene, answer = draw_two_sizes(rng)
        wordings = OTHER_WORDINGS if is_held_out and number % 4 == 0 else WORDINGS
        return scene, rng.choice(wordings), answer, "bigger"
    write, asked = examine.write_question("near") if is_held_out else grammar.write_question, None
    while asked is None:
        scene = shapes.random_scene(rng)
        asked = questions.ask(rng, scene, rng.choice(questions.KINDS), write)
    return scene, *asked, "known"


def ask_for_captions(rng: random.Random, number: int, is_held_out: bool) -> Example:
    """What is in the picture? A plain one, in the wordings of the training."""
    scene = shapes.random_scene(rng, rng.randint(1, 3), frozenset())
    asked = questions.ask(rng, scene, "caption", grammar.write_question)
    assert asked is not None
    return scene, *asked, "caption"


def write_lesson(
    folder: Path, ask: Callable[[random.Random, int, bool], Example], train: int, held_out: int, seed: int = 0
) -> None:
    """Write `data.jsonl`, and the pictures that it names.

    Args:
        folder: written anew.
        ask: makes an example from a random generator, the example's number, and whether it is held out.
        train: number of examples to learn.
        held_out: number of examples behind them.
        seed: of everything.
    """
    folder.mkdir(parents=True)
    lines = []
    for number in range(train + held_out):
        rng = random.Random(f"{ask.__name__}/{seed}/{number}")
        scene, question, answer, kind = ask(rng, number, number >= train)
        scene.picture.thumbnail((SIDE, SIDE))
        name = f"{number:05}.png"
        scene.picture.save(folder / name)
        lines.append(json.dumps({"image": name, "question": question, "answer": answer, "kind": kind}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    name = sys.argv[1]
    ask, count = {"lesson": (ask_for_the_bigger, 9000), "captions": (ask_for_captions, 5400)}[name]
    write_lesson(Path(name), ask, count, count // 9)
