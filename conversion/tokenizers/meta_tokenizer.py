"""Meta's or Mistral AI's tokenizer of any kind, parsed and compared with the model that it should belong to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configuration.errors import CheckpointError
from ...configuration.json_files import reading
from . import sentencepiece_models, tekken, tiktoken_tables

FAMILIES = ("llama-1", "llama-2", "llama-3", "llama-4", "mistral")
# The context of LLaMA 1, which alone tells it from Llama 2. LLaMA 1 has no chat models.
_LLAMA_1_CONTEXT = 2048


@dataclass(frozen=True)
class MetaTokenizer:
    """A parsed tokenizer.model or tekken.json.

    Attributes:
        kind: "sentencepiece", "tiktoken" or "tekken".
        family: one of `FAMILIES`.
        size: number of tokens, special ones included.
        parsed: SentencePiece's `ModelProto`, the tokens in order of their ranks, or a `Tekken`.
        origin: file named in messages.
        content: the file's content.
    """

    kind: str
    family: str
    size: int
    parsed: Any
    origin: str
    content: bytes

    def token_ids(self) -> dict[str, int]:
        """Special token to id."""
        if self.kind == "tekken":
            return tekken.special_token_ids(self.parsed)
        if self.kind == "tiktoken":
            return tiktoken_tables.special_token_ids(self.family, len(self.parsed))
        kinds = (sentencepiece_models.CONTROL, sentencepiece_models.UNKNOWN)
        return {piece.piece: index for index, piece in enumerate(self.parsed.pieces) if piece.type in kinds}

    def roles(self) -> dict[str, str]:
        """Tokens by transformers' roles: bos_token, eos_token, pad_token, and unk_token if it is not tiktoken's."""
        if self.kind == "tekken":
            return tekken.ROLES
        if self.kind == "tiktoken":
            return tiktoken_tables.ROLES[self.family]
        return sentencepiece_models.special_tokens(self.parsed)

    def to_json(self) -> bytes:
        """The content of tokenizer.json."""
        if self.kind == "tekken":
            return tekken.to_json(self.parsed)
        if self.kind == "tiktoken":
            return tiktoken_tables.to_json(self.parsed, self.family)
        return sentencepiece_models.to_json(self.parsed, self.origin)

    def mistral_version(self) -> int:
        """The version of Mistral AI's format of conversations, which tekken.json says and control pieces show.

        Versions 2 and 3 differ in tools alone, and are 3 here.
        """
        if self.kind == "tekken":
            return self.parsed.version
        pieces = self.token_ids()
        return 7 if "[SYSTEM_PROMPT]" in pieces else 3 if "[INST]" in pieces else 1

    def settings(self) -> dict[str, Any]:
        """The entries of tokenizer_config.json that every such tokenizer has."""
        return {
            "tokenizer_class": "TokenizersBackend",
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
            **self.roles(),
            "add_bos_token": True,
            "add_eos_token": False,
        }


def check_tokenizer(
    tokenizer_model: Path | bytes, config: Any = None, *, family: str | None = None, origin: str | None = None
) -> MetaTokenizer:
    """Read a tokenizer.model of either kind or a tekken.json, and refuse one that is damaged or another model's.

    Args:
        tokenizer_model: the file, or its content.
        config: a configuration of llamoe to compare with, or None.
        family: one of `FAMILIES`. None infers it from the kind of file and the number of tokens, and tells LLaMA 1 from
            Llama 2 by `max_position_embeddings`.
        origin: file named in messages where only the content is given.

    Raises:
        CheckpointError: there is no tokenizer, it is damaged, or its number of tokens is not `config.vocab_size`.
        ValueError: `family` is not one of `FAMILIES`.
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family is {family!r}; {', '.join(map(repr, FAMILIES))} or None was expected.")
    if isinstance(tokenizer_model, bytes):
        content, origin = tokenizer_model, origin or "tokenizer.model"
    else:
        content, origin = _read(tokenizer_model), origin or str(tokenizer_model)
    text = getattr(config, "text_config", config)
    if kind_of(content, origin) == "tekken":
        return _check_tekken(content, text, origin)
    if kind_of(content, origin) == "tiktoken":
        tokens = tiktoken_tables.read(content, origin)
        family = _family_of_table(tokens, text, family, origin)
        size = len(tokens) + len(tiktoken_tables.SPECIAL_TOKENS[family])
        return MetaTokenizer("tiktoken", family, size, tokens, origin, content)
    proto = sentencepiece_models.read(content, origin)
    size = len(proto.pieces)
    if family in ("llama-3", "llama-4"):
        raise CheckpointError(f"{origin}: a SentencePiece model; {family} has a tiktoken table of ranks.")
    if text is not None and size != text.vocab_size:
        wanted = " (Llama 4 has a tiktoken table of ranks)" if text.model_type == "llamoe_text" else ""
        raise CheckpointError(
            f"{origin}: a SentencePiece model of {size} pieces, and {type(text).__name__}.vocab_size is "
            f"{text.vocab_size}. Take the tokenizer.model of this model's release{wanted}."
        )
    if family is None:
        context = getattr(text, "max_position_embeddings", None)
        family = "llama-1" if context is not None and context <= _LLAMA_1_CONTEXT else "llama-2"
    return MetaTokenizer("sentencepiece", family, size, proto, origin, content)


def _check_tekken(content: bytes, text: Any, origin: str) -> MetaTokenizer:
    parsed = tekken.read(content, origin)
    size = len(parsed.special) + len(parsed.tokens)
    if text is not None and size != text.vocab_size:
        raise CheckpointError(
            f"{origin}: has {len(parsed.special)} special tokens and {len(parsed.tokens)} others, and "
            f"{type(text).__name__}.vocab_size is {text.vocab_size}. Take the tekken.json of this model's release."
        )
    return MetaTokenizer("tekken", "mistral", size, parsed, origin, content)


def _read(path: Path) -> bytes:
    if not Path(path).exists():
        raise CheckpointError(
            f"{path}: no such file. It is part of a release from Meta, one level above the weights of LLaMA 1 and 2."
        )
    with reading(path):
        return Path(path).read_bytes()


def kind_of(content: bytes, origin: str) -> str:
    """The kind of a tokenizer by its first bytes: "sentencepiece", "tiktoken" or "tekken"."""
    if content.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{origin}: a pointer of git-lfs, not the file. Run git lfs pull, or download it."
        )
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


def _family_of_table(tokens: list[bytes], text: Any, family: str | None, origin: str) -> str:
    sizes = {name: len(names) for name, names in tiktoken_tables.SPECIAL_TOKENS.items()}
    if family not in (None, *sizes):
        raise CheckpointError(
            f"{origin}: a tiktoken table of {len(tokens)} ranks; {family} has a SentencePiece model."
        )
    fitting = [
        name
        for name, count in sizes.items()
        if family in (None, name) and (text is None or len(tokens) + count == text.vocab_size)
    ]
    if text is None and family is None:
        # The releases have 128000 and 200000 ranks.
        fitting = ["llama-3" if len(tokens) < 160_000 else "llama-4"]
    if not fitting:
        totals = " or ".join(
            f"{len(tokens)} + {count} = {len(tokens) + count} ({name})"
            for name, count in sizes.items()
            if family in (None, name)
        )
        raise CheckpointError(
            f"{origin}: a tiktoken table of {len(tokens)} ranks, with special tokens {totals} tokens, and "
            f"{type(text).__name__}.vocab_size is {text.vocab_size}. Take the tokenizer.model of this model's release."
        )
    return fitting[0]
