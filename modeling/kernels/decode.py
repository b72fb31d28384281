"""The one door to faster decoding on a CPU: decides whether a pass of few rows goes through compiled kernels.

A decode step is bound by reading weights, which torch reads at half to three quarters of the memory's speed, and in
small models by the calls between products. `begin_few_rows` decides once a pass whether the fast way serves. What it
gives computes half a layer each time, or all layers for one token, or says None: then the modules are called. The
numbers are the modules', with their roundings.

A layer that is watched, or adapted in other ways than by LoRA, is called as a module, and those beside it are not.

Shapes: B batch, T tokens, H hidden size.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .cache_room import append, room_for_token
from .cpp_layer import (
    FirstHalf,
    Layers,
    SecondHalf,
    decode,
    finish,
    place_rooms,
    prepare_first_half,
    prepare_layers,
    prepare_second_half,
    project,
)
from .cpu import apply_linear, can_use_shortcut
from .few_rows_pass import Linears
from .known_modules import base_of, formula_of, unwatched_formula
from .limits import CPP_PACKED_MAX_ROWS
from .second_half import SecondHalves, may_have_noise
from .single_queries import attend_to_single_queries


class _Attention(NamedTuple):
    """What is known of attention and the norm before."""

    norm: int | None
    """Address of the norm's weight; None where its module must be called."""
    inputs: Linears
    """Queries, keys and values."""
    output: Linears
    one_token: FirstHalf | None
    """Where one token takes two calls."""


class _Layer(NamedTuple):
    """What is known of a whole layer."""

    first: FirstHalf
    second: SecondHalf
    has_experts: bool


class _Decoder(NamedTuple):
    """What is known of all layers, where one call computes them."""

    layers: Layers
    config: Any
    caches: list[tuple[int, int, int]]
    """Of each layer its place in a cache, the heads of keys, and the numbers of a head."""
    rotated: int
    """Numbers of a head in layers that rotate; 0 if none does."""
    is_tuned: bool
    has_experts: bool


def begin_few_rows(
    x: torch.Tensor, options: Mapping[str, Any], modules: Sequence[nn.Module] = ()
) -> "FewRows | None":
    """What computes a pass of few rows; None where the modules do.

    Args:
        x: `[B, T, H]`, what the first layer is given.
        options: arguments of the attention implementation.
        modules: with all that they contain, what the pass computes with, so that it need not be looked at one by one.
    """
    if can_use_shortcut(x) and 0 < x.numel() <= CPP_PACKED_MAX_ROWS * x.shape[-1]:
        return FewRows(x, options, modules)
    return None


