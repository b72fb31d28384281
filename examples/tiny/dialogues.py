"""Batches for the training: pictures, what is where in them, and chats about them.

Every scene and every dialogue follows from a seed and its number, whatever was drawn before, so that a training that
was stopped goes on with the batches that it would have seen.
"""

import math
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import grammar
import numpy as np
import questions
import shapes
import torch
from model import PICTURE_SIZE, TILE
from PIL import Image
from transformers import Llama4ImageProcessor

from llamoe import LlamoeProcessor

# Labels of places for the linear heads; class 0 always means that nothing is there.
PLACES = ("alone", *sorted({place for places in shapes.PLACES.values() for place in places}))
CLASSES = (1 + len(shapes.COLOURS), 1 + len(shapes.SHAPES), 1 + len(PLACES))
CELLS = 4
# What shapes cover of each part is told in squares of 4 x 4 pixels, 7 x 7 of them.
SQUARES = 7


# (question, answer) turns.
Chat = list[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class Stage:
    """One part of the training, with its own optimizer."""

    name: str
    batch_size: int
    learning_rate: float
    mix: dict[str, float] = field(default_factory=dict)
    """Relative frequency of each kind of question; empty for no questions."""
    chats: tuple[int, ...] = ()
    """Number of questions in each chat about a picture. In long chats an answer often follows from those before it:
    chats of one question teach to look."""


@dataclass(frozen=True)
class Job:
    """A worker's task: draw the scenes numbered from `first`."""

    stage: Stage
    seed: int
    first: int
    count: int | None = None
    """Number of shapes in each picture; by default as many as a scene has."""
    easy: bool = False
    """Whether no picture is hard in any way."""


@dataclass
class Batch:
    """Pictures, labels of their parts, and chats about them."""

    resized: torch.Tensor
    """Pictures after the processor's own resizing and padding, `[pictures, 3, 112, 112]` uint8."""
    cells: torch.Tensor
    """Class numbers from `label_cells`, `[pictures, 16, 3]` int64."""
    covers: torch.Tensor
    """How much of each square of a part is covered by shapes, `[pictures, 16, 49]`, 0 to 1."""
    chats: list[list[Chat]]
    """The chats about each picture."""


def draw_scene(seed: int, number: int, count: int | None = None, easy: bool = False) -> shapes.Scene:
    """The scene with this number, whatever was drawn before."""
    return shapes.random_scene(random.Random(f"{seed}/{number}"), count, frozenset() if easy else None)


def write_chats(
    mix: dict[str, float], lengths: tuple[int, ...], seed: int, number: int, scene: shapes.Scene
) -> list[Chat]:
    """Chats of these numbers of questions about the scene with this number."""
    rng = random.Random(f"{seed}/{number}/words")
    kinds, weights = list(mix), list(mix.values())
    chats: list[Chat] = []
    for length in lengths:
        chats.append([])
        while len(chats[-1]) < length:
            found = questions.ask(rng, scene, rng.choices(kinds, weights)[0], grammar.write_question)
            if found:
                chats[-1].append(found)
    return chats


def draw_batch(job: Job) -> Batch:
    """Draw pictures and write a dialogue about each; runs in a worker process."""
    image_processor = Llama4ImageProcessor(size=TILE, max_patches=1, do_rescale=False, do_normalize=False)
    numbers = range(job.first, job.first + job.stage.batch_size)
    scenes = [draw_scene(job.seed, number, job.count, job.easy) for number in numbers]
    chats = [
        write_chats(job.stage.mix, job.stage.chats, job.seed, number, scene)
        for number, scene in zip(numbers, scenes, strict=True)
    ]
    resized = image_processor([scene.picture for scene in scenes], return_tensors="pt")["pixel_values"]
    cells = torch.tensor([label_cells(scene) for scene in scenes])
    return Batch(resized, cells, torch.stack([cover_of_cells(scene) for scene in scenes]), chats)


def batches(pool: ProcessPoolExecutor | None, jobs: list[Job]) -> Iterator[Batch]:
    """Yield batches in order, drawn ahead by the workers of `pool` (or here, without one)."""
    if pool is None:
        yield from map(draw_batch, jobs)
        return
    ahead = 8
    waiting = [pool.submit(draw_batch, job) for job in jobs[:ahead]]
    for step in range(len(jobs)):
        yield waiting.pop(0).result()
        if step + ahead < len(jobs):
            waiting.append(pool.submit(draw_batch, jobs[step + ahead]))


def label_cells(scene: shapes.Scene) -> list[list[int]]:
    """Labels for each of the 4 x 4 parts of the picture that the tower sees, row by row.

    Returns:
        for each part, class numbers of colour, shape and place; all zero where no shape is near its middle.
    """
    scale = PICTURE_SIZE / max(scene.picture.size)
    cell = PICTURE_SIZE / CELLS
    classes = [
        [
            1 + list(shapes.COLOURS).index(item.colour),
            1 + shapes.SHAPES.index(item.shape),
            1 + PLACES.index(place),
        ]
        for item, place in zip(scene.items, scene.places or ("alone",), strict=True)
    ]
    labels = []
    for part in range(CELLS * CELLS):
        x, y = (part % CELLS + 0.5) * cell, (part // CELLS + 0.5) * cell
        gaps = [math.dist((x, y), (it.x * scale, it.y * scale)) - it.radius * scale for it in scene.items]
        # A small shape may be far from every middle: the part that holds its centre shows it, too.
        holds = [
            (it.x * scale // cell, it.y * scale // cell) == (part % CELLS, part // CELLS)
            for it in scene.items
        ]
        nearest = min(range(len(gaps)), key=lambda number: (not holds[number], gaps[number]))
        labels.append(classes[nearest] if holds[nearest] or gaps[nearest] <= 0.3 * cell else [0, 0, 0])
    return labels


def cover_of_cells(scene: shapes.Scene) -> torch.Tensor:
    """How much of each square is covered by shapes, `[16, 49]`, for the same parts as `label_cells`."""
    side = CELLS * SQUARES
    size = [max(1, round(length * side / max(scene.picture.size))) for length in scene.picture.size]
    # The processor puts a picture into the upper left of its square.
    squares = Image.new("L", (side, side))
    squares.paste(scene.cover.resize(size, Image.Resampling.BOX))
    parts = torch.from_numpy(np.array(squares)).unflatten(0, (CELLS, SQUARES)).unflatten(2, (CELLS, SQUARES))
    return parts.transpose(1, 2).reshape(CELLS * CELLS, SQUARES**2) / 255


# Parts of a row that several chats see; those of one chat alone are numbered from 2, padding has -1.
OPENING, PICTURE = 0, 1


def write_rows(
    processor: LlamoeProcessor, picture_text: str, chats: list[list[Chat]], rng: random.Random
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tokenize all chats about a picture into one row, in which none sees another; they share the picture's tokens.

    Only answers and their `<|eot|>` carry a loss. In one of seven chats the picture comes after the first question.

    Args:
        processor: holds the tokenizer.
        picture_text: text that the processor writes for a picture.
        chats: the chats about each picture.
        rng: random choice of the picture's place.

    Returns:
        Inputs of the model: `input_ids`, `position_ids` and `labels`, each `[pictures, longest row]`, padded on the
        right, and `attention_mask`, `[pictures, 1, longest row, longest row]` bool. And the numbers of the pictures in
        the order in which the rows show them, some more than once.
    """
    tokenizer = processor.tokenizer
    user, assistant = (f"<|header_start|>{name}<|header_end|>\n\n" for name in ("user", "assistant"))
    # (row, part, whether it sees the row's picture, whether it is an answer), and its text
    pieces, texts, shown = [], [], []

    def write(text: str, *about: int | bool) -> None:
        pieces.append(about)
        texts.append(text)

    for row, about in enumerate(chats):
        write(f"<|begin_of_text|>{user}", row, OPENING, False, False)
        write(picture_text, row, PICTURE, False, False)
        shown.append(row)
        for part, chat in enumerate(about, start=PICTURE + 1):
            comes_first = rng.random() < 6 / 7
            shown += [] if comes_first else [row]
            for turn, (question, answer) in enumerate(chat):
                before, after = user if turn else "", "" if turn or comes_first else picture_text
                write(f"{before}{question}{after}<|eot|>{assistant}", row, part, comes_first, False)
                write(f"{answer}<|eot|>", row, part, comes_first, True)
    rows: list[list[tuple[int, ...]]] = [[] for _ in chats]
    position: dict[int, int] = {}
    for ids, (row, part, sees_picture, is_answer) in zip(
        tokenizer(texts, add_special_tokens=False)["input_ids"], pieces, strict=True
    ):
        if part == OPENING:
            position = {}
        # A chat's positions go on after what it sees.
        first = position.get(part, position.get(PICTURE if sees_picture else OPENING, 0))
        position[part] = first + len(ids)
        for at, token in enumerate(ids, start=first):
            rows[row].append((token, token if is_answer else -100, at, part, sees_picture))
    longest = max(map(len, rows))
    filling = (tokenizer.pad_token_id, -100, 0, -1, False)
    columns = torch.tensor([row + [filling] * (longest - len(row)) for row in rows]).unbind(-1)
    input_ids, labels, position_ids, part, sees_picture = columns
    asking, asked = part[:, :, None], part[:, None, :]
    is_shared = (asked == OPENING) | ((asked == PICTURE) & (sees_picture[:, :, None] > 0))
    mask = ((asking == asked) | is_shared).tril()
    inputs = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
    return inputs | {"attention_mask": mask[:, None]}, torch.tensor(shown)


def picture_text(processor: LlamoeProcessor) -> str:
    """The text that the processor writes for a picture."""
    blank = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE))
    ids = processor(text=processor.image_token, images=[blank])["input_ids"][0]
    return processor.tokenizer.decode(ids)
