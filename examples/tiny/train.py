"""Train the model in `examples/llamoe-tiny` from nothing: `make train-tiny`.

A mixture of experts with a vision tower, small enough for two processor cores, learns to answer questions about
pictures of coloured shapes. One seed decides all: weights, pictures, questions, and in which order they come.

A tower trained on words alone gets almost no signal for a very long time, so training has two stages. SEEING: linear
heads read colour, shape and place from each of a picture's 16 tokens, and which squares of it are covered; the heads
are discarded at the end. ANSWERING: the tower stays as it is, and the text model answers several questions about each
picture. Both begin with what is easy.

The folder gets the model, its processor, `training.log` and the loss as a picture, `loss.png`.
"""

import hashlib
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import examine
import questions
import torch
from dialogues import CLASSES, SQUARES, Job, Stage, batches, draw_scene, picture_text, write_chats, write_rows
from matplotlib.figure import Figure
from model import build_model, build_processor, build_tokenizer
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup, set_seed
from transformers.modeling_outputs import BaseModelOutputWithPooling

from llamoe import LlamoeForConditionalGeneration, LlamoeProcessor

OUT = Path("trained-tiny")
# Of both stages.
STEPS = 9000
SEED = 0
# Questions in each column of the examination at the end.
EXAMINED = 960
# Steps whose losses make a line of the log together.
LOGGED = 100

SEEING = Stage("seeing", 64, 6e-3)
ANSWERING = Stage(
    "answering",
    24,
    5e-3,
    dict.fromkeys(questions.KINDS, 1.0)
    | {"caption": 3.0, "count": 1.5, "exists": 2.0, "where": 2.0, "beside": 1.5, "relation": 2.0},
    chats=(1, 1, 1, 1, 2),
)


def plan(steps: int, seed: int) -> list[Job]:
    """The jobs for every batch of the training.

    The first tenth of SEEING shows one shape in each picture, the first tenth of ANSWERING no hard picture.
    """
    seeing = steps * 4 // 9
    jobs, first = [], 0
    for stage, length in ((SEEING, seeing), (ANSWERING, steps - seeing)):
        for step in range(length):
            easy = step < length // 10
            jobs.append(Job(stage, seed, first, 1 if easy and stage is SEEING else None, easy))
            first += stage.batch_size
    return jobs


def write_corpus(seed: int, scenes: int = 1000) -> list[str]:
    """Texts for the tokenizer: dialogues with each kind of question, and the names of who speaks."""
    mix = dict.fromkeys(questions.KINDS, 1.0)
    corpus = ["user", "assistant", "system", "\n\n"]
    for number in range(scenes):
        for turn in write_chats(mix, (12,), seed, number, draw_scene(seed, number))[0]:
            corpus += turn
    return corpus


def normalise(image_processor: Any, resized: torch.Tensor) -> Any:
    """The processor's last step: `[pictures, 3, height, width]` uint8 to float32 with its bfloat16 values."""
    mean, std = image_processor.image_mean, image_processor.image_std
    return image_processor.rescale_and_normalize(
        resized, True, image_processor.rescale_factor, True, mean, std
    ).float()


def seeing_loss(
    heads: nn.Linear, features: torch.Tensor, cells: torch.Tensor, covers: torch.Tensor
) -> torch.Tensor:
    """Cross entropy of colour, shape and place, and of covered squares, read from the tokens of pictures.

    Silhouettes give the tower something to learn in every token, before it can name a shape.

    Args:
        heads: one linear layer for all.
        features: the text model's inputs for pictures, `[pictures, 16, hidden_size]`.
        cells: class numbers, `[pictures, 16, 3]`.
        covers: parts of squares, `[pictures, 16, 49]`.
    """
    *classes, squares = heads(features).split((*CLASSES, SQUARES**2), dim=-1)
    loss = 2 * F.binary_cross_entropy_with_logits(squares, covers)
    for logits, labels in zip(classes, cells.unbind(-1), strict=True):
        weight = torch.ones(logits.shape[-1])
        # Most of a picture is background.
        weight[0] = 0.25
        loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)
    return loss


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal (Jordan et al. 2024), all matrices of one shape at once, in float32.

    `torch.optim.Muon` takes them one by one, in bfloat16, which a CPU computes slowly.
    """

    def __init__(self, weights: Iterable[torch.Tensor], lr: float, momentum: float = 0.95):
        super().__init__(weights, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights, `[..., rows, columns]`."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape].append(weight)
            for shape, weights in by_shape.items():
                updates = []
                for weight in weights:
                    state = self.state[weight]
                    average = state.get("average")
                    if average is None:
                        average = state["average"] = torch.zeros_like(weight)
                    average.lerp_(weight.grad, 1 - group["momentum"])
                    updates.append(weight.grad.lerp(average, group["momentum"]))
                # As large as the steps of AdamW.
                size = group["lr"] * 0.2 * max(shape[-2:]) ** 0.5
                for weight, update in zip(weights, orthogonal(torch.stack(updates)), strict=True):
                    weight.mul_(1 - 0.02 * group["lr"]).sub_(update, alpha=size)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """About the nearest orthogonal matrix to each, `[..., rows, columns]`: five Newton-Schulz iterations."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x.mT if is_tall else x


