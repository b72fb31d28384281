"""Test the pictures and questions on which the small model is trained and measured."""

import math
import random

import pytest
from PIL import Image

ORDER = {"on the left": 0, "at the top": 0, "in the middle": 1, "on the right": 2, "at the bottom": 2}


def scene(*names, places):
    """Return a scene of shapes at these places, fifty pixels apart."""
    import shapes

    items = [
        shapes.Item(name.split()[1], name.split()[0], place, 50 * number, 20, 15)
        for number, (name, place) in enumerate(zip(names, places, strict=True))
    ]
    return shapes.Scene(Image.new("RGB", (8, 8)), tuple(items))


def answers(given, kind):
    """Return the answer to each question of a kind, by the question without its last sign."""
    import questions

    asked = [questions.ask(random.Random(seed), given, (kind,)) for seed in range(1500)]
    assert {kind for _, _, kind in asked} == {kind}
    answers = {}
    for question, answer, _ in asked:
        assert answers.setdefault(question.rstrip("?."), answer) == answer
    return answers


def test_answers_about_three_shapes():
    given = scene(
        "red circle", "blue star", "red square", places=("on the left", "in the middle", "on the right")
    )
    caption = "a red circle on the left, a blue star in the middle and a red square on the right."
    assert set(answers(given, "caption").values()) == {caption}
    assert set(answers(given, "count").values()) == {"there are three shapes."}
    colours = answers(given, "colour")
    assert colours["What colour is the circle"] == "the circle is red."
    assert colours["What color is the star"] == "the star is blue."
    assert colours["What colour is the triangle"] == "i do not see a triangle."
    names = answers(given, "shape")
    assert names["Which shape is blue"] == "the star is blue." and "Which shape is red" not in names
    assert names["Which shape is orange"] == "i do not see anything orange."
    exists = answers(given, "exists")
    assert exists["Is there a blue star"] == "yes, there is a blue star."
    assert exists["Is there a circle"] == "yes, there is a circle."
    assert exists["Is there a triangle"] == "no, there is no triangle."
    assert exists["Is there an orange star"] == "no, there is no orange star."
    assert exists["Is there a blue triangle"] == "no, there is no blue triangle."
    assert answers(given, "which")["What is in the middle"] == "a blue star."
    places = answers(given, "where")
    assert places["Where is the square"] == "the square is on the right."
    assert places["Where is the triangle"] == "i do not see a triangle."


def test_a_shape_alone_has_no_place():
    import questions

    given = scene("orange star", places=("in the middle",))
    assert set(answers(given, "caption").values()) == {"an orange star."}
    assert set(answers(given, "count").values()) == {"there is one shape."}
    # The only questions about places are about shapes that are not there.
    assert all("do not see" in answer for answer in answers(given, "where").values())
    asked = {questions.ask(random.Random(seed), given)[2] for seed in range(200)}
    assert "which" not in asked and "colour" in asked


def test_a_shape_that_is_there_twice_is_not_asked_about():
    given = scene("red star", "blue star", places=("at the top", "at the bottom"))
    for kind in ("colour", "where"):
        assert not any("star is" in answer for answer in answers(given, kind).values())
    assert answers(given, "which")["What is at the top"] == "a red star."


@pytest.mark.parametrize("count", [1, 2, 3])
def test_scenes_are_what_their_items_say(count):
    import shapes

    for number in range(40):
        drawn = shapes.draw_scene(random.Random(f"{count}/{number}"), count=count)
        width, height = drawn.picture.size
        assert 0.5 <= width / height <= 2 and len({item.name for item in drawn.items}) == count
        ground = drawn.picture.getpixel((0, 0))
        for index, item in enumerate(drawn.items):
            assert item.radius <= item.x <= width - item.radius
            assert item.radius <= item.y <= height - item.radius
            # The middle of a shape has a shade of its colour.
            shade = drawn.picture.getpixel((int(item.x), int(item.y)))
            first, last = shapes.COLOURS[item.colour]
            assert math.dist(first, shade) + math.dist(shade, last) < math.dist(first, last) + 2
            assert math.dist(shade, ground) > 100
            for other in drawn.items[:index]:
                assert math.dist((item.x, item.y), (other.x, other.y)) > item.radius + other.radius - 1
                assert ORDER[other.place] < ORDER[item.place]
                is_row = (
                    item.place in ("on the right", "in the middle") and "on the left" in drawn.items[0].place
                )
                assert item.x > other.x if is_row else item.y > other.y
        again = shapes.draw_scene(random.Random(f"{count}/{number}"), count=count)
        assert again.picture.tobytes() == drawn.picture.tobytes() and again.items == drawn.items


def test_every_shape_looks_like_itself():
    """Each shape covers its share of the area of its circumscribed circle."""
    import shapes

    areas = {"circle": 1.0, "square": 2 / math.pi, "triangle": 1.3 / math.pi, "star": 1.32 / math.pi}
    for number in range(40):
        drawn = shapes.draw_scene(random.Random(number), size=(320, 320), count=1)
        (item,) = drawn.items
        ground = drawn.picture.getpixel((0, 0))
        covered = sum(n for n, colour in drawn.picture.getcolors(320**2) if colour != ground)
        assert covered / (math.pi * item.radius**2) == pytest.approx(areas[item.shape], rel=0.06)
