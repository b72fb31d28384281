"""Write a folder of pictures with questions, for `examples/finetune_lora.py` and `align_vision.py`.

python examples/tiny/lessons.py lesson       # "Which shape is bigger?", which llamoe-tiny cannot answer
python examples/tiny/lessons.py captions     # descriptions of pictures
"""

import json
import random
import sys
from pathlib import Path

from questions import ask
from shapes import Scene, draw_scene

WORDINGS = (
    "Which shape is bigger?",
    "Which shape is larger?",
    "What is the bigger shape?",
    "Name the larger shape.",
)
COUNTS = {"lesson": 10_000, "captions": 6_000}


def draw_example(rng: random.Random, lesson: str) -> tuple[Scene, str, str, str]:
    """Draw a scene, and return it with a question, the answer, and the kind of the question.

    In "lesson" half of the questions are of kinds that the model knows, so that it forgets none.
    """
    if lesson == "captions":
        scene = draw_scene(rng)
        return scene, *ask(rng, scene, ("caption",))
    if rng.random() < 0.5:
        scene = draw_scene(rng)
        return scene, *ask(rng, scene)[:2], "known"
    while True:
        scene = draw_scene(rng, count=2)
        small, big = sorted(scene.items, key=lambda item: item.radius)
        if big.radius > 1.5 * small.radius:
            return scene, rng.choice(WORDINGS), f"the {big.name}.", "bigger"


def write_lesson(folder: Path, lesson: str, count: int) -> None:
    """Write `data.jsonl` with a line for each question, and the pictures that its lines name."""
    folder.mkdir(parents=True)
    lines = []
    for number in range(count):
        rng = random.Random(f"{lesson}/{number}")
        scene, question, answer, kind = draw_example(rng, lesson)
        name = f"{number:05}.png"
        scene.picture.save(folder / name)
        lines.append(json.dumps({"image": name, "question": question, "answer": answer, "kind": kind}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_lesson(Path(sys.argv[1]), sys.argv[1], COUNTS[sys.argv[1]])
