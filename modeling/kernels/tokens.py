"""The tokens of one row one after the other, by one kernel call each, as long as nothing else can have changed.

A pass looks at all modules, checks inputs, makes positions, masks and angles, and tells the cache of its token. In a
small model that takes a good part of a token's time. Between two tokens of `generate` all of it stays as it is or grows
by one, so it is done once for many.

Shapes: H hidden size, V vocabulary, R rotated pairs.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import nn

from .cache_room import Room, room_for_token
from .cpp_layer import Layers, decode, place_rooms
from .decode import FewRows, begin_few_rows, temperature_at
from .known_modules import is_own_forward

_AHEAD = 128
"""For so many tokens at most angles are computed at once."""


class _Known(NamedTuple):
    """What tokens are decoded with, as long as nothing changes."""

    few: FewRows
    layers: Layers
    rooms: Any
    angles: tuple[torch.Tensor, ...]
    """Cosines and sines `[tokens, R]`, in float32, or nothing."""
    config: Any
    is_tuned: bool
    caches: list[tuple[Any, Room]]
    """The cache of each layer, and its memory."""
    kept: list[torch.Tensor]
    """Weights, so that their addresses stay right whatever another thread does to the model."""


class Tokens:
    """Decodes tokens of one row, none of which is hidden, behind those that a cache has."""

    def __init__(self, model: Any, length: int, limit: int | None, is_watched: bool):
        """Begin.

        Args:
            model: a decoder with a head, as `model.model` and `model.lm_head`, or a model that has it as
                `model.language_model` and asks it alone.
            length: tokens of the prompt, and of what the cache had before it.
            limit: so many tokens see all tokens before them; None: all do.
            is_watched: whether others' code runs between tokens. Then all is looked at for each token.
        """
        self.whole, self.model = model, getattr(model, "language_model", model)
        self.length, self.limit, self.is_watched = length, limit, is_watched
        self.cache: Any = None
        self._is_over = False
        self._known: _Known | None = None
        # Of the tokens that `_known` serves: index of the first one, those that are decoded, and all.
        self._first = self._done = self._count = 0

    def can_go_on(self, cache: Any) -> bool:
        """Whether `step` can decode the token behind those of this cache; if not, no later one either."""
        if self._is_over:
            return False
        if self._known is None or self._done == self._count or cache is not self.cache:
            self.end()
            self.cache, self._known = cache, self._begin(cache)
            self._is_over = self._known is None
        return not self._is_over

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Logits `[1, 1, V]` behind the token whose embedding is `x`, `[1, 1, H]`; only where `can_go_on` said so."""
        known, done = self._known, self._done
        assert known is not None
        angles = [table.data_ptr() + done * table.shape[1] * 4 for table in known.angles]
        scale = temperature_at(known.config, self._first + done) if known.is_tuned else 1.0
        y = decode(x, known.layers, known.rooms, angles, scale)
        self._done += 1
        self.length += 1
        logits = known.few.head(self.model.lm_head, known.few.normalize(self.model.model.norm, y))
        if self.is_watched:
            self.end()
        return logits

    def end(self) -> None:
        """Tell the cache of the tokens that were decoded."""
        known, self._known = self._known, None
        if known is not None and self._done:
            for layer, room in known.caches:
                room.advance(layer, self._first + self._done - 1)

    def _begin(self, cache: Any) -> _Known | None:
        """What the next tokens are decoded with; None where it takes more than a call."""
        model, decoder = self.model, self.model.model
        if not all(map(is_own_forward, (self.whole, model, decoder))):
            return None
        if type(decoder.embed_tokens) is not nn.Embedding or decoder.rotary_emb.follows_length:
            return None
        # Before they are looked at: another thread may put others in their place.
        kept = [*model.parameters(), *model.buffers()]
        weight = decoder.embed_tokens.weight
        few = begin_few_rows(weight.new_empty(1, 1, weight.shape[1]), {}, (model,))
        if few is None or few.state is None or not few.is_one_token:
            return None
        known = few.all_layers(list(decoder.layers)[: decoder.config.num_hidden_layers])
        if known is None:
            return None
        found: list[Any] = [
            room_for_token(cache, index, heads, size, few.dtype) for index, heads, size in known.caches
        ]
        if None in found or len({length for _, _, length in found}) > 1:
            return None
        first = found[0][2]
        if first != self.length:
            # Somebody shortened the cache, whose tokens are counted on all the same.
            return None
        left = [_AHEAD, *(room.memory[0].shape[2] - first for _, room, _ in found)]
        left += [layer.sliding_window - 1 - first for layer, *_ in found if layer.is_sliding]
        count = min(left if self.limit is None else [*left, self.limit - first])
        if count <= 0:
            return None
        angles = ()
        if known.rotated:
            angles = decoder.rotary_emb(
                weight, torch.arange(first, first + count, device=weight.device)[None]
            )
            if any(
                table.dtype != torch.float32
                or table.shape != (1, count, known.rotated // 2)
                or not table.is_contiguous()
                for table in angles
            ):
                return None
        now = itertools.chain(model.parameters(), model.buffers())
        if not all(one is other for one, other in itertools.zip_longest(kept, now)):
            return None
        self._first, self._done, self._count = first, 0, count
        return _Known(
            few,
            known.layers,
            place_rooms([(*room.addresses, first) for _, room, _ in found]),
            tuple(table[0] for table in angles),
            known.config,
            known.is_tuned,
            [(layer, room) for layer, room, _ in found],
            kept,
        )
