"""Questions about scenes of `shapes.py`, each with its one right answer.

Answers are computed from the placed shapes, never from pixels. They are in lower case, like everything that the
tokenizer of `train_tiny.py` reads and writes.
"""

import random

from shapes import COLOURS, PLACES, SHAPES, Item, Scene

KINDS = ("caption", "colour", "shape", "count", "exists", "confirm", "which", "where")

# {target} is "a red circle", "a circle" or "something red"; {name} is "red circle"; {place} is "on the left".
# "colour" is sometimes written "color". `TRAINED` and `HELD_OUT` share no phrasing of a kind.
TRAINED = {
    "caption": (
        "Describe the picture.",
        "Describe this image.",
        "Describe what you see.",
        "What is in the picture?",
        "What do you see?",
        "What can you see in the image?",
        "What is shown here?",
        "What does this picture show?",
        "What is this?",
        "Give a description of the picture.",
        "Write a caption for this image.",
        "Caption this picture.",
        "Tell me about this picture.",
        "Which shapes are there and where?",
        "What shapes are in the picture?",
        "Say what is in this photo.",
        "What's in this image?",
    ),
    "colour": (
        "What colour is the {shape}?",
        "What is the colour of the {shape}?",
        "Which colour is the {shape}?",
        "Which colour does the {shape} have?",
        "Tell me the colour of the {shape}.",
        "What colour does the {shape} have in this picture?",
        "In what colour is the {shape} painted?",
        "Say what colour the {shape} is.",
        "The {shape} is what colour?",
        "What's the colour of the {shape} in the image?",
        "Name the colour of the {shape}.",
        "Can you tell me what colour the {shape} is?",
        "{shape} colour?",
    ),
    "shape": (
        "Which shape is {colour}?",
        "What shape is {colour}?",
        "What is {colour}?",
        "What is the {colour} shape?",
        "What shape is the {colour} object?",
        "Which of the shapes is {colour}?",
        "Which object is {colour}?",
        "Name the {colour} shape.",
        "Tell me which shape is {colour}.",
        "What kind of shape is {colour}?",
        "What is the shape of the {colour} thing?",
        "Which thing in the picture is {colour}?",
        "Say what the {colour} object is.",
    ),
    "count": (
        "How many shapes are there?",
        "How many shapes are in the picture?",
        "How many objects are there?",
        "How many objects do you see?",
        "How many things are in this image?",
        "Count the shapes.",
        "Count the objects in the picture.",
        "What is the number of shapes?",
        "Tell me how many shapes there are.",
        "How many shapes can you see?",
        "How many figures are shown?",
        "Give the number of objects in the image.",
    ),
    "exists": (
        "Is there {target}?",
        "Is there {target} in the picture?",
        "Is there {target} in this image?",
        "Do you see {target}?",
        "Can you see {target}?",
        "Does the picture show {target}?",
        "Does the image contain {target}?",
        "Tell me if there is {target}.",
        "Is {target} shown here?",
        "Does this picture have {target} in it?",
        "Can you find {target}?",
        "Do you see {target} here?",
        "Do you see {target} in this picture?",
        "Do you see {target} in the photo?",
        "Can you see {target} here?",
        "Can you see {target} in this photo?",
        "Is {target} in the picture?",
        "Is there {target} in the photo?",
        "{target}: yes or no?",
    ),
    "confirm": (
        "Is the {shape} {colour}?",
        "Is the {shape} in the picture {colour}?",
        "Is the colour of the {shape} {colour}?",
        "Does the {shape} have the colour {colour}?",
        "Tell me if the {shape} is {colour}.",
        "Is it true that the {shape} is {colour}?",
        "The {shape} is {colour}, right?",
        "Can you see if the {shape} is {colour}?",
        "Is the {shape} shown in {colour}?",
        "The {shape} is {colour}: yes or no?",
    ),
    "which": (
        "What is {place}?",
        "Which shape is {place}?",
        "What do you see {place}?",
        "What is shown {place}?",
        "What can you see {place} of the picture?",
        "Which object is {place}?",
        "Tell me what is {place}.",
        "Describe what is {place}.",
        "Name the shape {place}.",
        "What shape is {place} of the image?",
        "Say which shape is {place}.",
    ),
    "where": (
        "Where is the {name}?",
        "Where is the {name} in the picture?",
        "Where do you see the {name}?",
        "Tell me where the {name} is.",
        "What is the position of the {name}?",
        "In which place is the {name}?",
        "Where in the image is the {name}?",
        "Where can you see the {name}?",
        "Say where the {name} is.",
        "Where can the {name} be found?",
    ),
}