def apply_head(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`linear(x)` of a language model's head, whose rows are often fewer than those of its decoder."""
    few = begin_few_rows(x, {})
    return apply_linear(linear, x) if few is None else few.head(linear, x)


class FewRows(SecondHalves):
    """A pass of few rows through a decoder."""

    def token(
        self,
        layers: Sequence[Any],
        x: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, ...],
        attention_masks: Iterable[Any],
        position_ids: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor | None:
        """One token through all layers by one kernel call; None, with an unchanged cache, where it takes more.

        Args:
            layers: the decoder's, in order.
            x: the first one's input.
            position_embeddings: as in `Attention.forward`, like the others.
            attention_masks: of all layers.
            position_ids: likewise.
            cache: likewise.
        """
        if self.state is None or any(mask is not None for mask in attention_masks):
            return None
        if not self._sees_all_keys(x, None, cache) or not self._takes(x):
            return None
        known = self.all_layers(layers)
        if known is None:
            return None
        if known.rotated and not _are_angles(*position_embeddings, head_dim=known.rotated):
            return None
        found = []
        for index, heads, size in known.caches:
            room = room_for_token(cache, index, heads, size, x.dtype)
            if room is None:
                return None
            found.append(room)
        scale = temperature_at(known.config, position_ids.item()) if known.is_tuned else 1.0
        angles = [table.data_ptr() for table in position_embeddings] if known.rotated else []
        rooms = place_rooms([(*room.addresses, length) for _, room, length in found])
        y = decode(x, known.layers, rooms, angles, scale)
        for layer, room, length in found:
            room.advance(layer, length)
        return y

    def all_layers(self, layers: Sequence[Any]) -> _Decoder | None:
        """What is known of all layers; None where one token takes more than a call now."""
        if len(layers) not in self.decoders:
            self.decoders[len(layers)] = self._all_layers(layers)
        known: _Decoder | None = self.decoders[len(layers)]
        if known is None or not self._ask(known.config).is_sdpa or (known.has_experts and not self.is_llamoe):
            return None
        return known

    def _all_layers(self, layers: Sequence[Any]) -> _Decoder | None:
        if not all(hasattr(layer, "self_attn") for layer in layers):
            # Somebody put another module in a layer's place, which is called.
            return None
        found, caches, attentions = [], [], [layer.self_attn for layer in layers]
        for layer, attention in zip(layers, attentions, strict=True):
            known = self._whole_layer(layer)
            if known is None or attention.config is not attentions[0].config:
                return None
            found.append((known, attention.use_rope, attention.use_temperature_tuning))
            head_dim = known.first.head_dim
            caches.append((attention.layer_idx, known.first.sizes[1] // head_dim, head_dim))
        sizes = {
            size for (_, _, size), attention in zip(caches, attentions, strict=True) if attention.use_rope
        }
        if not found or len(sizes) > 1 or len({index for index, _, _ in caches}) < len(caches):
            return None
        return _Decoder(
            prepare_layers([(known.first, known.second, *switches) for known, *switches in found]),
            attentions[0].config,
            caches,
            next(iter(sizes), 0),
            any(is_tuned for _, _, is_tuned in found),
            any(known.has_experts for known, *_ in found),
        )

    def _whole_layer(self, layer: Any) -> _Layer | None:
        """What is known of a layer that nothing watches; None where it takes more than two calls, or must be called."""
        norm, attention = layer.input_layernorm, layer.self_attn
        is_plain = formula_of(layer) == "layer" and not layer.training and layer._compiled_call_impl is None
        half = self._attention(norm, attention) if is_plain and formula_of(attention) == "attention" else None
        if half is None or half.one_token is None:
            return None
        norm, module = layer.post_attention_layernorm, getattr(layer, layer.feed_forward_name)
        known, formula = None, formula_of(module)
        if formula == "feed_forward":
            known = self._feed_forward_half(module, norm)
        elif (
            formula == "mixture"
            and not may_have_noise(module)
            and self._is_plain_way(base_of(module.experts))
        ):
            known = self._mixture_half(norm, module)
        if known is None or known.whole is None or known.norm is None:
            return None
        second = prepare_second_half(known.norm, norm.eps, known.whole)
        return _Layer(half.one_token, second, formula == "mixture")

    def attend(
        self,
        norm: Any,
        attention: Any,
        x: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, ...],
        attention_mask: Any,
        position_ids: torch.Tensor,
        cache: Any,
        options: Mapping[str, Any],
    ) -> torch.Tensor | None:
        """`x + attention(norm(x))`, arguments as in `Attention.forward`; None where the modules must be called.

        `options` are for the attention implementation.
        """
        if formula_of(attention) != "attention" or not self._takes(x):
            return None
        known = self._attention(norm, attention)
        context = position_embeddings, attention_mask, position_ids, cache
        if known is None:
            return x + attention(self.normalize(norm, x), *context, **options)[0]
        if (
            known.one_token is not None
            and self._sees_all_keys(x, attention_mask, cache)
            and self._ask(attention.config).is_sdpa
        ):
            found = self._attend_one_token(
                known.one_token, attention, x, position_embeddings, position_ids, cache
            )
            if found is not None:
                return found
        rows = self._normalize(norm, known.norm, x)
        linears = [attention._modules[f"{name}_proj"] for name in "qkvo"]
        projected = self._multiply(linears[:3], known.inputs, rows)
        attended, _ = attention.attend(projected, *context, **options)
        return x + self._multiply(linears[3:], known.output, attended)[0]

    def _attention(self, norm: Any, attention: Any) -> _Attention | None:
        """What is known of attention and the norm before."""
        linears, qk_norm = [attention._modules[f"{name}_proj"] for name in "qkvo"], attention.qk_norm

        def work_out() -> _Attention:
            inputs, output = self._linears(*linears[:3]), self._linears(linears[3])
            address, together = self._norm(norm, inputs), (inputs.together, output.together)
            one_token = None
            if (
                address is not None
                and None not in together
                and together[0].inputs == self.size
                and not attention.training
                and (qk_norm is None or unwatched_formula(qk_norm) == "l2_norm")
            ):
                qk_eps = -1.0 if qk_norm is None else qk_norm.eps
                how = attention.head_dim, attention.scaling, attention.rope_interleave, qk_eps
                one_token = prepare_first_half(self.dtype, address, norm.eps, *together, *how)
            return _Attention(address, inputs, output, one_token)

        return self._recall([attention, norm, *linears, *([] if qk_norm is None else [qk_norm])], work_out)

    def _sees_all_keys(self, x: torch.Tensor, attention_mask: Any, cache: Any) -> bool:
        """Whether `x` is one token that attends to all cached keys, without a mask."""
        return self.is_one_token and attention_mask is None and cache is not None and x.is_contiguous()

    def _attend_one_token(
        self,
        first: FirstHalf,
        attention: Any,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, ...],
        position_ids: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor | None:
        """`x + attention(norm(x))` of one token; None, before the cache was updated, if no kernel takes `angles`."""
        if attention.use_rope and not _are_angles(*angles, head_dim=first.head_dim):
            return None
        tuned = attention.use_temperature_tuning
        scale = temperature_at(attention.config, position_ids.item()) if tuned else 1.0
        projected = project(x, first, angles if attention.use_rope else (), scale)
        query, key, value = projected.split_with_sizes(first.sizes)
        shape = 1, -1, 1, first.head_dim
        key, value = append(cache, attention.layer_idx, key.view(shape), value.view(shape))
        if key.shape == value.shape and _fits(key, x, first) and _fits(value, x, first):
            return finish(x, first, query, key, value)
        attended = attend_to_single_queries(query.view(shape), key, value, None, attention.scaling)
        return x + self.head(attention.o_proj, attended.reshape(1, 1, -1))


def _are_angles(cosines: torch.Tensor, *others: torch.Tensor, head_dim: int) -> bool:
    """Whether these are the cosines and sines of one position, and not what `rotary_tables` makes of them."""
    return len(others) == 1 and all(
        table.is_cpu
        and table.dtype == torch.float32
        and table.numel() * 2 == head_dim
        and table.is_contiguous()
        for table in (cosines, *others)
    )


def _fits(keys: torch.Tensor, x: torch.Tensor, half: FirstHalf) -> bool:
    """Whether a cache gave an ordinary tensor of one row and these heads."""
    return (
        type(keys) is torch.Tensor
        and keys.dtype == x.dtype
        and keys.is_cpu
        and keys.stride(3) == 1
        and keys.shape[:2] == (1, half.sizes[1] // half.head_dim)
        and keys.shape[3] == half.head_dim
    )


def temperature_at(config: Any, position: int | float) -> float:
    """The factor of a position's queries, as in `Attention`."""
    steps = max(math.floor((position + 1) / config.floor_scale), 0)
    return math.log1p(steps) * config.attn_scale + 1.0
