"""The questions that a small model is trained and examined on, and their answers."""

import math
import random
import re
import string
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

SLOTS = {
    "caption": set(),
    "colour": {"shape"},
    "shape": {"colour"},
    "count": set(),
    "count_of": {"things"},
    "exists": {"target"},
    "confirm": {"shape", "colour"},
    "which": {"place"},
    "where": {"name"},
    "beside": {"direction", "name"},
    "relation": {"name", "direction", "other"},
    "colours": set(),
}
KINDS = pytest.mark.parametrize("kind", SLOTS)


@pytest.fixture(scope="module")
def tiny():
    """The modules of `examples/tiny`."""
    import dialogues
    import grammar
    import questions
    import shapes

    return SimpleNamespace(dialogues=dialogues, grammar=grammar, questions=questions, shapes=shapes)


def slots_of(frame):
    return [name for _, name, _, _ in string.Formatter().parse(frame) if name]


@KINDS
def test_frames_have_the_slots_of_their_kind(kind, tiny):
    held_out = [frame for frames in tiny.grammar.HELD_OUT[kind].values() for frame in frames]
    assert len(held_out) == len({tiny.grammar.letters(frame) for frame in held_out}) == 60
    rng = random.Random(0)
    written = [tiny.grammar.draw_frame(rng, kind) for _ in range(400)]
    for frame in (*held_out, *written):
        assert sorted(slots_of(frame)) == sorted(SLOTS[kind]), frame
        assert not re.search(r"[()\[\]|<>]|  ", frame.replace("->", "=")), frame
    assert len(set(written)) > 200


@KINDS
def test_training_writes_no_frame_that_is_held_out(kind, tiny):
    """Without the list it would: most that people ask first is in the grammar, too."""
    never = {
        tiny.grammar.letters(frame) for frames in tiny.grammar.HELD_OUT[kind].values() for frame in frames
    }
    rng = random.Random(1)
    assert not any(tiny.grammar.letters(tiny.grammar.draw_frame(rng, kind)) in never for _ in range(1500))


def scene(tiny, *names, layout="across"):
    """Shapes in a row or a column, fifty pixels apart."""
    step = (50, 0) if layout == "across" else (0, 50)
    items = tuple(
        tiny.shapes.Item(name.split()[1], name.split()[0], step[0] * number, step[1] * number, 15)
        for number, name in enumerate(names)
    )
    return tiny.shapes.Scene(Image.new("RGB", (8, 8)), items, layout, cover=Image.new("L", (8, 8)))


def answers(tiny, kind, given):
    """All answers that can come, by the words in the question's slots."""
    found = {}
    for seed in range(600):
        asked = tiny.questions.ask(
            random.Random(seed), given, kind, lambda _, kind, slots: tuple(slots.items())
        )
        if asked:
            assert found.setdefault(*asked) == asked[1]
    return {" ".join(words for _, words in slots): text for slots, text in found.items()}


def test_answers_about_three_shapes(tiny):
    given = scene(tiny, "red circle", "blue star", "red square")
    told = {kind: answers(tiny, kind, given) for kind in SLOTS}
    assert told["caption"] == {
        "": "a red circle on the left, a blue star in the middle and a red square on the right."
    }
    assert told["count"] == {"": "there are three shapes."}
    assert told["colours"] == {"": "the colours are red and blue."}
    assert told["colour"] == {
        "circle": "the circle is red.",
        "star": "the star is blue.",
        "square": "the square is red.",
        "triangle": "i do not see a triangle.",
    }
    assert told["shape"]["blue"] == "the star is blue." and "red" not in told["shape"]
    assert told["shape"]["orange"] == "i do not see anything orange."
    assert told["count_of"]["red things"] == "there are two red shapes."
    assert told["count_of"]["stars"] == told["count_of"]["blue stars"].replace("blue ", "")
    assert told["count_of"]["triangles"] == "there are no triangles."
    assert told["exists"]["a triangle"] == "no, there is no triangle."
    assert told["exists"]["a blue star"] == "yes, there is a blue star."
    assert told["exists"]["something blue"] == "yes, there is something blue."
    assert told["confirm"]["star red"] == "no, the star is blue."
    assert told["confirm"]["square red"] == "yes, the square is red."
    assert told["confirm"]["triangle red"] == "i do not see a triangle."
    assert told["which"]["in the middle"] == "a blue star."
    assert told["where"]["square"] == "the square is on the right."
    assert told["where"]["orange star"] == "i do not see an orange star."
    assert told["beside"]["to the left of star"] == "a red circle."
    assert told["beside"]["below blue star"] == "there is nothing below the blue star."
    # Two shapes are to the right of it.
    assert "to the right of circle" not in told["beside"]
    assert told["relation"]["circle to the left of star"] == "yes, the circle is to the left of the star."
    assert told["relation"]["star to the left of circle"] == "no, the star is to the right of the circle."
    assert told["relation"]["circle above red square"] == "no, the circle is to the left of the red square."
    assert told["relation"]["triangle to the left of star"] == "i do not see a triangle."


