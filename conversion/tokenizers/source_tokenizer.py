"""The class of a parsed tokenizer of Meta's or Mistral AI's, and functions that all kinds of files share."""

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
        content: content of the file.
        size: number of tokens, special ones included.
        special_ids: special token to id.
        roles: "bos_token", "eos_token", "pad_token" and, unless it is a tiktoken table, "unk_token" to the token.
        to_json: function that makes the content of tokenizer.json.
        stops: tokens that end an answer besides the end of text.
        version: version of Mistral AI's format of conversations. Versions 2 and 3 differ in tools alone, and a
            SentencePiece model of either counts as 3.
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
        """Return the entries of tokenizer_config.json that all kinds share."""
        return {
            "tokenizer_class": "TokenizersBackend",
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
            **self.roles,
            "add_bos_token": True,
            "add_eos_token": False,
        }


def refuse(origin: str, problem: str) -> NoReturn:
    """Raise the error for a damaged file, which should be downloaded again."""
    raise CheckpointError(f"{origin}: {problem}. Take the file from the release again.")


def begin_with(bos: str, index: int) -> processors.TemplateProcessing:
    """Make the step that puts a token in front of each text."""
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, index)]
    )
