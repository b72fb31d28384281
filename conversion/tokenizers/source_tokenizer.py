"""Meta's or Mistral AI's tokenizer of whatever kind, and what the kinds share when tokenizer.json is made of them."""

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
        content: of the file.
        size: number of tokens, special ones included.
        special_ids: special token to id.
        roles: tokens by transformers' roles: bos_token, eos_token, pad_token, and unk_token if it is not tiktoken's.
        to_json: gives the content of tokenizer.json.
        stops: tokens that end an answer besides the end of text.
        version: of Mistral AI's format of conversations; 2 and 3 differ in tools alone, and are 3 for SentencePiece.
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
        """Return the entries of tokenizer_config.json that every such tokenizer has."""
        return {
            "tokenizer_class": "TokenizersBackend",
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
            **self.roles,
            "add_bos_token": True,
            "add_eos_token": False,
        }


def refuse(origin: str, problem: str) -> NoReturn:
    """Raise the error for a damaged file."""
    raise CheckpointError(f"{origin}: {problem}. Take the file from the release again.")


def begin_with(bos: str, index: int) -> processors.TemplateProcessing:
    """Make the step that puts a token in front of each text."""
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, index)]
    )