HELD_OUT = {
    "caption": (
        "What does the image show?",
        "Describe this picture.",
        "What can you see here?",
        "Tell me what you see.",
        "Give a caption for the picture.",
    ),
    "colour": (
        "Can you tell me the colour of the {shape}?",
        "What colour does the {shape} have?",
        "Tell me what colour the {shape} is.",
        "What colour is the {shape} in this image?",
        "The colour of the {shape} is what?",
    ),
    "shape": (
        "What is the {colour} object?",
        "Which object in the picture is {colour}?",
        "Can you tell me which shape is {colour}?",
        "What kind of shape is the {colour} one?",
        "Tell me what the {colour} thing is.",
    ),
    "count": (
        "How many things do you see?",
        "Can you count the objects?",
        "How many shapes does the picture show?",
        "What is the number of objects in the picture?",
        "Tell me the number of shapes.",
    ),
    "exists": (
        "Do you see {target} in the image?",
        "Can you see {target} in the picture?",
        "Does the image show {target}?",
        "Tell me if you see {target}.",
        "Is there {target} here?",
    ),
    "confirm": (
        "Is the {shape} in this image {colour}?",
        "Can you tell me if the {shape} is {colour}?",
        "Is it right that the {shape} is {colour}?",
        "Do you see that the {shape} is {colour}?",
        "Does the {shape} in the picture have the colour {colour}?",
    ),
    "which": (
        "Tell me which shape is {place}.",
        "What is there {place}?",
        "What object is {place}?",
        "Say what you see {place}.",
        "Can you tell me what is {place}?",
    ),
    "where": (
        "Can you tell me where the {name} is?",
        "Where is the {name} in this image?",
        "Where can I see the {name}?",
        "Say where you see the {name}.",
        "In the picture, where is the {name}?",
    ),
}

OPENINGS = ("Please: ", "Look at the picture. ", "Hello! ", "Question: ", "Can you tell me: ", "Look here: ")
COUNT_WORDS = ("no", "one", "two", "three")


