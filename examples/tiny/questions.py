"""Ask questions about scenes of `shapes.py`, each with its one right answer; chat a little without a picture.

Answers are computed from the shapes, never from pixels. They are in lower case, as is all text for the tokenizer.
"""

import random
from collections.abc import Iterable

from shapes import COLOURS, SHAPES, Scene

# Share of questions about something that is not there.
ABSENT = 0.15
COUNTS = ("no", "one", "two", "three")
WORDINGS = {
    "caption": (
        "What is in the picture?",
        "Describe the picture.",
        "What do you see?",
        "What does the image show?",
        "What is in this image?",
        "Describe the image.",
        "What can you see?",
        "List the shapes.",
        "What is this?",
    ),
    "colour": (
        "What colour is the {shape}?",
        "What color is the {shape}?",
        "Which colour has the {shape}?",
        "What is the colour of the {shape}?",
        "Tell me the color of the {shape}.",
        "Colour of the {shape}?",
    ),
    "shape": (
        "Which shape is {colour}?",
        "What is {colour}?",
        "What shape is {colour}?",
        "Which of the shapes is {colour}?",
        "Name the {colour} shape.",
    ),
    "count": (
        "How many shapes are there?",
        "How many shapes do you see?",
        "How many shapes are in the picture?",
        "How many things are there?",
        "Count the shapes.",
        "What is the number of shapes?",
    ),
    "exists": (
        "Is there {target}?",
        "Do you see {target}?",
        "Is there {target} in the picture?",
        "Can you see {target}?",
        "Does the image show {target}?",
    ),
    "which": (
        "What is {place}?",
        "Which shape is {place}?",
        "What do you see {place}?",
        "What shape is {place}?",
        "Name the shape {place}.",
    ),
    "where": (
        "Where is the {shape}?",
        "Where do you see the {shape}?",
        "In which place is the {shape}?",
        "Where in the picture is the {shape}?",
        "Tell me where the {shape} is.",
    ),
}
CHAT = {
    "hello! show me a picture of coloured shapes.": ("Hello!", "Hi.", "Good morning.", "Hey there!"),
    "i am llamoe-tiny. i answer questions about pictures of coloured shapes.": (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "What can you do?",
    ),
    "you are welcome.": ("Thank you!", "Thanks.", "Thanks a lot!"),
    "goodbye!": ("Bye.", "Goodbye!", "See you later."),
    "i do not see a picture.": ("What is in the picture?", "How many shapes are there?", "What do you see?"),
}


def ask(rng: random.Random, scene: Scene, kinds: tuple[str, ...] = tuple(WORDINGS)) -> tuple[str, str, str]:
    """Return a question of one of these kinds about a scene, its answer, and its kind."""
    while True:
        kind = rng.choice(kinds)
        if answer := _answer(rng, scene, kind):
            slots, text = answer
            return type_carelessly(rng, rng.choice(WORDINGS[kind]).format(**slots)), text, kind


def chat(rng: random.Random) -> tuple[str, str, str]:
    """Return what somebody says without a picture, the answer, and the kind "chat"."""
    answer = rng.choice(list(CHAT))
    return type_carelessly(rng, rng.choice(CHAT[answer])), answer, "chat"


def type_carelessly(rng: random.Random, question: str) -> str:
    """Leave out the final "?", "." or "!" of one question in five."""
    return question.rstrip("?.!") if rng.random() < 0.2 else question


def with_article(words: str) -> str:
    """Return the words with their article: "a red circle", "an orange star"."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def caption(scene: Scene) -> str:
    """Describe the whole picture in one sentence."""
    names = [with_article(item.name) for item in scene.items]
    if len(names) == 1:
        return f"{names[0]}."
    *first, last = [f"{name} {item.place}" for name, item in zip(names, scene.items, strict=True)]
    return f"{', '.join(first)} and {last}."


def _answer(rng: random.Random, scene: Scene, kind: str) -> tuple[dict[str, str], str] | None:
    """Return the words for a wording's slots and the answer, or None if the scene has no unambiguous one."""
    items = scene.items
    item = rng.choice(items)
    if kind == "caption":
        return {}, caption(scene)
    if kind == "count":
        is_one = len(items) == 1
        return {}, f"there {'is' if is_one else 'are'} {COUNTS[len(items)]} shape{'' if is_one else 's'}."
    if kind == "which":
        return None if len(items) == 1 else ({"place": item.place}, f"{with_article(item.name)}.")
    if kind == "exists":
        if rng.random() < 0.5:
            target = rng.choice((item.name, item.shape))
            return {"target": with_article(target)}, f"yes, there is {with_article(target)}."
        target = rng.choice((_absent_name(rng, scene), _absent(rng, scene, "shape", SHAPES)))
        return {"target": with_article(target)}, f"no, there is no {target}."
    if kind == "shape":
        if rng.random() < ABSENT:
            colour = _absent(rng, scene, "colour", COLOURS)
            return {"colour": colour}, f"i do not see anything {colour}."
        if sum(other.colour == item.colour for other in items) > 1:
            return None
        return {"colour": item.colour}, f"the {item.shape} is {item.colour}."
    # Kinds "colour" and "where": the shape is there once or not at all.
    if rng.random() < ABSENT:
        shape = _absent(rng, scene, "shape", SHAPES)
        return {"shape": shape}, f"i do not see {with_article(shape)}."
    if sum(other.shape == item.shape for other in items) > 1 or (kind == "where" and len(items) == 1):
        return None
    return {"shape": item.shape}, f"the {item.shape} is {item.colour if kind == 'colour' else item.place}."


def _absent(rng: random.Random, scene: Scene, field: str, values: Iterable[str]) -> str:
    """Return a shape or a colour that no item has."""
    return rng.choice(
        [value for value in values if all(getattr(item, field) != value for item in scene.items)]
    )


def _absent_name(rng: random.Random, scene: Scene) -> str:
    """Return an item's name with its shape, or colour, replaced by one that no item has."""
    item = rng.choice(scene.items)
    if rng.random() < 0.5:
        return f"{item.colour} {_absent(rng, scene, 'shape', SHAPES)}"
    return f"{_absent(rng, scene, 'colour', COLOURS)} {item.shape}"
