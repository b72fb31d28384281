"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), computed in float32.

A checkpoint's weights are trained for one of two pairings of channels. The config's `rope_interleave` says which, so
weights are never permuted:

* interleaved: channels (2j, 2j+1) rotate together (Meta's reference, Llama 4);
* half-split: channels (j, j + D/2) rotate together (Hugging Face's permuted LLaMA 1 and 2 weights).

transformers' functions compute frequencies and their scaling (linear, dynamic, yarn, longrope, llama3, proportional).
`dynamic` and `longrope` choose frequencies by the highest position in a forward. So a prompt given in pieces can have
other results than in one forward, for which llamoe equals transformers.

A pair (a, b) becomes `(a cos - b sin, b cos + a sin)`; its angle is its position times its frequency.

Shapes: B batch, H heads, T tokens, D head_dim, R = D/2 rotated pairs. Positions and angles are `[B or 1, T, …]`: one
row if all rows of the batch have the same positions.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position's angles, computed once for all layers of a decoder.

    Frequencies stay float32 when the model is cast: in bfloat16, angles at position 100,000 are off by whole turns.
    """

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        # The decorator `dynamic_rope_update` reads this attribute, and changes `max_seq_len_cached`.
        self.original_max_seq_len = config.max_position_embeddings
        self.register_buffer("inv_freq", None, persistent=False)
        self.register_buffer("original_inv_freq", None, persistent=False)
        self._reset(torch.get_default_device())

    @staticmethod
    def compute_default_rope_parameters(config: PreTrainedConfig, **_) -> tuple[torch.Tensor, float]:
        """Return `theta ** (-2j / D)` for j < D/2, float32 `[R]`, and an attention factor of one."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0

    def _apply(self, fn, recurse=True):
        was_meta = self.inv_freq.is_meta
        super()._apply(fn, recurse)
        # Compute the frequencies again after a cast, which rounds them, or `to_empty`, which leaves them undefined.
        if self.inv_freq.dtype != torch.float32 or (was_meta and not self.inv_freq.is_meta):
            self._reset(self.inv_freq.device)
        return self

    def _reset(self, device: torch.device) -> None:
        functions = {**ROPE_INIT_FUNCTIONS, "default": self.compute_default_rope_parameters}
        inv_freq, self.attention_scaling = functions[self.rope_type](self.config)
        self.inv_freq = inv_freq.to(device)
        self.original_inv_freq = self.inv_freq.clone()
        self.max_seq_len_cached = self.original_max_seq_len

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the angles' cosines and sines, as `rotate` takes them.

        Args:
            x: any tensor on the device of the result.
            position_ids: `[B or 1, T]` integers.

        Returns:
            cos and sin, each `[B or 1, T, 1, D]` float32, times the attention factor of the scaling type.
        """
        if self.inv_freq.is_meta and not x.is_meta:
            # The buffer is still on the meta device: no checkpoint contains it, so no loader fills it.
            self._reset(x.device)
        return of_channels(*self._cos_sin(x, position_ids), self.config.rope_interleave)

    @dynamic_rope_update
    def _cos_sin(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def of_channels(cos: torch.Tensor, sin: torch.Tensor, interleave: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines for every channel; sines of the first channel of a pair are negated.

    Args:
        cos, sin: `[B or 1, T, R]`, of each pair's angle.
        interleave: pair channels (2j, 2j+1); else (j, j + D/2).

    Returns:
        cos and sin, each `[B or 1, T, 1, D]`.
    """
    cos, sin = (
        torch.stack(pair, -1).flatten(-2) if interleave else torch.cat(pair, -1)
        for pair in ((cos, cos), (-sin, sin))
    )
    return cos[:, :, None], sin[:, :, None]


def rotate(x_BTHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """Rotate each pair of channels of queries or keys `[B, T, H, D]` by its angle; keep their shape and dtype.

    The computation is in float32, or in float64 for float64 input. `cos` and `sin` are those that `of_channels` returns
    for the same `interleave`.
    """
    if interleave:
        partners = x_BTHD.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = x_BTHD.roll(x_BTHD.shape[-1] // 2, -1)
    return (x_BTHD * cos + partners * sin).to(x_BTHD.dtype)


def rotary_2d_cos_sin(
    grid_size: int, head_dim: int, theta: float, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of every patch's angles.

    As in Llama 4, the angles of the first half of a head's pairs grow with the patch's column x, those of the second
    half with its row y (in Pixtral vice versa). x and y start at one: zero belongs to the class token, not rotated.
    Source: Meta's llama-models, `models/llama4/vision/encoder.py`.

    Each forward computes the angles again: a buffer would be rounded by a cast of the model, and undefined after
    `to_empty` of a model on the meta device.

    Args:
        grid_size: patches along one side of the image.
        head_dim: channels of an attention head, a multiple of 4.
        theta: base of the frequencies `theta ** (-4j / head_dim)`, j < head_dim / 4, shared by both axes.
        device: of the result.

    Returns:
        cos and sin, each `[1, T, 1, D]` float32, as `rotate` takes them for interleaved pairs: for the T - 1 patches
        row by row, then for the class token (cos 1, sin 0).
    """
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device) / (head_dim // 2)
    frequencies = 1.0 / (theta**exponents)
    patches = torch.arange(grid_size**2, device=device)
    x, y = patches % grid_size + 1, patches // grid_size + 1
    angles = torch.cat([x[:, None] * frequencies, y[:, None] * frequencies], dim=-1)
    angles = torch.cat([angles, angles.new_zeros(1, head_dim // 2)])
    return of_channels(angles.cos()[None], angles.sin()[None], interleave=True)
