"""The tokenizer of Llama 3 and 4: a tiktoken table of ranks to tokenizer.json.

A line of the table is a token in base64, a space, and its rank, which is also its id. Special tokens follow the ranks.
Their names and number are in Meta's code, not in the file: 256 for Llama 3, 2048 for Llama 4, whatever the number of
ranks. The pattern that splits a text into words is in Meta's code, too.
"""

import base64
import re
from collections.abc import Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .source_tokenizer import SourceTokenizer, begin_with, merges_of, refuse

_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHERS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Meta's patterns that split a text into words, by family; Llama 4's is that of OpenAI's o200k.
_PATTERNS = {
    "llama-3": rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_OTHERS}",
    "llama-4": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_OTHERS}"
    ),
}


def _numbered(name: str, first: int, last: int) -> list[str]:
    return [f"<|{name}_{number}|>" for number in range(first, last + 1)]


def _filled(named: list[str], count: int, first: int) -> list[str]:
    return named + _numbered("reserved_special_token", first, first + count - len(named) - 1)


_TEXT, _VISION = "text_post_train_reserved_special_token", "vision_reserved_special_token"
# The special tokens of a family in the order of their ids, which follow the ranks.
SPECIAL_TOKENS = {
    "llama-3": _filled(
        [
            "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
            "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
            "<|eot_id|>", "<|python_tag|>", "<|image|>",
        ],
        256,
        2,
    ),
    "llama-4": _filled(
        [
            "<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
            "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>",
            *_numbered(_TEXT, 0, 5),
            "<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>",
            *_numbered(_TEXT, 8, 68),
            "<|image_start|>", "<|image_end|>",
            *_numbered(_VISION, 0, 1),
            "<|tile_x_separator|>", "<|tile_y_separator|>",
            *_numbered(_VISION, 2, 5),
            "<|image|>", *_numbered(_VISION, 6, 6), "<|patch|>",
            *_numbered(_VISION, 7, 1047),
            *_numbered("reasoning_reserved_special_token", 0, 7),
            "<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>",
        ],
        2048,
        0,
    ),
}  # fmt: skip
# Tokens by transformers' roles, and those that end an answer besides the end of text.
_BORDERS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
_ROLES = {
    "llama-3": {**_BORDERS, "pad_token": "<|finetune_right_pad_id|>"},
    "llama-4": {**_BORDERS, "pad_token": "<|finetune_right_pad|>"},
}
_STOPS = {"llama-3": ("<|eom_id|>", "<|eot_id|>"), "llama-4": ("<|eom|>", "<|eot|>")}


def of_family(tokens: list[bytes], family: str, content: bytes) -> SourceTokenizer:
    """The tokenizer of a table; ids equal tiktoken's for texts without special tokens, bos in front."""
    # Special tokens follow the ranks.
    special = {token: len(tokens) + offset for offset, token in enumerate(SPECIAL_TOKENS[family])}
    roles, size = _ROLES[family], len(tokens) + len(special)
    return SourceTokenizer(
        "tiktoken",
        family,
        content,
        size,
        special,
        roles,
        lambda: build_json(tokens, _PATTERNS[family], special, roles["bos_token"]),
        _STOPS[family],
    )


def read(content: bytes, origin: str) -> list[bytes]:
    """The tokens of a table in order of their ranks.

    Raises:
        CheckpointError: a line is damaged, a rank or a token is missing or stands twice, or a single byte has no rank.
    """
    lines = [line for line in content.splitlines() if line.strip()]
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        try:
            word, written = line.split()
            ranks[int(written)] = base64.b64decode(word, validate=True)
        except ValueError:
            refuse(
                origin,
                f"line {number} is {line[:60]!r}; a token in base64, a space and its rank were expected",
            )
    tokens = [ranks.get(rank, b"") for rank in range(len(lines))]
    known, needed = set(tokens), {bytes([byte]) for byte in range(256)}
    if len(known) != len(lines) or b"" in known or not needed <= known:
        refuse(
            origin, f"a table of {len(lines)} lines has not one token for each rank and every byte among them"
        )
    return tokens


def build_json(
    tokens: list[bytes], pattern: str, special: Mapping[str, int], bos: str, first: int = 0
) -> bytes:
    """Build tokenizer.json of a table of ranks.

    Args:
        tokens: in order of their ranks.
        pattern: regular expression of a word.
        special: special token to id, before or behind all tokens.
        bos: the special token in front of a text.
        first: id of the first token.
    """
    symbols = bytes_to_unicode()
    names = ["".join(symbols[byte] for byte in token) for token in tokens]
    vocab = {name: first + rank for rank, name in enumerate(names)}
    tokenizer = Tokenizer(
        BPE(
            # New special tokens get ids behind all others.
            vocab={**special, **vocab} if first else vocab,
            merges=merges_of(names),
            # A word that is a token stays whole; merging its parts might not lead there.
            ignore_merges=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    assert all(tokenizer.token_to_id(token) == number for token, number in special.items())
    tokenizer.post_processor = begin_with(bos, special[bos])
    return tokenizer.to_str(pretty=True).encode()


def looks_like_table(content: bytes) -> bool:
    """Whether a tokenizer.model is a table of ranks: one of its first lines is a word and a number."""
    is_binary = any(byte < 9 or 13 < byte < 32 for byte in content[:64])
    return not is_binary and any(
        re.fullmatch(rb"[!-~]+ \d+\s*", line) for line in content[:4096].splitlines()[:10]
    )
