"""Pictures of simple coloured shapes, with a description of each.

Needs PIL and numpy only. A `Scene` is drawn from a random generator, so a seed gives the same picture everywhere.
Ambiguous layouts (is it left of or above?) are discarded, so that answers about a scene can be compared as strings
(`questions.py`).
"""

import colorsys
import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageChops, ImageDraw

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

PLACES = {
    ("across", 2): ("on the left", "on the right"),
    ("across", 3): ("on the left", "in the middle", "on the right"),
    ("down", 2): ("at the top", "at the bottom"),
    ("down", 3): ("at the top", "in the middle", "at the bottom"),
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
    """A picture and its items, in reading order along `axis` ("across" or "down")."""

    picture: Image.Image
    items: tuple[Item, ...]
    axis: str


def random_shade(rng: random.Random, colour: str) -> tuple[int, int, int]:
    """An RGB value (0..255) of this colour name; in two of five cases one of the common values."""
    typed, boxes = COLOURS[colour]
    if rng.random() < 0.4:
        return rng.choice(typed)
    hue, saturation, value = (rng.uniform(*bounds) for bounds in rng.choice(boxes))
    return _rgb(hue, saturation, value)


def random_scene(rng: random.Random, count: int | None = None) -> Scene:
    """Draw one to three different shapes that do not touch, on a canvas of 64 to 512 pixels."""
    count = count or rng.choice((1, 1, 2, 2, 2, 3, 3))
    size = _random_canvas(rng)
    items, axis = _place(rng, size, count)
    ground = _random_ground(rng)
    while True:
        names = rng.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], count)
        shades = [random_shade(rng, colour) for colour, _ in names]
        if all(_contrast(shade, other) for shade in shades for other in ground):
            break
    picture = _paint_ground(rng, size, ground)
    smooth, outline = rng.random() < 0.7, rng.random() < 0.2
    named = []
    for (x, y, radius), (colour, shape), shade in zip(items, names, shades, strict=True):
        item = Item(shape, colour, x, y, radius)
        _paint(rng, picture, item, shade, smooth, outline)
        named.append(item)
    if rng.random() < 0.1:
        picture = _add_noise(rng, picture)
    return Scene(picture, tuple(named), axis)


def _rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _contrast(first: tuple[int, int, int], second: tuple[int, int, int]) -> bool:
    """Whether an edge between two colours is plain to see."""
    return math.dist(first, second) > 110


def _random_canvas(rng: random.Random) -> tuple[int, int]:
    """Width and height in pixels; a third of the canvases are square, no side is longer than twice the other."""
    side = rng.choice((64, 96, 112, 128, 160, 200, 224, 256, 300, 320, 400, 448, 512))
    if rng.random() < 0.35:
        return side, side
    other = max(64, round(side * rng.uniform(0.6, 1)))
    return (side, other) if rng.random() < 0.6 else (other, side)


def _random_ground(rng: random.Random) -> list[tuple[int, int, int]]:
    """The background: one colour, or the two ends of a gradient."""
    style = rng.random()
    if style < 0.35:
        return [(255, 255, 255)]
    if style < 0.5:
        level = 0 if rng.random() < 0.6 else rng.randrange(50)
        return [(level, level, level)]
    if style < 0.7:
        level = rng.randrange(60, 250)
        return [(level, level, level)]
    pastel = _rgb(rng.uniform(0, 360), rng.uniform(0.03, 0.3), rng.uniform(0.85, 1))
    if style < 0.85:
        return [pastel]
    return [pastel, _rgb(rng.uniform(0, 360), rng.uniform(0, 0.25), rng.uniform(0.8, 1))]


def _paint_ground(
    rng: random.Random, size: tuple[int, int], ground: list[tuple[int, int, int]]
) -> Image.Image:
    if len(ground) == 1:
        return Image.new("RGB", size, ground[0])
    ramp = Image.linear_gradient("L")
    if rng.random() < 0.5:
        ramp = ramp.rotate(90)
    return Image.composite(
        Image.new("RGB", size, ground[0]), Image.new("RGB", size, ground[1]), ramp.resize(size)
    )


def _add_noise(rng: random.Random, picture: Image.Image) -> Image.Image:
    noise = np.random.default_rng(rng.randrange(2**32)).normal(
        0, rng.uniform(2, 10), (*picture.size[::-1], 1)
    )
    return Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8))