def with_article(words: str) -> str:
    """The words with their article: `a red circle`, `an orange star`."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def caption(scene: Scene) -> str:
    """The whole picture in one canonical sentence, in reading order."""
    names = [with_article(item.name) for item in scene.items]
    if len(names) == 1:
        return f"{names[0]}."
    placed = [f"{name} {place}" for name, place in zip(names, PLACES[scene.axis, len(names)], strict=True)]
    return f"{', '.join(placed[:-1])} and {placed[-1]}."


def ask(
    rng: random.Random, scene: Scene, kind: str, phrasings: dict[str, tuple[str, ...]]
) -> tuple[str, str] | None:
    """One question of a kind and its answer, or None where the scene has no unambiguous one.

    Args:
        rng: source of every choice.
        scene: scene that the question is about.
        kind: one of `KINDS`.
        phrasings: `TRAINED` or `HELD_OUT`.
    """
    answer = _ANSWERS[kind](rng, scene)
    if answer is None:
        return None
    slots, text = answer
    question = rng.choice(phrasings[kind]).format(**slots)
    if rng.random() < 0.5:
        question = question.replace("colour", "color")
    return question[0].upper() + question[1:], text


def loosen(rng: random.Random, question: str) -> str:
    """The question as people type it: sometimes with an opening, in lower case, without the final mark."""
    if rng.random() < 0.2:
        opening = rng.choice(OPENINGS)
        question = opening + (
            question if opening.endswith((". ", "! ")) else question[0].lower() + question[1:]
        )
    if rng.random() < 0.15:
        question = question.rstrip("?.")
    return question.lower() if rng.random() < 0.2 else question


def _answer_caption(rng, scene):
    return {}, caption(scene)


def _answer_colour(rng, scene):
    item = _only(rng, scene, "shape")
    if item is None:
        return None
    if len(scene.items) == 1 and rng.random() < 0.5:
        return {"shape": rng.choice(("shape", "object"))}, f"the {item.shape} is {item.colour}."
    return {"shape": item.shape}, f"the {item.shape} is {item.colour}."


def _answer_shape(rng, scene):
    item = _only(rng, scene, "colour")
    return item and ({"colour": item.colour}, f"the {item.shape} is {item.colour}.")


def _answer_count(rng, scene):
    return {}, _counted(len(scene.items), "shape")


def _answer_exists(rng, scene):
    here, wanted = rng.choice(scene.items), rng.random() < 0.5
    what = rng.choice(("both", "both", "shape", "colour"))
    if what == "both":
        present = {item.name for item in scene.items}
        absent = [
            f"{colour} {shape}"
            for colour in COLOURS
            for shape in SHAPES
            if f"{colour} {shape}" not in present
        ]
        # Half of the wrong names are near misses: their colour or their shape is in the picture.
        near = [name for name in absent if here.colour in name or here.shape in name]
        name = here.name if wanted else rng.choice(near if rng.random() < 0.5 else absent)
        target, denied = with_article(name), f"no {name}"
    elif what == "shape":
        absent = [shape for shape in SHAPES if all(item.shape != shape for item in scene.items)]
        shape = here.shape if wanted else rng.choice(absent)
        target, denied = with_article(shape), f"no {shape}"
    else:
        absent = [colour for colour in COLOURS if all(item.colour != colour for item in scene.items)]
        colour = here.colour if wanted else rng.choice(absent)
        target, denied = f"something {colour}", f"nothing {colour}"
    return {"target": target}, f"yes, there is {target}." if wanted else f"no, there is {denied}."


def _answer_confirm(rng, scene):
    item = _only(rng, scene, "shape")
    if item is None:
        return None
    others = [colour for colour in COLOURS if colour != item.colour]
    # As a wrong guess, a neighbour's colour is the hardest.
    nearby = [other.colour for other in scene.items if other.colour != item.colour]
    guess = item.colour
    if rng.random() < 0.5:
        guess = rng.choice(nearby if nearby and rng.random() < 0.5 else others)
    word = "yes" if guess == item.colour else "no"
    return {"shape": item.shape, "colour": guess}, f"{word}, the {item.shape} is {item.colour}."


def _answer_which(rng, scene):
    if len(scene.items) == 1:
        return None
    index = rng.randrange(len(scene.items))
    return {"place": PLACES[scene.axis, len(scene.items)][index]}, f"{with_article(scene.items[index].name)}."


def _answer_where(rng, scene):
    if len(scene.items) == 1:
        return None
    index = rng.randrange(len(scene.items))
    item, place = scene.items[index], PLACES[scene.axis, len(scene.items)][index]
    only = sum(other.shape == item.shape for other in scene.items) == 1
    name = item.shape if only and rng.random() < 0.5 else item.name
    return {"name": name}, f"the {name} is {place}."


_ANSWERS = {
    "caption": _answer_caption,
    "colour": _answer_colour,
    "shape": _answer_shape,
    "count": _answer_count,
    "exists": _answer_exists,
    "confirm": _answer_confirm,
    "which": _answer_which,
    "where": _answer_where,
}


def _only(rng: random.Random, scene: Scene, field: str) -> Item | None:
    """A random item whose shape (or colour) no other item of the scene has."""
    values = [getattr(item, field) for item in scene.items]
    alone = [item for item in scene.items if values.count(getattr(item, field)) == 1]
    return rng.choice(alone) if alone else None


def _counted(number: int, noun: str) -> str:
    return f"there is one {noun}." if number == 1 else f"there are {COUNT_WORDS[number]} {noun}s."
