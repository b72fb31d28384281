"""Paints scenes of `shapes.py`: grounds, shapes, and what makes pictures hard.

Needs PIL and numpy only.
"""

import colorsys
import io
import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageChops, ImageDraw

if TYPE_CHECKING:
    from shapes import Item

Colour = tuple[int, ...]
WHITE = (255, 255, 255)


def stands_out(shade: Colour, ground: list[Colour]) -> bool:
    """Whether an edge between a shade and a ground, also between its two ends, is plain to see."""
    first, last = ground[0], ground[-1]
    between = [[a + (b - a) * part / 4 for a, b in zip(first, last, strict=True)] for part in range(5)]
    return all(math.dist(shade, colour) > 110 for colour in between)


def random_ground(rng: random.Random, stresses: frozenset[str]) -> list[Colour]:
    """The colours of a ground: one, or the two ends of a gradient, or the two of a texture."""
    if "coloured ground" in stresses:
        first = _rgb(rng.uniform(0, 360), rng.uniform(0.35, 1), rng.uniform(0.3, 1))
    else:
        first = _quiet_colour(rng)
    if "textured ground" in stresses:
        # The second colour is near the first, so that a texture is never a shape.
        return [first, tuple(min(255, max(0, part + rng.randint(-45, 45))) for part in first)]
    if first == WHITE or rng.random() < 0.8:
        return [first]
    return [first, _rgb(rng.uniform(0, 360), rng.uniform(0, 0.25), rng.uniform(0.8, 1))]


def paint(
    rng: random.Random,
    size: tuple[int, int],
    ground: list[Colour],
    items: Sequence["Item"],
    shades: Sequence[Colour],
    stresses: frozenset[str],
) -> tuple[Image.Image, Image.Image]:
    """The picture of a scene, and a mask ("L") of what its shapes cover, also where only their outlines are drawn.

    Args:
        rng: source of every choice.
        size: width and height in pixels.
        ground: of `random_ground`.
        items: shapes, drawn in this order; a later one covers an earlier.
        shades: RGB value of each shape.
        stresses: names from `shapes.STRESSES`.
    """
    textured = "textured ground" in stresses
    picture = _paint_texture(rng, size, ground) if textured else _paint_ground(rng, size, ground)
    smooth, edged, hollow = rng.random() < 0.7, rng.random() < 0.2, "outlines" in stresses
    cover = Image.new("L", size)
    for item, shade in zip(items, shades, strict=True):
        _paint_item(rng, picture, cover, item, shade, smooth, edged and not hollow, hollow)
    if "screenshot" in stresses:
        _paint_window(rng, picture, items)
    if "compressed" in stresses:
        picture = _compress(rng, picture)
    if rng.random() < 0.1:
        picture = _add_noise(rng, picture)
    return picture, cover


def _rgb(hue: float, saturation: float, value: float) -> Colour:
    red, green, blue = colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _quiet_colour(rng: random.Random) -> Colour:
    """White, a grey or a pastel."""
    style = rng.random()
    if style < 0.35:
        return WHITE
    if style < 0.5:
        return (0 if rng.random() < 0.6 else rng.randrange(50),) * 3
    if style < 0.7:
        return (rng.randrange(60, 250),) * 3
    return _rgb(rng.uniform(0, 360), rng.uniform(0.03, 0.3), rng.uniform(0.85, 1))


def _paint_ground(rng: random.Random, size: tuple[int, int], ground: list[Colour]) -> Image.Image:
    if len(ground) == 1:
        return Image.new("RGB", size, ground[0])
    ramp = Image.linear_gradient("L")
    if rng.random() < 0.5:
        ramp = ramp.rotate(90)
    return _blend(size, ground, ramp.resize(size))


