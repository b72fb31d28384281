"""Writes the questions of the training: rules with many wordings each, and what people say around a question.

`trained.json` has the rules of each kind of question. In a rule `(a|b)` is one of several, `[a]` is there or not,
`<word>` is one of a list of `words`, and `{slot}` is filled by `questions.py`. `held_out.json` has questions of other
people; none of them is ever written here.
"""

import json
import random
import re
from pathlib import Path

import questions

_FOLDER = Path(__file__).parent
TRAINED = json.loads((_FOLDER / "trained.json").read_text())
# Kind to "near" (what most people would ask first) and "far" (what few would) to frames.
HELD_OUT = json.loads((_FOLDER / "held_out.json").read_text())

_CHOICE = re.compile(r"\(([^()\[\]]*)\)|\[([^()\[\]]*)\]")
_WORD = re.compile(r"<(\w+)>")
# The words that make a question one about colours alone.
_OF_COLOUR = re.compile(r"colour|hue|shade|tint|tone|palette|pigment|paint|ink|dye|crayon|pencil")

# How places and directions are called besides by the words of the answers.
_SAME = {
    "on the left": ("on the left side", "at the left", "to the left", "on the far left", "leftmost"),
    "on the right": ("on the right side", "at the right", "to the right", "on the far right", "rightmost"),
    "in the middle": ("in the centre", "in the center", "at the centre", "in between"),
    "at the top": ("on top", "on the top", "in the upper part", "at the very top", "topmost"),
    "at the bottom": ("on the bottom", "in the lower part", "at the very bottom", "lowest"),
    "at the top left": (
        "in the top left corner",
        "in the upper left",
        "in the upper left corner",
        "top left",
    ),
    "at the top right": (
        "in the top right corner",
        "in the upper right",
        "in the upper right corner",
        "top right",
    ),
    "at the bottom left": (
        "in the bottom left corner",
        "in the lower left",
        "in the lower left corner",
        "bottom left",
    ),
    "at the bottom right": (
        "in the bottom right corner",
        "in the lower right",
        "in the lower right corner",
        "bottom right",
    ),
    "to the left of": ("left of", "on the left of", "on the left side of"),
    "to the right of": ("right of", "on the right of", "on the right side of"),
    "above": ("over", "on top of", "higher than"),
    "below": ("under", "underneath", "beneath", "lower than"),
}


def letters(frame: str) -> str:
    """What is left of a frame without case, marks and blanks, with one spelling of "colour"."""
    return re.sub(r"[^a-z{}_]", "", frame.lower().replace("color", "colour"))


_NEVER = {
    kind: {letters(frame) for frames in ways.values() for frame in frames} for kind, ways in HELD_OUT.items()
}


def draw_frame(rng: random.Random, kind: str) -> str:
    """A frame of a kind of question: a rule with all its choices made, and none that is held out."""
    while True:
        text = rng.choice(TRAINED["rules"][kind])
        while choice := _CHOICE.search(text):
            one_of, maybe = choice.groups()
            chosen = rng.choice(one_of.split("|")) if maybe is None else rng.choice(("", *maybe.split("|")))
            text = text[: choice.start()] + chosen + text[choice.end() :]
        text = _WORD.sub(lambda word: rng.choice(TRAINED["words"][word.group(1)]), text)
        if letters(text) not in _NEVER[kind]:
            return re.sub(r" ([,.?!:;])", r"\1", " ".join(text.split()))


def write_question(rng: random.Random, kind: str, slots: questions.Slots) -> str:
    """A question as people type it, often with something before or after it."""
    slots = {name: _say(rng, words) for name, words in slots.items()}
    frame = draw_frame(rng, kind)
    if rng.random() < 0.2:
        frame = _blur(rng, frame)
    question = questions.fill(rng, frame, slots)
    if rng.random() < 0.8:
        question = question[0].upper() + question[1:]
    if rng.random() < 0.15:
        opening = rng.choice(TRAINED["openings"])
        question = f"{opening} {question if opening[-1] in '.!?' else question[0].lower() + question[1:]}"
    if rng.random() < 0.15:
        question = f"{question} {rng.choice(TRAINED['closings'])}"
    return questions.type_carelessly(rng, question)


def _say(rng: random.Random, words: str) -> str:
    return rng.choice(_SAME[words]) if words in _SAME and rng.random() < 0.3 else words


def _blur(rng: random.Random, frame: str) -> str:
    """The frame with one word left out, or with a word that does not exist in its place or beside it.

    A model that reads all words of a question learns little about each; who may miss any of them learns what the others
    mean, and what to do about a word that it never saw. A word for colours stays: without it "which hues are there?"
    would be a question about anything.
    """
    words = frame.split()
    replaceable = [
        at for at, word in enumerate(words) if "{" not in word and not _OF_COLOUR.search(word.lower())
    ]
    if len(replaceable) < 4:
        return frame
    at, way = rng.choice(replaceable), rng.choice(("less", "other", "more"))
    syllables = (rng.choice("bcdfghklmnprstvwy") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
    strange = [] if way == "less" else ["".join(syllables) + rng.choice(("", "n", "r", "st", "ng"))]
    return " ".join([*words[:at], *strange, *words[at + (way != "more") :]])
