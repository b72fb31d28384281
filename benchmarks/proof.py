"""Record the values that `benchmarks.prove_gpu` measures, with their limits, and write the page of results."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import llamoe

from .harness import Clock, DeviceClock, ProcessorClock
from .machine import about_line
from .random_models import build
from .weights import Setting

_LAYER, _EMBEDDINGS = 4.5e9, 4.2e9
"""Bytes in bfloat16 of one layer of Llama 4 Scout, and of its embeddings and head together."""
TINY = dict(vocab_size=101, hidden_size=96, intermediate_size=128, head_dim=16, num_local_experts=5) | dict(
    num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None
)
"""Sizes that replace Scout's with `--small`."""


def nbytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


@dataclass
class Check:
    """A value that a step of `prove_gpu` measured; `passed` is None if the value has no limit."""

    step: str
    what: str
    value: Any
    limit: str = ""
    passed: bool | None = None

    def cells(self) -> tuple[str, ...]:
        """Return step, name, value, limit and verdict as text."""
        value = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)
        return (self.step, self.what, value, self.limit, {True: "ok", False: "FAILED", None: ""}[self.passed])


@dataclass
class Proof:
    """A run of `benchmarks.prove_gpu`.

    Attributes:
        device: the device that is tested.
        small: True if models have small sizes, as on a CPU.
        folder: a temporary folder.
        checks: values measured so far.
        step: name of the running step.
    """

    device: torch.device
    small: bool
    folder: Path
    checks: list[Check] = field(default_factory=list)
    step: str = ""

    @property
    def is_cuda(self) -> bool:
        """Return True on a CUDA device."""
        return self.device.type == "cuda"

    def say(self, what: str, value: Any) -> None:
        """Record a value that has no limit."""
        self.checks.append(Check(self.step, what, value))

    def judge(self, what: str, value: float, most: float | None = None, least: float | None = None) -> None:
        """Record a number, and whether it is within its limit."""
        passed = (most is None or value <= most) and (least is None or value >= least)
        limit = f"at most {most:g}" if most is not None else f"at least {least:g}"
        self.checks.append(Check(self.step, what, value, limit, passed))

    def seconds(self, run: Callable[[], Any], repeats: int = 5) -> float:
        """Return the seconds of a run, the least of three means; on a GPU, of replays of its CUDA graph."""
        run()
        if self.is_cuda:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        return min(self.clock().sample(run, repeats) for _ in range(3))

    def clock(self) -> Clock:
        """Return the clock of the device."""
        return DeviceClock(self.device) if self.is_cuda else ProcessorClock(1 << 20)

    def model(self, layers: int, weights: str) -> Any:
        """Build a text model with random weights, in Scout's sizes or, with `--small`, in small ones."""
        text = {**(TINY if self.small else {}), "num_hidden_layers": layers}
        config = llamoe.preset("llama-4-scout", text_config=text).text_config
        return build(self.setting(), config, weights)

    @property
    def has_bfloat16(self) -> bool:
        """Return True if the device multiplies bfloat16, which llamoe's int4 and int8 weights need."""
        return not self.is_cuda or torch.cuda.get_device_capability(self.device) >= (8, 0)

    def setting(self) -> Setting:
        """Return the device and the dtype of models: bfloat16, or float16 on GPUs without it."""
        return Setting(self.device, torch.bfloat16 if self.has_bfloat16 else torch.float16)

    def layers(self, wanted: int) -> int:
        """Return the number of Scout's layers in bfloat16 that fit into half of the GPU's memory, at most `wanted`."""
        if self.small:
            return wanted
        room = torch.cuda.get_device_properties(self.device).total_memory / 2 - _EMBEDDINGS
        return max(1, min(wanted, int(room / _LAYER)))


def page(results: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    lines = ["# What was proved", "", about_line(results["machine"]), ""]
    lines += [
        f"`python -m benchmarks.prove_gpu`, {results['sizes']} sizes, {sum(results['seconds'].values()):.0f} s",
        "",
    ]
    lines += ["| step | what | value | limit | |", "|---|---|---|---|---|"]
    for check in results["checks"]:
        cells = (cell.replace("|", "/").replace("\n", " ") for cell in Check(**check).cells())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