def test_a_shape_alone_has_no_place(tiny):
    given = scene(tiny, "orange star")
    assert answers(tiny, "caption", given) == {"": "an orange star."}
    assert answers(tiny, "colours", given) == {"": "the colour is orange."}
    assert not any(answers(tiny, kind, given) for kind in ("which", "where", "beside", "relation"))


@pytest.mark.parametrize("stress", ["small", "strip", "four", "touching", "textured ground", "screenshot"])
def test_scenes_are_what_their_stresses_say(stress, tiny):
    for number in range(20):
        drawn = tiny.shapes.random_scene(random.Random(f"{stress}/{number}"), stresses=frozenset({stress}))
        size = drawn.picture.size
        assert len(drawn.items) == 4 if stress == "four" else 1 <= len(drawn.items) <= 3
        assert (max(size) > 2 * min(size)) == (stress == "strip")
        assert len({item.name for item in drawn.items}) == len(drawn.items)
        for item in drawn.items:
            assert item.radius <= item.x <= size[0] - item.radius
            assert item.radius <= item.y <= size[1] - item.radius
            assert item.radius <= 0.08 * max(size) or stress != "small"
        again = tiny.shapes.random_scene(random.Random(f"{stress}/{number}"), stresses=frozenset({stress}))
        assert again.picture.tobytes() == drawn.picture.tobytes() and again.items == drawn.items


@pytest.mark.parametrize("stress", ["none", "outlines", "strip"])
def test_covers_are_where_the_shapes_are(stress, tiny):
    """As much of the picture as their areas, and nothing outside their circles."""
    for number in range(20):
        drawn = tiny.shapes.random_scene(random.Random(f"{stress}/{number}"), stresses=frozenset({stress}))
        cover = tiny.dialogues.cover_of_cells(drawn).unflatten(0, (4, 4)).unflatten(-1, (7, 7))
        cover = cover.transpose(1, 2).reshape(28, 28)
        scale = 28 / max(drawn.picture.size)
        reach = torch.zeros(28, 28, dtype=torch.bool)
        y, x = torch.meshgrid(torch.arange(28) + 0.5, torch.arange(28) + 0.5, indexing="ij")
        for item in drawn.items:
            gap = torch.hypot(x - item.x * scale, y - item.y * scale) - item.radius * scale
            reach |= gap <= 1
            # A thin star has a fifth of its circle's area, and its middle is full.
            assert cover[int(item.y * scale), int(item.x * scale)] > 0.5
        assert cover[~reach].max() == 0
        area = sum(math.pi * (item.radius * scale) ** 2 for item in drawn.items)
        assert 0.2 * area < cover.sum() < 1.1 * area


def test_typing_keeps_what_is_asked(tiny):
    """Most letters stay, in their order."""
    rng = random.Random(0)
    for _ in range(300):
        typed = tiny.questions.type_carelessly(rng, "What colour is the star, please?")
        kept = re.sub("[^a-z]", "", typed.lower())
        assert abs(len(kept) - 25) <= 1
