"""Texts at random, for tokenizers that are compared."""

import random
from collections.abc import Iterator

# Letters with and without accents, marks that combine, blanks, scripts without blanks, signs beyond 16 bit.
_RANGES = [
    (0x00, 0x7F),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x2000, 0x206F),
    (0x3040, 0x9FFF),
    (0x1F300, 0x1FAFF),
]


def random_texts(parts: list[str], count: int = 150) -> Iterator[str]:
    """Texts of up to 24 `parts` and characters, the same ones every time."""
    dice = random.Random(7)
    for _ in range(count):
        share = dice.choice([0.0, 0.5, 1.0])
        yield "".join(
            dice.choice(parts) if dice.random() < share else chr(dice.randint(*dice.choice(_RANGES)))
            for _ in range(dice.randint(0, 24))
        )
