"""Reads Meta's or Mistral AI's tokenizer of any kind, and compares it with the model that it should belong to."""

from typing import Any

from ...configuration.errors import CheckpointError
from . import sentencepiece_models, tekken, tiktoken_tables
from .source_tokenizer import SourceTokenizer
from .tiktoken_tables import SPECIAL_TOKENS

# The context of LLaMA 1, by which alone it differs from Llama 2. LLaMA 1 has no chat models.
_LLAMA_1_CONTEXT = 2048


def check_tokenizer(
    content: bytes, config: Any = None, *, family: str | None = None, origin: str = "tokenizer.model"
) -> SourceTokenizer:
    """Read a tokenizer.model of either kind or a tekken.json, and refuse one that is damaged or another model's.

    Args:
        content: of the file.
        config: a configuration of llamoe to compare with, or None.
        family: "llama-1" to "llama-4" or "mistral". None infers it from the kind of file and the number of tokens, and
            tells LLaMA 1 from Llama 2 by `max_position_embeddings`.
        origin: the file, for messages.

    Raises:
        CheckpointError: it is damaged, or its number of tokens is not `config.vocab_size`.
    """
    text = getattr(config, "text_config", config)
    kind = kind_of(content, origin)
    if kind == "tiktoken":
        ranks = tiktoken_tables.read(content, origin)
        return tiktoken_tables.of_family(ranks, _family_of_table(len(ranks), text, family, origin), content)
    if kind == "tekken":
        tokenizer, file = tekken.read(content, origin), "tekken.json"
        specials = len(tokenizer.special_ids)
        sizes = f"has {specials} special tokens and {tokenizer.size - specials} others"
    else:
        if family is None:
            context = getattr(text, "max_position_embeddings", None)
            family = "llama-1" if context is not None and context <= _LLAMA_1_CONTEXT else "llama-2"
        tokenizer, file = sentencepiece_models.read(content, origin, family), "tokenizer.model"
        sizes = f"a SentencePiece model of {tokenizer.size} pieces"
    if text is not None and tokenizer.size != text.vocab_size:
        wanted = " (Llama 4 has a tiktoken table of ranks)" if text.model_type == "llamoe_text" else ""
        raise CheckpointError(
            f"{origin}: {sizes}, and {_rows(text)}. Take the {file} of this model's release{wanted}."
        )
    return tokenizer


def _rows(text: Any) -> str:
    return f"{type(text).__name__}.vocab_size is {text.vocab_size}"


def kind_of(content: bytes, origin: str) -> str:
    """Return the kind of a tokenizer by its first bytes: "sentencepiece", "tiktoken" or "tekken"."""
    if tiktoken_tables.looks_like_table(content):
        return "tiktoken"
    if content.startswith(b"{") and b'"token_bytes"' in content:
        return "tekken"
    # The first byte of a ModelProto: the tag of its first piece.
    if content[:1] == b"\x0a":
        return "sentencepiece"
    what = "is empty" if not content else f"begins with {content[:20]!r}"
    raise CheckpointError(
        f"{origin}: {what}, which is neither a SentencePiece model (LLaMA 1 and 2, Mistral) nor a tiktoken table of "
        "ranks (Llama 3 and 4) nor a tekken.json (Mistral). Take the file of this model's release."
    )


def _family_of_table(ranks: int, text: Any, family: str | None, origin: str) -> str:
    if family not in (None, *SPECIAL_TOKENS):
        raise CheckpointError(f"{origin}: a tiktoken table, and {family} has a SentencePiece model.")
    if text is None:
        # The releases have 128000 and 200000 ranks.
        return family or ("llama-3" if ranks < 160_000 else "llama-4")
    totals = {
        name: ranks + len(special) for name, special in SPECIAL_TOKENS.items() if family in (None, name)
    }
    for name, total in totals.items():
        if total == text.vocab_size:
            return name
    sizes = " or ".join(f"{total} ({name})" for name, total in totals.items())
    raise CheckpointError(
        f"{origin}: a tiktoken table of {ranks} ranks, with special tokens {sizes} tokens, and {_rows(text)}. Take the "
        "tokenizer.model of this model's release."
    )
