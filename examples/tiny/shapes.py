"""Scenes of simple coloured shapes: what there is, and where.

A `Scene` is drawn from a random generator, so a seed gives the same picture everywhere. Ambiguous layouts (is it left
of or above?) are discarded, so that answers about a scene can be compared as strings (`questions.py`).
"""

import colorsys
import math
import random
from dataclasses import dataclass

import painting
from PIL import Image

SHAPES = ("circle", "square", "triangle", "star")

# For each colour name: common RGB values, and boxes of (hue in degrees, saturation, value) whose shades everybody calls
# by that name. In the gaps between the boxes people disagree.
COLOURS = {
    "red": ([(255, 0, 0), (220, 20, 60), (214, 39, 40)], [((-10, 8), (0.72, 1), (0.72, 1))]),
    "orange": ([(255, 165, 0), (255, 140, 0), (255, 127, 14)], [((22, 39), (0.82, 1), (0.88, 1))]),
    "yellow": ([(255, 255, 0), (255, 215, 0), (241, 196, 15)], [((48, 62), (0.65, 1), (0.88, 1))]),
    "green": ([(0, 128, 0), (0, 255, 0), (44, 160, 44)], [((95, 150), (0.5, 1), (0.42, 1))]),
    "blue": ([(0, 0, 255), (31, 119, 180), (30, 144, 255)], [((204, 242), (0.6, 1), (0.48, 1))]),
    "purple": (
        [(128, 0, 128), (148, 103, 189), (155, 89, 182)],
        [((268, 284), (0.45, 1), (0.45, 0.95)), ((284, 301), (0.5, 1), (0.4, 0.72))],
    ),
    "black": ([(0, 0, 0)], [((0, 360), (0, 0.3), (0, 0.1))]),
    "white": ([(255, 255, 255)], [((0, 360), (0, 0.04), (0.96, 1))]),
}

# Names of places for each layout and number of shapes, in reading order.
PLACES = {
    ("across", 2): ("on the left", "on the right"),
    ("across", 3): ("on the left", "in the middle", "on the right"),
    ("across", 4): ("on the left", "second from the left", "second from the right", "on the right"),
    ("down", 2): ("at the top", "at the bottom"),
    ("down", 3): ("at the top", "in the middle", "at the bottom"),
    ("down", 4): ("at the top", "second from the top", "second from the bottom", "at the bottom"),
    ("grid", 4): ("at the top left", "at the top right", "at the bottom left", "at the bottom right"),
}

# How a picture may be harder than its neighbours, and how often each is chosen.
STRESSES = {
    "small": 3,
    "strip": 2,
    "four": 3,
    "touching": 2,
    "coloured ground": 2,
    "textured ground": 2,
    "outlines": 2,
    "screenshot": 1,
    "compressed": 1,
}


@dataclass(frozen=True)
class Item:
    """One shape: its name, and its place (centre and radius of its circumscribed circle, in pixels)."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        """Colour and shape, such as "red circle"."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A picture and its items, in reading order of its layout: "across", "down" or "grid"."""

    picture: Image.Image
    items: tuple[Item, ...]
    layout: str
    cover: Image.Image
    """A mask of what the items cover, as large as the picture."""

    @property
    def places(self) -> tuple[str, ...]:
        """Names of the items' places; none where there is a single item."""
        return PLACES.get((self.layout, len(self.items)), ())


def relation(first: Item, second: Item) -> str | None:
    """Where the first lies as seen from the second, or None where people would disagree."""
    dx, dy = first.x - second.x, first.y - second.y
    apart = 0.6 * (first.radius + second.radius)
    if abs(dx) > max(1.8 * abs(dy), apart):
        return "to the left of" if dx < 0 else "to the right of"
    if abs(dy) > max(1.8 * abs(dx), apart):
        return "above" if dy < 0 else "below"
    return None


def random_shade(rng: random.Random, colour: str) -> painting.Colour:
    """An RGB value (0..255) of this colour name; in two of five cases one of the common values."""
    typed, boxes = COLOURS[colour]
    if rng.random() < 0.4:
        return rng.choice(typed)
    hue, saturation, value = (rng.uniform(*bounds) for bounds in rng.choice(boxes))
    return tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value))


def random_stresses(rng: random.Random) -> frozenset[str]:
    """Ways in which a picture is hard: none in half of all, one in three of eight, two in one of eight."""
    names, weights = list(STRESSES), list(STRESSES.values())
    number = rng.choice((0, 0, 0, 0, 1, 1, 1, 2))
    return frozenset(rng.choices(names, weights, k=number))


def random_scene(
    rng: random.Random, count: int | None = None, stresses: frozenset[str] | None = None
) -> Scene:
    """Draw one to four different shapes on a canvas of 64 to 512 pixels.

    Args:
        rng: source of every choice.
        count: number of shapes; by default four where `stresses` says so, else one to three.
        stresses: names from `STRESSES`; drawn by default.
    """
    stresses = random_stresses(rng) if stresses is None else stresses
    if count is None:
        count = 4 if "four" in stresses else rng.choice((1, 1, 2, 2, 2, 3, 3))
    size = _random_canvas(rng, strip="strip" in stresses)
    placed, layout = _place(rng, size, count, "small" in stresses, "touching" in stresses)
    names = _random_names(rng, count)
    while True:
        ground = painting.random_ground(rng, stresses)
        shades = [random_shade(rng, colour) for colour, _ in names]
        if all(painting.stands_out(shade, ground) for shade in shades):
            break
    items = tuple(Item(shape, colour, *circle) for circle, (colour, shape) in zip(placed, names, strict=True))
    picture, cover = painting.paint(rng, size, ground, items, shades, stresses)
    return Scene(picture, items, layout, cover)