def _paint_texture(rng: random.Random, size: tuple[int, int], ground: list[Colour]) -> Image.Image:
    """Stripes, squares, a lattice, dots, clouds or grain."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    step = max(3, round(min(size) * rng.uniform(0.04, 0.16)))
    kind = rng.choice(("stripes", "board", "lattice", "dots", "clouds", "grain"))
    if kind == "stripes":
        angle = rng.choice((0, math.pi / 2, rng.uniform(0, math.pi)))
        mask = ((x * math.cos(angle) + y * math.sin(angle)) // step) % 2
    elif kind == "board":
        mask = (x // step + y // step) % 2
    elif kind == "lattice":
        line = max(1, step // 8)
        mask = (x % step < line) | (y % step < line)
    elif kind == "dots":
        mask = (x % step - step / 2) ** 2 + (y % step - step / 2) ** 2 < (0.25 * step) ** 2
    else:
        cells = 1 if kind == "grain" else step
        values = np.random.default_rng(rng.randrange(2**32)).integers(
            0, 256, (height // cells + 2, width // cells + 2), dtype=np.uint8
        )
        return _blend(size, ground, Image.fromarray(values).resize(size, Image.Resampling.BICUBIC))
    return _blend(size, ground, Image.fromarray((255 * mask).astype(np.uint8)))


def _blend(size: tuple[int, int], ground: list[Colour], mask: Image.Image) -> Image.Image:
    return Image.composite(Image.new("RGB", size, ground[0]), Image.new("RGB", size, ground[1]), mask)


def _paint_window(rng: random.Random, picture: Image.Image, items: Sequence["Item"]) -> None:
    """A bar with a title at the top or bottom and lines of writing, in greys, where no shape is."""
    width, height = picture.size
    pen = ImageDraw.Draw(picture)
    top = min(item.y - item.radius for item in items)
    bottom = max(item.y + item.radius for item in items)
    grey = rng.randrange(50, 225)
    ink = (255 if grey < 140 else 20,) * 3
    words = (
        "File  Edit  View",
        "Untitled - Paint",
        "shapes.png",
        "Figure 1",
        "10:42  Mon",
        "100 %",
        "Slide 3",
    )
    bar = max(6, round(height * rng.uniform(0.06, 0.12)))
    if rng.random() < 0.6 and top > bar + 1:
        pen.rectangle((0, 0, width, bar), fill=(grey,) * 3)
        pen.text((3, 0), rng.choice(words), fill=ink, font_size=max(6, bar - 3))
    if rng.random() < 0.6 and bottom < height - bar - 1:
        pen.rectangle((0, height - bar, width, height), fill=(grey,) * 3)
        pen.text((width // 3, height - bar), rng.choice(words), fill=ink, font_size=max(6, bar - 3))
    if rng.random() < 0.5:
        pen.rectangle(
            (0, 0, width - 1, height - 1), outline=(grey,) * 3, width=max(1, min(picture.size) // 60)
        )


def _compress(rng: random.Random, picture: Image.Image) -> Image.Image:
    """Return the picture with JPEG artefacts of low quality."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=rng.randrange(20, 70))
    return Image.open(file).convert("RGB")


def _add_noise(rng: random.Random, picture: Image.Image) -> Image.Image:
    generator = np.random.default_rng(rng.randrange(2**32))
    noise = generator.normal(0, rng.uniform(2, 10), (*picture.size[::-1], 1))
    return Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8))


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


def _paint_item(
    rng: random.Random,
    picture: Image.Image,
    cover: Image.Image,
    item: "Item",
    shade: Colour,
    smooth: bool,
    edged: bool,
    hollow: bool,
) -> None:
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

    def trace(line: float) -> Image.Image:
        """The outline, `line` pixels wide and within the circumscribed circle."""
        drawn = mask.copy()
        pen, width = ImageDraw.Draw(drawn), max(1, round(line * scale))
        if corners is None:
            box = [c + s * item.radius * scale for s in (-1, 1) for c in centre]
            pen.ellipse(box, outline=255, width=width)
        else:
            size = scale * (1 - line / 2 / item.radius)
            ring = [(centre[0] + x * size, centre[1] + y * size) for x, y in [*corners, *corners[:2]]]
            pen.line(ring, fill=255, width=width, joint="curve")
        return drawn.reduce(scale)

    # An outline is about two pixels wide also where the processor makes the picture smaller.
    line = max(item.radius * rng.uniform(0.1, 0.25), 1.8 * max(picture.size) / 112)
    solid = fill(1.0)
    cover.paste(255, (left, top), solid)
    picture.paste(shade, (left, top), trace(line) if hollow else solid)
    if edged:
        edge = rng.choice([(0, 0, 0), tuple(c // 2 for c in shade)])
        picture.paste(edge, (left, top), ImageChops.subtract(fill(1.0), fill(rng.uniform(0.86, 0.94))))
