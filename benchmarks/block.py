"""Cases of the mixture block, Llama 4's and Mixtral's: prefill, decoding, uneven routing, training, LoRA on experts.

Contestants: transformers' block; ours with its defaults; and, as peers, ours (of Mixtral: stock's) with transformers'
own experts implementations. On a device each of Llama 4's also runs under `torch.compile`.
"""

import copy
import itertools
from collections.abc import Callable, Iterator

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import Llama4ForCausalLM

import llamoe
from llamoe.modeling.adapters.expert_lora import ParamWrapper
from llamoe.modeling.moe import Experts

from . import OURS, REFERENCE, is_of, roofline
from .bars import PEERS
from .harness import ROUNDS, Case, Cases, Contestant, tolerance_of, tolerance_of_gradients
from .memory import available_bytes
from .models import PAST, decode_step
from .routing import draw_experts, shares, steer
from .shapes import Setting, Shape
from .shared_weights import block_pair, mixtral_blocks, model_pair, text_config

MANY = 8192
FEW_ROUNDS = 2
"""Least number of rounds for `MANY` tokens or more, which take long on a CPU."""
IN_TURN = 16
"""Up to this many tokens, a pass reads too little to push the weights that it used out of the caches."""
GATHERED = 2**28
"""`batched_mm` copies an expert's weights for each token; a CPU skips it if the copies would exceed this."""
MOST_GATHERED = 128
"""Up to this many tokens `batched_mm` is measured in Mixtral's block."""
FROZEN = "frozen"
"""A step that trains nothing of the block: what is left if an adapter costs nothing."""
RANK = 16


def inference(
    setting: Setting,
    shape: Shape,
    decode: tuple[int, ...],
    prefill: tuple[int, ...],
    skewed: tuple[int, ...],
    copies: int = 1,
) -> Cases:
    """Forward passes without gradients.

    Args:
        setting: device and dtype.
        shape: sizes.
        decode: batch sizes of decoding, one token a row.
        prefill: lengths of one row.
        skewed: numbers of tokens that are also measured with Zipf's routing.
        copies: number of blocks with equal weights at different addresses, which few tokens go through in turn. As in a
            model of many layers, the code is then in the caches and the weights are not.
    """
    pairs = [block_pair(setting, shape, PEERS) for _ in range(copies)]
    stock, ours = pairs[0]
    for tokens, skew, used in _variants(pairs, decode, prefill, skewed):
        x, routing = tokens_for(setting, shape, stock, tokens, skew)
        decodes, repeats = tokens in decode, tokens <= IN_TURN and len(used) < copies
        x = x.view(tokens, 1, -1) if decodes else x[None]
        contestants = {REFERENCE: Contestant(_forward([theirs for theirs, _ in used], x))}
        contestants |= {name: Contestant(_forward([own[name] for _, own in used], x)) for name in ours}
        if tokens in setting.compiled_tokens and skew == "uniform":
            contestants |= _compiled(setting, {REFERENCE: stock, **ours}, x)
        yield Case(
            name=f"{'B' if decodes else 'T'} = {tokens}"
            + (", Zipf" if skew == "zipf" else "")
            + (", one layer again and again" if repeats else ""),
            contestants=contestants,
            work=roofline.of_block(shape, tokens, routing["distinct"], setting.dtype.itemsize),
            tolerance=tolerance_of(setting.dtype),
            facts=dict(
                phase="decode" if decodes else "prefill", tokens=tokens, experts=shape.experts, routing=skew
            )
            | dict(repeated=repeats, **routing),
            skipped=_too_much_gathered(setting, shape, tokens, contestants),
            least=FEW_ROUNDS if setting.device.type == "cpu" and tokens >= MANY else ROUNDS,
        )
        del contestants
        torch.compiler.reset()


