"""Sizes of the measured layers, and settings: device, dtype and what the cases share."""

from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer like Llama 4's.

    Attributes:
        hidden: hidden size.
        expert: inner size of an expert, also of the shared one.
        experts: number of experts.
        heads: number of query heads.
        key_value_heads: number of key/value heads.
        head_dim: size of a head.
        vocabulary: rows of embedding and head.
    """

    hidden: int
    expert: int
    experts: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int


# The head is about 1 % of Scout's weights; with 2048 rows it has that share in four layers of 16 experts.
MINI = Shape(512, 1024, 16, 8, 2, 64, 2048)
MINI_8 = replace(MINI, experts=8)
MINI_128 = replace(MINI, experts=128)
MANY_SMALL = Shape(64, 64, 1, 4, 2, 16, 256)
SCOUT = Shape(5120, 8192, 16, 40, 8, 128, 202048)
MAVERICK = replace(SCOUT, experts=128)


@dataclass(frozen=True)
class Setting:
    """Where and how the cases run.

    Attributes:
        device: device of weights and inputs.
        dtype: dtype of weights and activations.
        seed: random seed of weights and inputs.
        compile_modes: `torch.compile` modes in which the block's contestants are measured, too.
        compiled_tokens: numbers of tokens at which they are.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    compile_modes: tuple[str, ...] = ()
    compiled_tokens: tuple[int, ...] = field(default=())

    def generator(self, offset: int = 0) -> torch.Generator:
        """A random generator with a fixed seed."""
        return torch.Generator(self.device).manual_seed(self.seed + offset)

    def randn(self, *shape: int, offset: int = 1) -> torch.Tensor:
        """Normal random numbers in the setting's dtype, on its device."""
        noise = torch.randn(*shape, generator=self.generator(offset), device=self.device)
        return noise.to(self.dtype)

    def tokens(self, batch: int, length: int, vocabulary: int, offset: int = 1) -> torch.Tensor:
        """Random token ids `[batch, length]`."""
        generator = self.generator(offset)
        return torch.randint(0, vocabulary, (batch, length), generator=generator, device=self.device)
