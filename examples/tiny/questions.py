"""Questions about scenes of `shapes.py`, each with its one right answer.

Answers are computed from the placed shapes, never from pixels. They are in lower case, like everything that the
tokenizer of `train.py` reads and writes. The wordings come from elsewhere: `grammar.py` has those of the training,
`held_out.json` those that it never sees.
"""

import random
import string
from collections.abc import Callable

from shapes import COLOURS, SHAPES, Item, Scene, relation

KINDS = (
    "caption",
    "colour",
    "shape",
    "count",
    "count_of",
    "exists",
    "confirm",
    "which",
    "where",
    "beside",
    "relation",
    "colours",
)
OPPOSITE = {
    "to the left of": "to the right of",
    "to the right of": "to the left of",
    "above": "below",
    "below": "above",
}
DIRECTIONS = tuple(OPPOSITE)
# How often a question supposes a shape that is not there, where its kind supposes one.
ABSENT = 0.15
COUNT_WORDS = ("no", "one", "two", "three", "four")

Slots = dict[str, str]
Answer = tuple[Slots, str]


def ask(
    rng: random.Random, scene: Scene, kind: str, word: Callable[[random.Random, str, Slots], str]
) -> tuple[str, str] | None:
    """One question of a kind and its answer, or None where the scene has no unambiguous one.

    Args:
        rng: source of every choice.
        scene: scene that the question is about.
        kind: one of `KINDS`.
        word: writes the question from the random generator, the kind, and the words for the slots of its wordings.
    """
    answer = _ANSWERS[kind](rng, scene)
    return answer and (word(rng, kind, answer[0]), answer[1])


def fill(rng: random.Random, frame: str, slots: Slots) -> str:
    """The frame with words in its slots, with "colour" in one of its two spellings."""
    question = frame.format(**slots)
    if rng.random() < 0.5:
        question = question.replace("colour", "color").replace("Colour", "Color")
    return question


def type_carelessly(rng: random.Random, question: str) -> str:
    """The question as people type it: in one letter case, without marks, with a letter too many or too few."""
    if rng.random() < 0.2:
        question = question.rstrip("?.! ")
        if rng.random() < 0.3:
            question = "".join(letter for letter in question if letter not in ",;:!?")
    if rng.random() < 0.2:
        question = question.lower()
    elif rng.random() < 0.05:
        question = question.upper()
    if rng.random() < 0.08:
        # Slots too: who asks about a "cirlce" is understood.
        at = rng.randrange(len(question))
        letter = rng.choice(("", question[at] * 2, rng.choice(string.ascii_lowercase)))
        question = question[:at] + letter + question[at + 1 :]
    return question


