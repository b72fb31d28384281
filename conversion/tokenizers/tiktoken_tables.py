"""Convert the tokenizer of Llama 3 and 4, a tiktoken table of ranks.

A line of the table is a token in base64, a space, and the token's rank, which is also its id. Special tokens have the
ids after the last rank. They are listed not in the file but in Meta's code: 256 for Llama 3, 2048 for Llama 4. The
pattern that splits a text into words is also in Meta's code.
"""

import base64
import re
from collections.abc import Mapping
from typing import Any

from transformers.convert_slow_tokenizer import TikTokenConverter

from .source_tokenizer import SourceTokenizer, begin_with, refuse

BYTES = {bytes([byte]) for byte in range(256)}
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHERS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Patterns that split a text into words. Llama 4's is that of OpenAI's o200k, "tekken" that of Mistral AI's tekken.json.
WORD_PATTERNS = {
    "llama-3": rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_OTHERS}",
    "llama-4": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_OTHERS}"
    ),
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_OTHERS}"
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
# Special tokens by their roles in transformers, and in `_STOPS` further tokens that end an answer.
_BORDERS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
_ROLES = {
    "llama-3": {**_BORDERS, "pad_token": "<|finetune_right_pad_id|>"},
    "llama-4": {**_BORDERS, "pad_token": "<|finetune_right_pad|>"},
}
_STOPS = {"llama-3": ("<|eom_id|>", "<|eot_id|>"), "llama-4": ("<|eom|>", "<|eot|>")}


def of_family(ranks: Mapping[bytes, int], family: str, content: bytes) -> SourceTokenizer:
    """Make the tokenizer of a table of ranks, with tiktoken's ids and bos in front of each text."""
    special = {token: len(ranks) + offset for offset, token in enumerate(SPECIAL_TOKENS[family])}
    roles, size = _ROLES[family], len(ranks) + len(special)
    return SourceTokenizer(
        "tiktoken",
        family,
        content,
        size,
        special,
        roles,
        lambda: build_json(ranks, WORD_PATTERNS[family], special, roles["bos_token"]),
        _STOPS[family],
    )


def read(content: bytes, origin: str) -> dict[bytes, int]:
    """Read the ranks of a table's tokens.

    Raises:
        CheckpointError: a line is damaged, a rank is missing, a rank or a token occurs twice, or a byte has no token.
    """
    lines = [line.split() for line in content.splitlines() if line.strip()]
    try:
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        refuse(origin, f"is no table of tokens in base64 and their ranks ({error})")
    if sorted(ranks.values()) != list(range(len(lines))) or not BYTES <= ranks.keys():
        refuse(origin, f"its {len(lines)} lines are not one token for each rank, with every byte among them")
    return ranks


def build_json(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], bos: str, first: int = 0
) -> bytes:
    """Build tokenizer.json from a table of ranks.

    Args:
        ranks: token to rank.
        pattern: regular expression that splits a text into words.
        special: special token to id; all these ids are below, or all above, those of other tokens.
        bos: the special token in front of a text.
        first: id of the token with rank 0.
    """
    tokenizer = _FromRanks(ranks, pattern, special, first).converted()
    assert all(tokenizer.token_to_id(token) == number for token, number in special.items())
    tokenizer.post_processor = begin_with(bos, special[bos])
    return tokenizer.to_str(pretty=True).encode()


class _FromRanks(TikTokenConverter):
    """transformers' converter, for ranks in memory, and for ids that may begin after those of the special tokens."""

    def __init__(self, ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], first: int):
        super().__init__(ranks, pattern, extra_special_tokens=list(special))
        self.special, self.first = special, first

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: Any) -> dict[bytes, int]:
        """Return the ranks, which the caller passes in place of a file's path."""
        return tiktoken_url

    def extract_vocab_merges_from_model(self, tiktoken_url: Any) -> tuple[dict[str, int], list]:
        """Return token to id, and the list of merges."""
        vocab, merges = super().extract_vocab_merges_from_model(tiktoken_url)
        if not self.first:
            return vocab, merges
        # The converter appends special tokens that the vocabulary lacks, so those with the first ids are put into it.
        return {**self.special, **{token: self.first + rank for token, rank in vocab.items()}}, merges


def looks_like_table(content: bytes) -> bool:
    """Return True if a tokenizer.model is a table of ranks: text with a word and a number in one of its first lines."""
    is_binary = any(byte < 9 or 13 < byte < 32 for byte in content[:64])
    return not is_binary and any(
        re.fullmatch(rb"[!-~]+ \d+\s*", line) for line in content[:4096].splitlines()[:10]
    )
