"""Random and difficult texts, on which tokenizers are compared."""

import random
from collections.abc import Iterator

# ASCII, accented letters, combining marks, kinds of spaces, scripts without spaces, characters beyond 16 bits.
_RANGES = [
    (0x00, 0x7F),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x2000, 0x206F),
    (0x3040, 0x9FFF),
    (0x1F300, 0x1FAFF),
]
NASTY = [
    "", " ", "  ", "     ", "hello", " hello", "   hello  world ", "hello   ", "\n", "\n\n", " \n ", "  \n", "\nhello",
    "\r\n", "a\r\n\r\nb", "\t\tx", "x/\n/", "I'm you're HE'LL they'VE it'S o'ſ", "HelloWorld HELLOworld helloWORLD",
    "1 12 123 1234 12345", "Grüße aus Köln", "e\u0301 é É", "世界 你好", "🙂👨‍👩‍👧", "\u00a0x\u3000y\u2003",
    "\x00\x7f\ufffd", "Ⅳ½ﬁ ǅ ª", "aaaaaaaaaaaaaaaaaaaaaaaa", "    def f(x):\n        return  x", "...!!!???",
    " ...\n\n", "http://a/b?c=d", "a  b   c    d", "\u0085\u200b\u2028x", "ÿ" * 40, " " * 50, "\n" * 30, "</s>",
    "<s> hello </s>", "x</s>y", "<unk>", "<0x0A>", "<0xFF>", "▁", "▁▁a", "a▁b", " ▁ ", "[INST] hi [/INST]",
]  # fmt: skip


def random_texts(parts: list[str], count: int = 150) -> Iterator[str]:
    """Yield `count` texts of up to 24 random strings of `parts` and characters, the same at each call."""
    dice = random.Random(7)
    for _ in range(count):
        share = dice.choice([0.0, 0.5, 1.0])
        yield "".join(
            dice.choice(parts) if dice.random() < share else chr(dice.randint(*dice.choice(_RANGES)))
            for _ in range(dice.randint(0, 24))
        )
