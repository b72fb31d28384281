"""A parsed tokenizer of Meta or Mistral AI, and functions for all kinds of their files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from tokenizers import processors

from ...configuration.errors import CheckpointError


@dataclass(frozen=True)
class SourceTokenizer:
    """A parsed tokenizer.model or tekken.json.

    Attributes:
        kind: "sentencepiece", "tiktoken" or "tekken".
        family: "llama-1" to "llama-4", or "mistral".
        content: the file's content.
        size: number of tokens, special ones included.
        special_ids: special token to id.
        roles: "bos_token", "eos_token", "pad_token" and, unless it is a tiktoken table, "unk_token", each to its token.
        to_json: function that makes the content of tokenizer.json.
        stops: tokens that end an answer besides the end of text.
        version: of Mistral AI's chat format; 3 also for SentencePiece models of version 2, which differs only in tools.
    """

    kind: str
    family: str
    content: bytes
    size: int
    special_ids: Mapping[str, int]
    roles: Mapping[str, str]
    to_json: Callable[[], bytes]
    stops: tuple[str, ...] = ()
    version: int = 0

    def settings(self) -> dict[str, Any]:
        """Return the entries of tokenizer_config.json that do not depend on the model."""
        return {
            "tokenizer_class": "TokenizersBackend",
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
            **self.roles,
            "add_bos_token": True,
            "add_eos_token": False,
        }


def refuse(origin: str, problem: str) -> NoReturn:
    """Raise a `CheckpointError` for a damaged file."""
    raise CheckpointError(f"{origin}: {problem}. Take the file from the release again.")


def begin_with(bos: str, index: int) -> processors.TemplateProcessing:
    """Make the post-processor that puts a token in front of each text."""
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, index)]
    )
