"""Cases of the vision tower and of small parts: norms, SwiGLU, rotary embedding; eager and compiled."""

import itertools
from collections.abc import Callable

import torch
from torch import nn
from transformers import Llama4VisionModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding, apply_rotary_emb

import llamoe
from llamoe.modeling.kernels import linear
from llamoe.modeling.layers.feed_forward import FeedForward
from llamoe.modeling.layers.normalization import RMSNorm
from llamoe.modeling.layers.rotary import RotaryEmbedding, rotate

from . import OURS, REFERENCE
from .harness import Case, Cases, Contestant, tolerance_of
from .roofline import Work
from .shapes import Setting, Shape
from .shared_weights import dense_config, draw_weights, model_pair, text_config, vision_config

EPS = 1e-5
IN_TURN = 64
"""Number of weights that one token goes through in turn."""


def vision(
    setting: Setting, hidden: int, layers: int, heads: int, output: int, tiles: tuple[int, ...]
) -> Cases:
    """`Llama4VisionModel` and `LlamoeVisionModel` on tiles of 336 pixels."""
    config = vision_config(hidden, layers, heads, output)
    pair = model_pair(setting, Llama4VisionModel, llamoe.LlamoeVisionModel, config)
    weights = sum(parameter.numel() for parameter in pair[0].parameters())
    multiplied = sum(parameter.numel() for parameter in pair[0].model.parameters() if parameter.ndim == 2)
    patches = (config.image_size // config.patch_size) ** 2 + 1
    for count in tiles:
        pixels = setting.randn(count, 3, config.image_size, config.image_size)

        def run(model, pixels=pixels) -> Callable[[], torch.Tensor]:
            return torch.no_grad()(lambda: model(pixels).last_hidden_state)

        scores = 4 * layers * count * patches**2 * hidden
        moved = weights * setting.dtype.itemsize + pixels.nbytes
        yield Case(
            name=f"{count} tile{'s' if count > 1 else ''}",
            contestants={
                who: Contestant(run(model)) for who, model in zip((REFERENCE, OURS), pair, strict=True)
            },
            # The adapter processes a quarter of the patches. Counting all of them overstates the work by less than 1 %.
            work=Work(moved, 2 * count * patches * multiplied + scores),
            tolerance=tolerance_of(setting.dtype, layers),
            facts={"phase": "vision", "tokens": count},
        )


def small(setting: Setting, shape: Shape, tokens: int, compiled: bool = True) -> Cases:
    """RMSNorm, SwiGLU, rotary embedding, and one token's product with the weight of a linear layer.

    Args:
        setting: device and dtype.
        shape: sizes.
        tokens: length of one row.
        compiled: whether to measure `torch.compile`, too.
    """
    for name, functions, work in (
        _norms(setting, shape, tokens),
        _feed_forwards(setting, shape, tokens),
        _rotary(setting, shape, tokens, interleave=False),
        _rotary(setting, shape, tokens, interleave=True),
        _norms(setting, shape, 1),
        _linear_layer(setting, shape),
    ):
        for compiles in (False, True) if compiled and not name.endswith("T = 1") else (False,):
            yield Case(
                name=f"{name}, {'compiled' if compiles else 'eager'}",
                contestants={
                    # A LayerNorm computes another function.
                    who: _contestant(function, compiles, who != "nn.LayerNorm")
                    for who, function in functions.items()
                },
                work=work,
                tolerance=tolerance_of(setting.dtype),
                facts={"phase": "part", "tokens": tokens, "compiled": compiles},
            )
            torch.compiler.reset()


def _contestant(function: Callable, compiles: bool, compared: bool) -> Contestant:
    run = torch.compile(function, dynamic=False) if compiles else function
    outputs = (lambda result: list(result) if isinstance(result, tuple) else [result]) if compared else None
    return Contestant(torch.no_grad()(run), outputs=outputs, warm_up=2 if compiles else 1)


def _norms(setting: Setting, shape: Shape, tokens: int):
    x = setting.randn(1, tokens, shape.hidden)
    norms = {REFERENCE: LlamaRMSNorm, OURS: RMSNorm, "nn.RMSNorm": nn.RMSNorm, "nn.LayerNorm": nn.LayerNorm}
    functions = {}
    for name, norm_class in norms.items():
        norm = norm_class(shape.hidden, EPS).to(setting.device, setting.dtype)
        draw_weights(norm, setting)
        functions[name] = lambda norm=norm: norm(x)
    return f"RMSNorm, T = {tokens}", functions, Work(2 * x.nbytes, 0)


def _feed_forwards(setting: Setting, shape: Shape, tokens: int):
    x = setting.randn(1, tokens, shape.hidden)
    config = dense_config(shape, 1)
    stock = LlamaMLP(config).to(setting.device, setting.dtype)
    draw_weights(stock, setting)
    ours = FeedForward(config.hidden_size, config.intermediate_size, config.hidden_act)
    ours.load_state_dict(dict(stock.named_parameters()), assign=True)
    weights = sum(parameter.numel() for parameter in stock.parameters())
    work = Work((weights + 2 * x.numel()) * x.itemsize, 2 * tokens * weights)
    return f"SwiGLU, T = {tokens}", {REFERENCE: lambda: stock(x), OURS: lambda: ours(x)}, work


def _rotary(setting: Setting, shape: Shape, tokens: int, interleave: bool):
    """LLaMA's, which splits a head in halves, or Llama 4's, which interleaves."""
    # The layout that a projection returns: heads after tokens.
    query = setting.randn(1, tokens, shape.heads, shape.head_dim)
    key = setting.randn(1, tokens, shape.key_value_heads, shape.head_dim, offset=2)
    positions = torch.arange(tokens, device=setting.device)[None]
    config = text_config(shape, no_rope_layers=[1]) if interleave else dense_config(shape, 1)
    with torch.device(setting.device):
        cos, sin = RotaryEmbedding(llamoe.from_stock(config))(query, positions)
        angles = Llama4TextRotaryEmbedding(config)(query, positions) if interleave else None
    # Stock's angles cover both halves of a head, in the dtype of the hidden states.
    full = [torch.cat((angle, angle), dim=-1).to(setting.dtype) for angle in (cos, sin)]

    def stock() -> tuple[torch.Tensor, ...]:
        if interleave:
            return apply_rotary_emb(query, key, angles)
        rotated = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *full)
        return tuple(x.transpose(1, 2) for x in rotated)

    def ours() -> tuple[torch.Tensor, ...]:
        return rotate(query, cos, sin, interleave), rotate(key, cos, sin, interleave)

    name = f"rotary of {'Llama 4' if interleave else 'LLaMA'}, T = {tokens}"
    return name, {REFERENCE: stock, OURS: ours}, Work(2 * (query.nbytes + key.nbytes), 0)


def _linear_layer(setting: Setting, shape: Shape):
    x = setting.randn(1, shape.hidden)
    layers = [nn.Linear(shape.hidden, shape.expert, bias=False, device="meta") for _ in range(IN_TURN)]
    for layer in layers:
        layer.weight = nn.Parameter(setting.randn(shape.expert, shape.hidden, offset=2))
    # In a model, a weight has left the caches before its next turn, so these are more than the caches hold.
    turn = itertools.cycle(layers)
    functions = {REFERENCE: lambda: next(turn)(x), OURS: lambda: linear(x, next(turn).weight)}
    weight = layers[0].weight
    return "linear layer, T = 1", functions, Work(weight.nbytes + x.nbytes, 2 * weight.numel())