def make_optimizers(modules: list[nn.Module], learning_rate: float, steps: int) -> tuple[list, list]:
    """Muon for the matrices between hidden states, AdamW for the rest; both warm up, then decay to zero by a cosine."""
    matrices, others = [], []
    for module in modules:
        for name, weight in module.named_parameters():
            if not weight.requires_grad:
                continue
            is_matrix = name.endswith(
                ("proj.weight", "fc1.weight", "fc2.weight", "gate_up_proj", "down_proj")
            )
            (matrices if is_matrix else others).append(weight)
    optimizers = [
        Muon(matrices, lr=learning_rate),
        torch.optim.AdamW(others, lr=learning_rate / 2, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    warm_up = min(50, steps // 10)
    return optimizers, [get_cosine_schedule_with_warmup(each, warm_up, steps) for each in optimizers]


def train(
    model: LlamoeForConditionalGeneration, heads: nn.Linear, jobs: list[Job], processor: LlamoeProcessor
) -> list[float]:
    """Train in place, with a bar that shows stage, loss and speed, and return the loss of every step."""
    image_text, losses = picture_text(processor), []
    # Workers pay off only in a long run. They are spawned, since a fork of a process with torch's threads hangs.
    worker = nullcontext()
    if len(jobs) > 50:
        spawn = get_context("spawn")
        worker = ProcessPoolExecutor(1, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,))
    model.train()
    with worker as pool, tqdm(total=len(jobs), unit="step") as bar:
        stage, optimizers, schedules = None, [], []
        for job, batch in zip(jobs, batches(pool, jobs), strict=True):
            if job.stage is not stage:
                stage = job.stage
                length = sum(other.stage is stage for other in jobs)
                optimizers, schedules = make_optimizers([model, heads], stage.learning_rate, length)
            with torch.set_grad_enabled(stage is SEEING):
                pixels = normalise(processor.image_processor, batch.resized)
                features = model.get_image_features(pixels).pooler_output
            if stage is SEEING:
                loss = seeing_loss(heads, features, batch.cells, batch.covers)
            else:
                rng = random.Random(f"{job.seed}/{job.first}")
                rows, shown = write_rows(processor, image_text, batch.chats, rng)
                # The computed features replace the pixels. The loss includes the balancing of experts.
                seen = {"image": BaseModelOutputWithPooling(pooler_output=features[shown])}
                loss = model(**rows, mm_encoder_outputs=seen, output_router_logits=True, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            losses.append(loss.item())
            bar.set_description(stage.name, refresh=False)
            bar.set_postfix(loss=f"{mean(losses[-30:]):.4f}", refresh=False)
            bar.update()
    return losses


def mean(values: list[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


def draw_losses(jobs: list[Job], losses: list[float], path: Path) -> None:
    """The loss over the steps: a mean of thirty steps for each point, a colour for each stage."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for stage in dict.fromkeys(job.stage for job in jobs):
        steps = [step for step, job in enumerate(jobs) if job.stage is stage]
        means = [mean(losses[max(steps[0], step - 29) : step + 1]) for step in steps]
        axes.semilogy(steps, means, label=stage.name)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train, save in bfloat16 and measure the saved model."""
    set_seed(SEED)
    processor = build_processor(build_tokenizer(784, write_corpus(SEED)))
    model = build_model(processor.tokenizer)
    heads = nn.Linear(model.config.text_config.hidden_size, sum(CLASSES) + SQUARES**2)
    jobs = plan(STEPS, SEED)
    OUT.mkdir(parents=True, exist_ok=True)
    print(f"{model.num_parameters() / 1e6:.2f} million parameters, {len(processor.tokenizer)} tokens")
    begun = time.perf_counter()
    losses = train(model, heads, jobs, processor)
    minutes = (time.perf_counter() - begun) / 60
    draw_losses(jobs, losses, OUT / "loss.png")
    model.bfloat16().save_pretrained(OUT)
    processor.save_pretrained(OUT)
    log = write_log(jobs, losses, minutes, OUT)
    (OUT / "training.log").write_text(log)
    print(log, end="")


def write_log(jobs: list[Job], losses: list[float], minutes: float, folder: Path) -> str:
    """What the training was, how its loss fell, what the saved model answers, and which file that was."""
    lines = [f"{len(jobs)} steps from seed {jobs[0].seed}, {minutes:.0f} minutes"]
    for last in range(LOGGED, len(losses) + 1, LOGGED):
        loss = mean(losses[last - LOGGED : last])
        lines.append(f"step {last:5}  {jobs[last - 1].stage.name:<10} loss {loss:.4f}")
    lines += ["", examine.report(folder, EXAMINED), ""]
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    lines.append(f"sha256 of model.safetensors: {digest}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
