"""Train the model in `examples/llamoe-tiny` from random weights: `make train-tiny`.

The folder gives the model's configuration and its processor. Training has two stages, since a vision tower that only
learns from the loss of answers makes almost no progress for a very long time. First the tower is trained: linear heads,
which are thrown away later, predict from each of a picture's 16 tokens the colour, shape and place of the item there.
Then the tower is frozen, and the decoder is trained to answer. One seed determines everything.
"""

import hashlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import examine
import torch
from questions import ask, chat
from shapes import ACROSS, COLOURS, DOWN, SHAPES, Scene, draw_scene, draw_size
from torch import nn
from torch.nn import functional as F
from transformers import AutoProcessor, GenerationConfig, get_cosine_schedule_with_warmup, set_seed

import llamoe

OUT = Path("trained-tiny")
SEED = 0
# Number of steps whose mean loss is a line of the log.
LOGGED = 50
# The processor puts a picture into the upper left of a square, which the tower sees as 4 x 4 parts.
PARTS = 4
PLACES = tuple(
    dict.fromkeys(place for names in (ACROSS, DOWN) for places in names.values() for place in places)
)
# The words that the heads choose from for each part, besides "nothing", which is number 0.
NAMES = (tuple(COLOURS), SHAPES, PLACES)


@dataclass(frozen=True)
class Stage:
    """A stage of the training, which has its own optimizers."""

    name: str
    steps: int
    batch_size: int
    learning_rate: float


SEEING = Stage("seeing", 1500, 64, 6e-3)
ANSWERING = Stage("answering", 5000, 32, 5e-3)
# Questions about a named colour or shape take longest to learn, and are drawn more often.
KINDS = ("caption", "count", "which", *("colour", "shape", "where") * 2, *("exists",) * 3)


def draw_scenes(rng: random.Random, count: int) -> list[Scene]:
    """Draw scenes whose pictures have one size, so that the processor resizes them in a batch."""
    size = draw_size(rng)
    return [draw_scene(rng, size) for _ in range(count)]


def label_parts(scene: Scene) -> list[list[int]]:
    """Return the numbers of colour, shape and place of the item in each part of a picture, `[16, 3]`; 0 is nothing."""
    side = max(scene.picture.size) / PARTS
    labels = []
    for part in range(PARTS**2):
        x, y = (part % PARTS + 0.5) * side, (part // PARTS + 0.5) * side
        gaps = [math.dist((x, y), (item.x, item.y)) - item.radius for item in scene.items]
        item = scene.items[gaps.index(min(gaps))]
        words = (item.colour, item.shape, item.place)
        numbers = [1 + names.index(word) for names, word in zip(NAMES, words, strict=True)]
        labels.append(numbers if min(gaps) <= 0.4 * side else [0, 0, 0])
    return labels


def write_chat(rng: random.Random, scene: Scene, questions: int) -> list[dict]:
    """Write a chat with some questions about a picture or, rarely, with a single line and no picture."""
    if rng.random() < 0.06:
        asked, content = [chat(rng)], []
    else:
        asked, content = (
            [ask(rng, scene, KINDS) for _ in range(questions)],
            [{"type": "image", "image": scene.picture}],
        )
    messages = []
    for question, answer, _ in asked:
        content.append({"type": "text", "text": question})
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        content = []
    return messages


def collate(processor: Any, chats: list[list[dict]]) -> dict[str, torch.Tensor]:
    """Return the model's inputs for chats; only answers and their end tokens have a loss."""
    batch = processor.apply_chat_template(
        chats,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True},
    )
    is_answer = batch.pop("assistant_masks").bool()
    return {**batch, "labels": batch["input_ids"].masked_fill(~is_answer, -100)}


def train(
    modules: nn.ModuleList, get_loss: Callable[[random.Random], torch.Tensor], stage: Stage
) -> list[str]:
    """Train modules with a learning rate that rises, then falls by a cosine; return the log's lines."""
    # Muon (Jordan et al. 2024) trains the matrices between hidden states, AdamW everything else.
    weights = dict(modules.named_parameters())
    matrices = {name for name in weights if name.endswith(("proj.weight", "fc1.weight", "fc2.weight"))}
    others = [weight for name, weight in weights.items() if name not in matrices]
    rate = stage.learning_rate
    optimizers = [
        torch.optim.Muon(
            [weights[name] for name in sorted(matrices)], rate, 0.02, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, rate / 2, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        get_cosine_schedule_with_warmup(optimizer, stage.steps // 20, stage.steps) for optimizer in optimizers
    ]
    lines, losses = [], []
    for step in range(1, stage.steps + 1):
        loss = get_loss(random.Random(f"{SEED}/{stage.name}/{step}"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss.item())
        if step % LOGGED == 0 or step == stage.steps:
            lines.append(f"{stage.name} step {step:5}  loss {sum(losses) / len(losses):.4f}")
            losses = []
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Train both stages, save in bfloat16 and measure the saved model."""
    set_seed(SEED)
    processor = AutoProcessor.from_pretrained(examine.FOLDER)
    # Save the processor before it pads batches: its tokenizer's file would keep that setting.
    processor.save_pretrained(OUT)
    model = llamoe.LlamoeForConditionalGeneration(llamoe.LlamoeConfig.from_pretrained(examine.FOLDER))
    model.generation_config = GenerationConfig.from_pretrained(examine.FOLDER)
    classes = [1 + len(names) for names in NAMES]
    heads = nn.Linear(model.config.text_config.hidden_size, sum(classes))
    tower = nn.ModuleList([model.vision_model, model.multi_modal_projector])

    def seeing_loss(rng: random.Random) -> torch.Tensor:
        scenes = draw_scenes(rng, SEEING.batch_size)
        pictures = processor.image_processor([scene.picture for scene in scenes], return_tensors="pt")
        features = model.get_image_features(pictures["pixel_values"].float()).pooler_output
        labels = torch.tensor([label_parts(scene) for scene in scenes]).unbind(-1)
        logits = heads(features).split(classes, dim=-1)
        losses = [
            F.cross_entropy(one.flatten(0, 1), right.flatten())
            for one, right in zip(logits, labels, strict=True)
        ]
        return torch.stack(losses).sum()

    def answering_loss(rng: random.Random) -> torch.Tensor:
        # Equally many questions in a batch's chats: little padding. Often one: no earlier answer can be copied.
        questions = rng.choice((1, 1, 2, 3))
        chats = [write_chat(rng, scene, questions) for scene in draw_scenes(rng, ANSWERING.batch_size)]
        # If router logits are asked for, the loss includes one that balances experts.
        return model(**collate(processor, chats), output_router_logits=True, use_cache=False).loss

    begun = time.perf_counter()
    lines = train(nn.ModuleList([tower, heads]), seeing_loss, SEEING)
    tower.requires_grad_(False)
    lines += train(nn.ModuleList([model.language_model]), answering_loss, ANSWERING)
    minutes = (time.perf_counter() - begun) / 60
    model.bfloat16().save_pretrained(OUT)
    digest = hashlib.sha256((OUT / "model.safetensors").read_bytes()).hexdigest()
    steps = f"{SEEING.steps + ANSWERING.steps} steps from seed {SEED}, {minutes:.0f} minutes"
    table = examine.report(OUT)
    lines = [steps, *lines, "", table, "", f"sha256 of model.safetensors: {digest}", ""]
    (OUT / "training.log").write_text("\n".join(lines))
    print(table)


if __name__ == "__main__":
    main()