def _random_names(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Colours and shapes, no pair twice; often with a shape or a colour that occurs several times."""
    colours, shapes = list(COLOURS), list(SHAPES)
    if count > 1 and rng.random() < 0.3:
        shapes = rng.sample(shapes, 2 if count > 2 else 1)
    elif count > 1 and rng.random() < 0.3:
        colours = rng.sample(colours, 2 if count > 2 else 1)
    return rng.sample([(colour, shape) for colour in colours for shape in shapes], count)


def _random_canvas(rng: random.Random, strip: bool) -> tuple[int, int]:
    """Width and height in pixels; a third are square, and only strips are longer than twice their height."""
    side = rng.choice((64, 96, 112, 128, 160, 200, 224, 256, 300, 320, 400, 448, 512))
    if strip:
        side = max(side, 160)
        other = round(side / rng.uniform(2.1, 3.3))
    elif rng.random() < 0.35:
        other = side
    else:
        other = max(64, round(side * rng.uniform(0.55, 1)))
    return (side, other) if rng.random() < 0.6 else (other, side)


def _place(
    rng: random.Random, size: tuple[int, int], count: int, small: bool, touching: bool
) -> tuple[list[tuple[float, float, float]], str]:
    """Circles (x, y, radius) in reading order, and the layout that names their places."""
    width, height = size
    short = min(size)
    smallest, largest = {1: (0.16, 0.42), 2: (0.15, 0.25), 3: (0.13, 0.2), 4: (0.11, 0.17)}[count]
    if max(size) > 2 * short:
        # In a strip there is room along its length; its height alone bounds the shapes.
        smallest, largest = 0.22, 0.4
    if small:
        smallest, largest = (part * max(size) / short for part in (0.045, 0.08))
    while True:
        layout = rng.choice(("row", "column", "free") if count < 4 else ("row", "column", "grid", "grid"))
        equal = short * rng.uniform(smallest, largest) if rng.random() < 0.4 else None
        centre = rng.uniform(0.3, 0.7)
        placed = []
        for number in range(count):
            radius = equal or short * rng.uniform(smallest, largest)
            x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            if layout == "row":
                y = min(max(height * (centre + rng.uniform(-0.06, 0.06)), radius), height - radius)
            elif layout == "column":
                x = min(max(width * (centre + rng.uniform(-0.06, 0.06)), radius), width - radius)
            elif layout == "grid":
                x, y = (x + number % 2 * width) / 2, (y + number // 2 * height) / 2
            placed.append((x, y, radius))
        if touching and count > 1:
            placed = _push_together(rng, placed)
        if not _apart(placed, -0.25 if touching else 0.03, short):
            continue
        if any(not r <= x <= width - r or not r <= y <= height - r for x, y, r in placed):
            continue
        if layout == "grid":
            if _is_grid(placed, short):
                return placed, "grid"
            continue
        across, down = (_smallest_step([item[axis] for item in placed]) for axis in (0, 1))
        if count == 1 or max(across, down) > max(1.6 * min(across, down), 0.12 * short):
            axis = 0 if across >= down else 1
            return sorted(placed, key=lambda item: item[axis]), ("across", "down")[axis]


def _push_together(rng: random.Random, placed: list[tuple[float, float, float]]) -> list:
    """Moves the second circle to the first, until their shapes touch or overlap a little."""
    (x, y, radius), (other_x, other_y, other_radius), *others = placed
    distance = math.dist((x, y), (other_x, other_y))
    part = rng.uniform(0.78, 0.95) * (radius + other_radius) / max(distance, 1e-3)
    moved = (x + (other_x - x) * part, y + (other_y - y) * part, other_radius)
    return [(x, y, radius), moved, *others]


def _apart(placed: list[tuple[float, float, float]], gap: float, short: int) -> bool:
    """Whether no two circles are nearer than a gap: of the canvas' side or, where negative, of their own size."""
    for number, first in enumerate(placed):
        for second in placed[:number]:
            reach = first[2] + second[2]
            least = reach + gap * short if gap > 0 else reach * (1 + gap)
            if math.dist(first[:2], second[:2]) < least:
                return False
    return True


def _is_grid(placed: list[tuple[float, float, float]], short: int) -> bool:
    """Whether the four stand in two rows and two columns that nobody doubts."""
    (left, top), (right, top_2), (left_2, bottom), (right_2, bottom_2) = (item[:2] for item in placed)
    across = min(right, right_2) - max(left, left_2)
    down = min(bottom, bottom_2) - max(top, top_2)
    slant = max(abs(left - left_2), abs(right - right_2), abs(top - top_2), abs(bottom - bottom_2))
    return min(across, down) > max(0.12 * short, slant)


def _smallest_step(values: list[float]) -> float:
    ordered = sorted(values)
    return min((b - a for a, b in zip(ordered, ordered[1:], strict=False)), default=0.0)
