"""Draw pictures of one to three coloured shapes in a row or column, on a plain background.

A `Scene` follows from its random generator: one seed gives the same picture everywhere.
"""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle", "star")
# Number of corners, direction of the first in degrees, distance of every second from the centre, in radii.
CORNERS = {"square": (4, 45, 1), "triangle": (3, -90, 1), "star": (10, -90, 0.45)}
# Two shades of each colour. An item gets a shade between the two.
COLOURS = {
    "red": ((255, 0, 0), (205, 45, 50)),
    "orange": ((255, 165, 0), (255, 127, 14)),
    "yellow": ((255, 255, 0), (245, 205, 45)),
    "green": ((0, 128, 0), (60, 200, 80)),
    "blue": ((0, 0, 255), (31, 119, 210)),
    "purple": ((128, 0, 128), (160, 90, 210)),
    "black": ((0, 0, 0), (35, 35, 35)),
}
ACROSS = {
    1: ("in the middle",),
    2: ("on the left", "on the right"),
    3: ("on the left", "in the middle", "on the right"),
}
DOWN = {
    1: ("in the middle",),
    2: ("at the top", "at the bottom"),
    3: ("at the top", "in the middle", "at the bottom"),
}


@dataclass(frozen=True)
class Item:
    """A shape with the name of its place, its centre and the radius of its circumscribed circle, in pixels."""

    shape: str
    colour: str
    place: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        """Colour and shape, such as "red circle"."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A picture and its items, from the left to the right or from the top to the bottom."""

    picture: Image.Image
    items: tuple[Item, ...]


def draw_size(rng: random.Random) -> tuple[int, int]:
    """Return a width and a height of 96 to 320 pixels, neither more than twice the other."""
    long = rng.choice((96, 112, 160, 224, 320))
    short = min(long, round(long * rng.uniform(0.6, 1.2)))
    return (long, short) if rng.random() < 0.65 else (short, long)


def draw_scene(rng: random.Random, size: tuple[int, int] | None = None, count: int | None = None) -> Scene:
    """Draw one to three shapes, no two with the same colour and shape, in a picture of any size."""
    width, height = size or draw_size(rng)
    count = count or rng.randint(1, 3)
    # The shapes lie along the longer side.
    is_row = width > height or (width == height and rng.random() < 0.5)
    length, breadth = (width, height) if is_row else (height, width)
    step = length / count
    largest = min(step, breadth) / 2
    middle = rng.uniform(largest, breadth - largest)
    places = (ACROSS if is_row else DOWN)[count]
    names = rng.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], count)
    items = []
    for number, (shape, colour) in enumerate(names):
        radius = largest * (rng.uniform(0.35, 0.95) if count == 1 else rng.uniform(0.6, 0.95))
        along = rng.uniform(number * step + radius, (number + 1) * step - radius)
        across = middle + rng.uniform(radius - largest, largest - radius)
        if count == 1:
            across = rng.uniform(radius, breadth - radius)
        x, y = (along, across) if is_row else (across, along)
        items.append(Item(shape, colour, places[number], x, y, radius))
    shades = [_between(*COLOURS[item.colour], rng.random()) for item in items]
    ground = _draw_ground(rng)
    while min(math.dist(ground, shade) for shade in shades) < 120:
        ground = _draw_ground(rng)
    picture = Image.new("RGB", (width, height), ground)
    for item, shade in zip(items, shades, strict=True):
        _paint(rng, ImageDraw.Draw(picture), item, shade)
    return Scene(picture, tuple(items))


def _between(first: tuple[int, ...], last: tuple[int, ...], part: float) -> tuple[int, ...]:
    return tuple(round(a + (b - a) * part) for a, b in zip(first, last, strict=True))


def _draw_ground(rng: random.Random) -> tuple[int, ...]:
    """Return white, a pale colour or a dark grey."""
    style = rng.random()
    if style < 0.4:
        return (255, 255, 255)
    low, high = (205, 255) if style < 0.75 else (20, 60)
    return tuple(rng.randint(low, high) for _ in range(3))


def _paint(rng: random.Random, pen: ImageDraw.ImageDraw, item: Item, shade: tuple[int, ...]) -> None:
    """Draw a shape inside its circle, turned by up to ten degrees."""
    x, y, radius = item.x, item.y, item.radius
    if item.shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shade)
        return
    corners, turn, inner = CORNERS[item.shape]
    turn += rng.choice((0, rng.uniform(-10, 10)))
    angles = [math.radians(turn + 360 * corner / corners) for corner in range(corners)]
    radii = [radius * (inner if corner % 2 else 1) for corner in range(corners)]
    pen.polygon(
        [(x + r * math.cos(a), y + r * math.sin(a)) for a, r in zip(angles, radii, strict=True)], fill=shade
    )