def _place(
    rng: random.Random, size: tuple[int, int], count: int
) -> tuple[list[tuple[float, float, float]], str]:
    """Circles (x, y, radius) that do not touch, in reading order, and the axis of that order."""
    width, height = size
    short = min(size)
    smallest, largest = {1: (0.16, 0.42), 2: (0.15, 0.25), 3: (0.13, 0.2)}[count]
    while True:
        layout = rng.choice(("row", "column", "free"))
        equal = short * rng.uniform(smallest, largest) if rng.random() < 0.4 else None
        centre = rng.uniform(0.3, 0.7)
        placed = []
        for _ in range(count):
            radius = equal or short * rng.uniform(smallest, largest)
            x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            if layout == "row":
                y = min(max(height * (centre + rng.uniform(-0.06, 0.06)), radius), height - radius)
            elif layout == "column":
                x = min(max(width * (centre + rng.uniform(-0.06, 0.06)), radius), width - radius)
            placed.append((x, y, radius))
        pairs = [(a, b) for i, a in enumerate(placed) for b in placed[:i]]
        if any(math.dist(a[:2], b[:2]) < a[2] + b[2] + 0.03 * short for a, b in pairs):
            continue
        across, down = (_smallest_step([item[axis] for item in placed]) for axis in (0, 1))
        if count == 1 or max(across, down) > max(1.6 * min(across, down), 0.12 * short):
            axis = 0 if across >= down else 1
            return sorted(placed, key=lambda item: item[axis]), ("across", "down")[axis]


def _smallest_step(values: list[float]) -> float:
    ordered = sorted(values)
    return min((b - a for a, b in zip(ordered, ordered[1:], strict=False)), default=0.0)


def _corners(rng: random.Random, shape: str, radius: float) -> list[tuple[float, float]]:
    """Corners of a shape around the origin, inside its circumscribed circle."""
    tilt = 0.0 if rng.random() < 0.6 else rng.uniform(-20, 20)
    if shape == "square":
        angles, radii = [45, 135, 225, 315], [radius] * 4
    elif shape == "triangle":
        # Upright in most pictures. The two lower corners vary, so that not every triangle is equilateral.
        spread = rng.uniform(95, 140) if rng.random() < 0.5 else 120
        angles, radii = [-90, -90 + spread, -90 - spread], [radius] * 3
        if rng.random() < 0.3:
            tilt = rng.uniform(0, 360)
    else:
        inner = rng.uniform(0.38, 0.5)
        angles, radii = [-90 + 36 * k for k in range(10)], [radius * (1, inner)[k % 2] for k in range(10)]
    turned = [math.radians(angle + tilt) for angle in angles]
    return [(r * math.cos(a), r * math.sin(a)) for a, r in zip(turned, radii, strict=True)]


def _paint(rng: random.Random, picture: Image.Image, item: Item, shade, smooth: bool, outline: bool) -> None:
    """Draw one item; edges are smoothed by drawing its mask four times as large and averaging."""
    scale = 4 if smooth else 1
    left, top = math.floor(item.x - item.radius) - 1, math.floor(item.y - item.radius) - 1
    side = math.ceil(2 * item.radius) + 3
    mask = Image.new("L", (side * scale, side * scale))
    centre = ((item.x - left) * scale, (item.y - top) * scale)
    corners = None if item.shape == "circle" else _corners(rng, item.shape, item.radius)

    def fill(shrink: float) -> Image.Image:
        drawn = mask.copy()
        pen, size = ImageDraw.Draw(drawn), scale * shrink
        if corners is None:
            pen.ellipse([c + s * item.radius * size for s in (-1, 1) for c in centre], fill=255)
        else:
            pen.polygon([(centre[0] + x * size, centre[1] + y * size) for x, y in corners], fill=255)
        return drawn.reduce(scale)

    whole = fill(1.0)
    picture.paste(shade, (left, top), whole)
    if outline:
        edge = rng.choice([(0, 0, 0), tuple(c // 2 for c in shade)])
        picture.paste(edge, (left, top), ImageChops.subtract(whole, fill(rng.uniform(0.86, 0.94))))