def _variants(pairs: list, decode: tuple, prefill: tuple, skewed: tuple) -> Iterator[tuple[int, str, list]]:
    """Number of tokens, routing, and the pairs of blocks that take turns, for each variant."""
    for tokens in sorted({*decode, *prefill}):
        yield tokens, "uniform", pairs if tokens <= IN_TURN else pairs[:1]
        if tokens == 1 and len(pairs) > 1:
            yield tokens, "uniform", pairs[:1]
    for tokens in skewed:
        yield tokens, "zipf", pairs[:1]


def training(setting: Setting, shape: Shape, tokens: int) -> Cases:
    """Forward and backward passes; the gradients are compared."""
    stock, ours = block_pair(setting, shape, PEERS)
    x, routing = tokens_for(setting, shape, stock, tokens, "uniform")
    forward = roofline.of_block(shape, tokens, routing["distinct"], setting.dtype.itemsize)
    for frozen in (False, True):
        stock.experts.requires_grad_(not frozen)
        case = _training_case(setting, {REFERENCE: stock, **ours}, x[None])
        case.name = f"T = {tokens}, {'experts frozen' if frozen else 'all weights'}"
        case.work = roofline.of_training(forward, 0.5 if frozen else 0.0)
        case.facts = dict(phase="training", frozen=frozen, tokens=tokens, experts=shape.experts, **routing)
        case.facts["routing"] = "uniform"
        case.skipped = _too_much_gathered(setting, shape, tokens, case.contestants)
        yield case


def mixtral(setting: Setting, shape: Shape, counts: tuple[int, ...], trained: int, copies: int = 4) -> Cases:
    """Mixtral's block: rows of so many tokens, few of them through equal blocks in turn; then a step of training."""
    blocks = [mixtral_blocks(setting, shape) for _ in range(copies)]
    for tokens in counts:
        x = setting.randn(1, tokens, shape.hidden, offset=tokens + 1)
        used = blocks if tokens <= IN_TURN else blocks[:1]
        contestants = {name: Contestant(_forward([each[name] for each in used], x)) for name in blocks[0]}
        case = Case(f"T = {tokens}", contestants, None, tolerance_of(setting.dtype))
        yield _of_mixtral(case, "forward", tokens, shape)
    case = _training_case(setting, blocks[0], setting.randn(1, trained, shape.hidden))
    case.name = f"T = {trained}, training"
    yield _of_mixtral(case, "training", trained, shape)


def _of_mixtral(case: Case, phase: str, tokens: int, shape: Shape) -> Case:
    case.facts = {"phase": phase, "tokens": tokens, "experts": shape.experts}
    if tokens > MOST_GATHERED:
        case.skipped = {f"{REFERENCE}, batched_mm": "copies an expert's weights for each choice"}
    return case


def lora(setting: Setting, shape: Shape, counts: tuple[int, ...]) -> Cases:
    """Steps of training LoRA on the experts of a frozen block; gradients of inputs and factors are compared.

    The reference is peft's own way, which adds the update to the weights of all experts; ours adds it to their
    products. Both are around our block, with the same weights and factors. "frozen" is that without adapters.
    """
    stock, ours = block_pair(setting, shape, ())
    block = ours[OURS].requires_grad_(False)
    blocks = {name: _with_adapters(block, name == OURS, setting) for name in (REFERENCE, OURS)}
    for tokens in counts:
        x, routing = tokens_for(setting, shape, stock, tokens, "uniform")
        case = _training_case(setting, {**blocks, FROZEN: block}, x[None])
        case.contestants[FROZEN].outputs = None
        case.name = f"T = {tokens}"
        case.facts = dict(phase="lora", tokens=tokens, experts=shape.experts, rank=RANK, **routing)
        yield case


def lora_decoding(setting: Setting, shape: Shape, layers: int, batches: tuple[int, ...]) -> Cases:
    """One step of a decoder with LoRA on its experts, behind a short prompt, for batches of these sizes."""
    config = text_config(shape, layers)
    _, model = model_pair(setting, Llama4ForCausalLM, llamoe.LlamoeForCausalLM, config)
    decoders = {name: _with_adapters(model, name == OURS, setting) for name in (REFERENCE, OURS)} | {
        FROZEN: model
    }
    for batch in batches:
        prompt, ids = (setting.tokens(batch, count, model.vocab_size, offset=count) for count in (PAST, 1))
        contestants = {
            name: Contestant(torch.no_grad()(decode_step(each, prompt, ids)))
            for name, each in decoders.items()
        }
        contestants[FROZEN].outputs = None
        facts = {"phase": "lora decode", "tokens": batch, "experts": shape.experts, "rank": RANK}
        yield Case(f"decode, B = {batch}", contestants, None, tolerance_of(setting.dtype, layers), facts)