def with_article(words: str) -> str:
    """The words with their article: `a red circle`, `an orange star`."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def caption(scene: Scene) -> str:
    """The whole picture in one canonical sentence, in reading order."""
    names = [with_article(item.name) for item in scene.items]
    if len(names) == 1:
        return f"{names[0]}."
    return f"{_listed([f'{name} {place}' for name, place in zip(names, scene.places, strict=True)])}."


def _answer_caption(rng: random.Random, scene: Scene) -> Answer:
    return {}, caption(scene)


def _answer_colour(rng: random.Random, scene: Scene) -> Answer | None:
    if rng.random() < ABSENT:
        return _absent_shape(rng, scene)
    item = _only(rng, scene, "shape")
    if item is None:
        return None
    word = item.shape
    if len(scene.items) == 1 and rng.random() < 0.3:
        word = rng.choice(("shape", "object", "thing", "figure"))
    return {"shape": word}, f"the {item.shape} is {item.colour}."


def _answer_shape(rng: random.Random, scene: Scene) -> Answer | None:
    if rng.random() < ABSENT:
        colour = rng.choice([name for name in COLOURS if all(item.colour != name for item in scene.items)])
        return {"colour": colour}, f"i do not see anything {colour}."
    item = _only(rng, scene, "colour")
    return item and ({"colour": item.colour}, f"the {item.shape} is {item.colour}.")


def _answer_count(rng: random.Random, scene: Scene) -> Answer:
    return {}, _counted(len(scene.items), "shape")


def _answer_count_of(rng: random.Random, scene: Scene) -> Answer:
    item = rng.choice(scene.items)
    colour, shape = item.colour, item.shape
    if rng.random() < 0.25:
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    what = rng.choice(("shape", "shape", "colour", "both"))
    if what == "shape":
        number, noun, asked = sum(other.shape == shape for other in scene.items), shape, f"{shape}s"
    elif what == "colour":
        number, noun = sum(other.colour == colour for other in scene.items), f"{colour} shape"
        asked = f"{colour} {rng.choice(('shapes', 'shapes', 'objects', 'things', 'figures', 'ones'))}"
    else:
        noun = f"{colour} {shape}"
        number, asked = sum(other.name == noun for other in scene.items), f"{noun}s"
    return {"things": asked}, _counted(number, noun)


def _answer_exists(rng: random.Random, scene: Scene) -> Answer:
    here, wanted = rng.choice(scene.items), rng.random() < 0.5
    what = rng.choice(("both", "both", "shape", "colour"))
    if what == "both":
        name = here.name if wanted else _absent_name(rng, scene)
        target, denied = with_article(name), f"no {name}"
    elif what == "shape":
        absent = [shape for shape in SHAPES if all(item.shape != shape for item in scene.items)]
        wanted = wanted or not absent
        shape = here.shape if wanted else rng.choice(absent)
        target, denied = with_article(shape), f"no {shape}"
    else:
        absent = [colour for colour in COLOURS if all(item.colour != colour for item in scene.items)]
        colour = here.colour if wanted else rng.choice(absent)
        target, denied = f"something {colour}", f"nothing {colour}"
    return {"target": target}, f"yes, there is {target}." if wanted else f"no, there is {denied}."


def _answer_confirm(rng: random.Random, scene: Scene) -> Answer | None:
    if rng.random() < ABSENT:
        answer = _absent_shape(rng, scene)
        return answer and (answer[0] | {"colour": rng.choice(scene.items).colour}, answer[1])
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


def _answer_which(rng: random.Random, scene: Scene) -> Answer | None:
    if len(scene.items) == 1:
        return None
    index = rng.randrange(len(scene.items))
    return {"place": scene.places[index]}, f"{with_article(scene.items[index].name)}."


def _answer_where(rng: random.Random, scene: Scene) -> Answer | None:
    if len(scene.items) == 1:
        return None
    if rng.random() < ABSENT:
        return _absent_item(rng, scene)
    index = rng.randrange(len(scene.items))
    name = _called(rng, scene, scene.items[index])
    return {"name": name}, f"the {name} is {scene.places[index]}."


def _answer_beside(rng: random.Random, scene: Scene) -> Answer | None:
    if len(scene.items) == 1:
        return None
    if rng.random() < ABSENT:
        slots, text = _absent_item(rng, scene)
        return slots | {"direction": rng.choice(DIRECTIONS)}, text
    item = rng.choice(scene.items)
    ways = {other: relation(other, item) for other in scene.items if other is not item}
    if None in ways.values():
        return None
    name = _called(rng, scene, item)
    # Three of four times something is there.
    direction = rng.choice(list(ways.values()) if rng.random() < 0.75 else DIRECTIONS)
    found = [other for other, way in ways.items() if way == direction]
    if len(found) > 1:
        return None
    text = f"{with_article(found[0].name)}." if found else f"there is nothing {direction} the {name}."
    return {"direction": direction, "name": name}, text


def _answer_relation(rng: random.Random, scene: Scene) -> Answer | None:
    if len(scene.items) == 1:
        return None
    first, second = rng.sample(scene.items, 2)
    direction = relation(first, second)
    if direction is None:
        return None
    name, other = _called(rng, scene, first), _called(rng, scene, second)
    if rng.random() < ABSENT:
        slots, text = _absent_item(rng, scene)
        name, other = (slots["name"], other) if rng.random() < 0.5 else (name, slots["name"])
        return {"name": name, "direction": direction, "other": other}, text
    asked = direction
    if rng.random() < 0.5:
        # The opposite is the nearest mistake.
        asked = OPPOSITE[direction] if rng.random() < 0.7 else rng.choice(DIRECTIONS)
    word = "yes" if asked == direction else "no"
    slots = {"name": name, "direction": asked, "other": other}
    return slots, f"{word}, the {name} is {direction} the {other}."


def _answer_colours(rng: random.Random, scene: Scene) -> Answer:
    colours = list(dict.fromkeys(item.colour for item in scene.items))
    return {}, f"the colour is {colours[0]}." if len(colours) == 1 else f"the colours are {_listed(colours)}."


_ANSWERS = {
    "caption": _answer_caption,
    "colour": _answer_colour,
    "shape": _answer_shape,
    "count": _answer_count,
    "count_of": _answer_count_of,
    "exists": _answer_exists,
    "confirm": _answer_confirm,
    "which": _answer_which,
    "where": _answer_where,
    "beside": _answer_beside,
    "relation": _answer_relation,
    "colours": _answer_colours,
}


def _only(rng: random.Random, scene: Scene, field: str) -> Item | None:
    """A random item whose shape (or colour) no other item of the scene has."""
    values = [getattr(item, field) for item in scene.items]
    alone = [item for item in scene.items if values.count(getattr(item, field)) == 1]
    return rng.choice(alone) if alone else None


def _called(rng: random.Random, scene: Scene, item: Item) -> str:
    """A name that only this item of the scene has: with its colour or, where that is enough, without."""
    only = sum(other.shape == item.shape for other in scene.items) == 1
    return item.shape if only and rng.random() < 0.5 else item.name


def _absent_name(rng: random.Random, scene: Scene) -> str:
    """A colour and a shape that no item has together; half of them share one of both with an item."""
    present = {item.name for item in scene.items}
    absent = [name for name in (f"{c} {s}" for c in COLOURS for s in SHAPES) if name not in present]
    here = rng.choice(scene.items)
    near = [name for name in absent if here.colour in name or here.shape in name]
    return rng.choice(near if rng.random() < 0.5 else absent)


def _absent_shape(rng: random.Random, scene: Scene) -> Answer | None:
    absent = [shape for shape in SHAPES if all(item.shape != shape for item in scene.items)]
    if not absent:
        return None
    shape = rng.choice(absent)
    return {"shape": shape}, f"i do not see {with_article(shape)}."


def _absent_item(rng: random.Random, scene: Scene) -> Answer:
    absent = _absent_shape(rng, scene) if rng.random() < 0.5 else None
    name = absent[0]["shape"] if absent else _absent_name(rng, scene)
    return {"name": name}, f"i do not see {with_article(name)}."


def _counted(number: int, noun: str) -> str:
    return f"there is one {noun}." if number == 1 else f"there are {COUNT_WORDS[number]} {noun}s."


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
