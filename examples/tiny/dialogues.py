"""Batches for the training: pictures, what is where in them, and dialogues about them.

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


@dataclass(frozen=True, eq=False)
class Stage:
    """One part of the training, with its own optimizer."""

    name: str
    batch_size: int
    learning_rate: float
    mix: dict[str, float] = field(default_factory=dict)
    """Relative frequency of each kind of question; empty for no questions."""
    turns: tuple[tuple[int, ...], ...] = ((),)
    """Numbers of questions in the rows of text about each picture, for one step after another, from the first again.
    Rows of one question teach to look: in longer ones an answer often follows from those before it."""
    tower_learns: bool = True


@dataclass(frozen=True)
class Job:
    """A worker's task: draw the scenes numbered from `first`."""

    stage: Stage
    seed: int
    first: int
    turns: tuple[int, ...] = ()
    """Numbers of questions in the rows of text about each picture."""
    count: int | None = None
    """Number of shapes in each picture; by default as many as a scene has."""
    easy: bool = False
    """Whether no picture is hard in any way."""


@dataclass
class Batch:
    """Pictures, labels of their parts, and dialogues about them."""

    resized: torch.Tensor
    """Pictures after the processor's own resizing and padding, `[pictures, 3, 112, 112]` uint8."""
    cells: torch.Tensor
    """Class numbers from `label_cells`, `[pictures, 16, 3]` int64."""
    covers: torch.Tensor
    """How much of each square of a part is covered by shapes, `[pictures, 16, 49]`, 0 to 1."""
    dialogues: list[list[tuple[str, str]]]
    """For each row of text, its (question, answer) turns; as many rows for each picture, in the pictures' order."""


def draw_scene(seed: int, number: int, count: int | None = None, easy: bool = False) -> shapes.Scene:
    """The scene with this number, whatever was drawn before."""
    return shapes.random_scene(random.Random(f"{seed}/{number}"), count, frozenset() if easy else None)


def write_dialogues(
    mix: dict[str, float], turns: tuple[int, ...], seed: int, number: int, scene: shapes.Scene
) -> list[list[tuple[str, str]]]:
    """Rows of (question, answer) turns about the scene with this number."""
    rng = random.Random(f"{seed}/{number}/words")
    kinds, weights = list(mix), list(mix.values())
    rows: list[list[tuple[str, str]]] = []
    for length in turns:
        rows.append([])
        while len(rows[-1]) < length:
            found = questions.ask(rng, scene, rng.choices(kinds, weights)[0], grammar.write_question)
            if found:
                rows[-1].append(found)
    return rows


def draw_batch(job: Job) -> Batch:
    """Draw pictures and write a dialogue about each; runs in a worker process."""
    image_processor = Llama4ImageProcessor(size=TILE, max_patches=1, do_rescale=False, do_normalize=False)
    numbers = range(job.first, job.first + job.stage.batch_size)
    scenes = [draw_scene(job.seed, number, job.count, job.easy) for number in numbers]
    dialogues = [
        row
        for number, scene in zip(numbers, scenes, strict=True)
        for row in write_dialogues(job.stage.mix, job.turns, job.seed, number, scene)
    ]
    resized = image_processor([scene.picture for scene in scenes], return_tensors="pt")["pixel_values"]
    cells = torch.tensor([label_cells(scene) for scene in scenes])
    return Batch(resized, cells, torch.stack([cover_of_cells(scene) for scene in scenes]), dialogues)


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


def write_rows(
    processor: LlamoeProcessor, picture_text: str, dialogues: list[list[tuple[str, str]]], rng: random.Random
) -> dict[str, torch.Tensor]:
    """Tokenize dialogues in the model's chat format; only answers and their `<|eot|>` carry a loss.

    Args:
        processor: holds the tokenizer.
        picture_text: text that the processor writes for a picture.
        dialogues: for each row, its (question, answer) turns.
        rng: random choice of the picture's place.

    Returns:
        `input_ids`, `attention_mask` and `labels`, each `[rows, longest row]`, padded on the right.
    """
    tokenizer = processor.tokenizer
    rows = []
    for turns in dialogues:
        ids, labels = [tokenizer.bos_token_id], [-100]
        for turn, (question, answer) in enumerate(turns):
            if turn == 0:
                question = picture_text + question if rng.random() < 0.85 else question + picture_text
            prompt = (
                f"<|header_start|>user<|header_end|>\n\n{question}<|eot|>"
                "<|header_start|>assistant<|header_end|>\n\n"
            )
            prompt_ids, answer_ids = tokenizer(
                [prompt, f"{answer}<|eot|>"], add_special_tokens=False, return_attention_mask=False
            )["input_ids"]
            ids += prompt_ids + answer_ids
            labels += [-100] * len(prompt_ids) + answer_ids
        rows.append((ids, labels))
    longest = max(len(ids) for ids, _ in rows)

    def padded(column: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([values + [value] * (longest - len(values)) for values in column])

    input_ids = padded([ids for ids, _ in rows], tokenizer.pad_token_id)
    return {
        "input_ids": input_ids,
        "attention_mask": padded([[1] * len(ids) for ids, _ in rows], 0),
        "labels": padded([labels for _, labels in rows], -100),
    }


def picture_text(processor: LlamoeProcessor) -> str:
    """The text that the processor writes for a picture."""
    blank = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE))
    ids = processor(text=processor.image_token, images=[blank])["input_ids"][0]
    return processor.tokenizer.decode(ids)
