"""Measure the mixture blocks of Llama 4 and Mixtral: forward passes, training, LoRA on the experts.

Our block and transformers' ("stock") have the same weights; hidden size 512, intermediate size 1,024.
"""

import copy
import itertools
from collections.abc import Callable, Iterator

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from llamoe.modeling.adapters.expert_lora import ParamWrapper
from llamoe.modeling.moe import Experts

from .harness import OURS, STOCK, Case, tolerance_of, tolerance_of_gradients
from .weights import Setting, llama4_blocks, mixtral_blocks, routed_rows

COPIES = 4
"""Copies of a block that take turns if rows are few: together they exceed the processor's cache, as a model does."""
FEW = 16
"""Largest number of rows for which the copies of a block take turns."""
RANK = 16
PEFT = "peft"


def forward(setting: Setting, experts: int, limits: dict[int, float]) -> Iterator[Case]:
    """Yield the cases of Llama 4's block without gradients.

    Args:
        setting: device and dtype.
        experts: number of experts.
        limits: number of rows to the largest allowed ratio of our time to stock's.
    """
    pairs = [llama4_blocks(setting, experts) for _ in range(COPIES)]
    router = pairs[0][0].router.weight
    for rows, limit in limits.items():
        yield _forward_case(setting, pairs, routed_rows(setting, router, rows), limit)


def training(setting: Setting, experts: int, rows: int, limit: float) -> Iterator[Case]:
    """Yield the case of a training step of Llama 4's block; gradients of inputs and weights are compared."""
    stock, ours = llama4_blocks(setting, experts)
    x = routed_rows(setting, stock.router.weight, rows)
    case = _training_case(setting, {STOCK: stock, OURS: ours}, x)
    case.at_most = {OURS: limit}
    yield case


def mixtral(setting: Setting, limits: dict[int, float], trained: int) -> Iterator[Case]:
    """Yield the cases of Mixtral's block, against transformers' with `grouped_mm`: inference, then a training step."""
    pairs = [mixtral_blocks(setting) for _ in range(COPIES)]
    for rows, limit in limits.items():
        yield _forward_case(setting, pairs, setting.randn(1, rows, 512, offset=rows), limit)
    case = _training_case(
        setting, dict(zip((STOCK, OURS), pairs[0], strict=True)), setting.randn(1, trained, 512)
    )
    case.at_most = {OURS: 1.05}
    yield case


def lora(
    setting: Setting, experts: int, limits: dict[int, float], memory: float | None = None
) -> Iterator[Case]:
    """Yield the cases of training LoRA on a frozen block's experts, against peft's own wrapper of the same block.

    peft adds the LoRA update to the weights of all experts; we multiply the chosen experts' rows by A and B.
    """
    _, block = llama4_blocks(setting, experts)
    block.requires_grad_(False)
    blocks = {
        PEFT: _adapted(setting, block, nn.Identity, nn.Identity),
        OURS: _adapted(setting, block, Experts, ParamWrapper),
    }
    for rows, limit in limits.items():
        x = routed_rows(setting, block.router.weight, rows)
        case = _training_case(setting, blocks, x, reference=PEFT)
        case.at_most = {OURS: limit}
        case.memory_at_most = {OURS: memory} if memory and rows == min(limits) else {}
        yield case


def _adapted(setting: Setting, block: nn.Module, module_class: type, adapter_class: type) -> nn.Module:
    """Return a copy of a block, with the same weight tensors and random LoRA factors on the experts."""
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=RANK, target_modules=[], target_parameters=stacks)
    # Set the wrapper: by default peft's contestant would get llamoe's, too.
    config._register_custom_module({module_class: adapter_class})
    shared = {id(weight): weight for weight in block.parameters()}
    adapted = inject_adapter_in_model(config, copy.deepcopy(block, shared))
    factors = [weight for weight in adapted.parameters() if weight.requires_grad]
    with torch.no_grad():
        for number, factor in enumerate(factors):
            factor.copy_(0.02 * setting.randn(*factor.shape, offset=10 + number))
    return adapted


def _forward_case(setting: Setting, pairs: list, x: torch.Tensor, limit: float) -> Case:
    rows = x.shape[1]
    used = pairs if rows <= FEW else pairs[:1]
    runs = {name: _in_turn([pair[index] for pair in used], x) for index, name in enumerate((STOCK, OURS))}
    return Case(f"{rows} rows", runs, tolerance_of(setting.dtype), at_most={OURS: limit})


def _in_turn(modules: list[nn.Module], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    turn = itertools.cycle(modules)
    return torch.no_grad()(lambda: _output(next(turn), x))


def _output(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = module(x)
    return (output[0] if isinstance(output, tuple) else output).view_as(x)


def _training_case(
    setting: Setting, blocks: dict[str, nn.Module], x: torch.Tensor, reference: str = STOCK
) -> Case:
    x = x.requires_grad_()
    upstream = setting.randn(*x.shape, offset=3)

    def forget() -> None:
        x.grad = None
        for block in blocks.values():
            block.zero_grad(set_to_none=True)

    def step(block: nn.Module) -> Callable[[], list[torch.Tensor]]:
        weights = [weight for _, weight in sorted(block.named_parameters()) if weight.requires_grad]

        def run() -> list[torch.Tensor]:
            forget()
            _output(block, x).backward(upstream)
            return [x.grad, *(weight.grad for weight in weights if weight.grad is not None)]

        return run

    runs = {name: step(block) for name, block in blocks.items()}
    tolerance = tolerance_of_gradients(setting.dtype)
    return Case(f"training, {x.shape[1]} rows", runs, tolerance, reference=reference, before=forget)
