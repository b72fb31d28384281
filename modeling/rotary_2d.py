"""Two-dimensional rotary angles for a square grid of image patches.

Llama 4's vision encoder splits the R rotated pairs of each head in two: the first half turns with the patch's
column x, the second half with its row y. Column before row is the checkpoint's order (Pixtral's is the other
way round, and with it Llama 4 sees noise). Coordinates start at one, so that the class token, which is not
turned at all, is not mistaken for the first patch. Source: Meta's llama-models,
`models/llama4/vision/encoder.py`. `rotary.apply_rotary` applies the angles (interleaved pairs).

Shapes: T grid_size**2 + 1 tokens (patches row by row, the class token last), R = head_dim / 2 pairs.
"""

import torch


def rotary_2d_cos_sin(
    grid_size: int, head_dim: int, theta: float, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cosines and sines of every patch's angles.

    Nothing is stored: a forward pass computes them again, since a buffer could be rounded by a change of the
    model's dtype or left empty by construction on the meta device, and the table is small (577 x 44 for
    Llama 4) beside one layer's work.

    Args:
        grid_size: patches along one side of the image.
        head_dim: channels of an attention head, a multiple of 4.
        theta: base of the frequencies `theta ** (-4j / head_dim)`, j < head_dim / 4, shared by both axes.
        device: where the result is wanted.

    Returns:
        cos and sin, each `[1, T, R]` float32. The class token's row is (1, 0).

    Raises:
        ValueError: head_dim is not a multiple of 4.
    """
    if head_dim % 4:
        raise ValueError(
            f"2-D rotary positions need a head_dim that is a multiple of 4 (two axes, pairs of channels); "
            f"got {head_dim}. Change hidden_size or num_attention_heads, or set use_rope=False."
        )
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device) / (head_dim // 2)
    frequencies = 1.0 / (theta**exponents)
    patches = torch.arange(grid_size**2, device=device)
    x, y = patches % grid_size + 1, patches // grid_size + 1
    angles = torch.cat([x[:, None] * frequencies, y[:, None] * frequencies], dim=-1)
    angles = torch.cat([angles, angles.new_zeros(1, head_dim // 2)])
    return angles.cos()[None], angles.sin()[None]