def _with_adapters(block: nn.Module, in_products: bool, setting: Setting) -> nn.Module:
    """A copy of a block or decoder around the same weights, with random factors on the experts' stacks."""
    shared = {id(weight): weight for weight in block.parameters()}
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=RANK, target_modules=[], target_parameters=stacks)
    # A choice of classes is left as it is; else ours would be taken for all our models.
    config._register_custom_module({Experts: ParamWrapper} if in_products else {nn.Identity: nn.Identity})
    adapted = inject_adapter_in_model(config, copy.deepcopy(block, shared))
    factors = (weight for weight in adapted.parameters() if weight.requires_grad)
    with torch.no_grad():
        for number, factor in enumerate(factors):
            factor.copy_(0.02 * setting.randn(*factor.shape, offset=10 + number))
    return adapted


def tokens_for(
    setting: Setting, shape: Shape, block: nn.Module, tokens: int, skew: str
) -> tuple[torch.Tensor, dict[str, float]]:
    """Inputs `[tokens, hidden]`, and statistics of their routing."""
    chosen = draw_experts(tokens, shape.experts, skew, setting.generator(tokens))
    noise = setting.randn(tokens, shape.hidden, offset=tokens + 1)
    return steer(noise, block.router.weight, chosen), shares(chosen)


def _output(module: Callable, x: torch.Tensor) -> torch.Tensor:
    output = module(x)
    return (output[0] if isinstance(output, tuple) else output).view_as(x)


def _forward(modules: list[nn.Module], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    turn = itertools.cycle(modules)
    return torch.no_grad()(lambda: _output(next(turn), x))


def _training_case(setting: Setting, blocks: dict[str, nn.Module], x: torch.Tensor) -> Case:
    """A case of forward and backward passes; gradients of inputs and of all weights that have one are compared."""
    x = x.requires_grad_()
    upstream = setting.randn(*x.shape, offset=3)

    def forget() -> None:
        x.grad = None
        for block in blocks.values():
            block.zero_grad(set_to_none=True)

    def step(block: nn.Module) -> Callable[[], list[torch.Tensor]]:
        weights = [weight for _, weight in sorted(block.named_parameters())]

        def run():
            forget()
            _output(block, x).backward(upstream)
            return [x.grad, *(weight.grad for weight in weights if weight.grad is not None)]

        return run

    contestants = {name: Contestant(step(block), outputs=list) for name, block in blocks.items()}
    return Case("", contestants, None, tolerance_of_gradients(setting.dtype), before=forget)


def _compiled(setting: Setting, modules: dict[str, nn.Module], x: torch.Tensor) -> dict[str, Contestant]:
    contestants = {}
    for mode in setting.compile_modes:
        for name, module in modules.items():

            def run(compiled=torch.compile(module.forward, mode=mode, dynamic=False)) -> torch.Tensor:  # noqa: B008
                torch.compiler.cudagraph_mark_step_begin()
                return _output(compiled, x)

            contestants[f"{name}, {mode}"] = Contestant(torch.no_grad()(run), warm_up=3, has_own_pool=True)
    return contestants


def _too_much_gathered(setting: Setting, shape: Shape, tokens: int, names: dict) -> dict[str, str]:
    copied = tokens * 3 * shape.hidden * shape.expert * setting.dtype.itemsize
    if copied <= (available_bytes(setting.device) if setting.device.type == "cuda" else GATHERED):
        return {}
    reason = f"copies {copied / 1e9:.1f} GB of weights, an expert's for each token"
    return {name: reason for name in names if is_of(name, "batched_mm")}
