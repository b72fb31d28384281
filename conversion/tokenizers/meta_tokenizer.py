"""Meta's tokenizer.model of either kind, parsed and compared with the model that it should belong to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configuration.errors import CheckpointError
from ...configuration.json_files import reading
from . import sentencepiece_models, tiktoken_tables

FAMILIES = ("llama-1", "llama-2", "llama-3", "llama-4")
# The context of LLaMA 1, which alone tells it from Llama 2. LLaMA 1 has no chat models.
_LLAMA_1_CONTEXT = 2048


@dataclass(frozen=True)
class MetaTokenizer:
    """A parsed tokenizer.model.

    Attributes:
        kind: "sentencepiece" or "tiktoken".
        family: one of `FAMILIES`.
        size: number of tokens, special ones included.
        parsed: SentencePiece's `ModelProto`, or the tokens in order of their ranks.
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
        if self.kind == "tiktoken":
            return tiktoken_tables.special_token_ids(self.family, len(self.parsed))
        kinds = (sentencepiece_models.CONTROL, sentencepiece_models.UNKNOWN)
        return {piece.piece: index for index, piece in enumerate(self.parsed.pieces) if piece.type in kinds}

    def roles(self) -> dict[str, str]:
        """Tokens by transformers' roles: bos_token, eos_token, pad_token, for SentencePiece also unk_token."""
        if self.kind == "tiktoken":
            return tiktoken_tables.ROLES[self.family]
        return sentencepiece_models.special_tokens(self.parsed)

    def to_json(self) -> bytes:
        """The content of tokenizer.json."""
        if self.kind == "tiktoken":
            return tiktoken_tables.to_json(self.parsed, self.family)
        return sentencepiece_models.to_json(self.parsed, self.origin)

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
    """Read Meta's tokenizer.model of either kind, and refuse one that is damaged or another model's.

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
        wanted = "" if text.model_type == "llamoe_dense" else " (Llama 4 has a tiktoken table of ranks)"
        raise CheckpointError(
            f"{origin}: a SentencePiece model of {size} pieces, and {type(text).__name__}.vocab_size is "
            f"{text.vocab_size}. Take the tokenizer.model of this model's release{wanted}."
        )
    if family is None:
        context = getattr(text, "max_position_embeddings", None)
        family = "llama-1" if context is not None and context <= _LLAMA_1_CONTEXT else "llama-2"
    return MetaTokenizer("sentencepiece", family, size, proto, origin, content)


def _read(path: Path) -> bytes:
    if not Path(path).exists():
        raise CheckpointError(
            f"{path}: no such file. It is part of a release from Meta, one level above the weights of LLaMA 1 and 2."
        )
    with reading(path):
        return Path(path).read_bytes()


def kind_of(content: bytes, origin: str) -> str:
    """The kind of a tokenizer.model by its first bytes: "sentencepiece" or "tiktoken"."""
    if content.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{origin}: a pointer of git-lfs, not the file. Run git lfs pull, or download it."
        )
    if tiktoken_tables.looks_like_table(content):
        return "tiktoken"
    # The first byte of a ModelProto: the tag of its first piece.
    if content[:1] == b"\x0a":
        return "sentencepiece"
    what = "is empty" if not content else f"begins with {content[:20]!r}"
    raise CheckpointError(
        f"{origin}: {what}, which is neither a SentencePiece model (LLaMA 1 and 2) nor a tiktoken table of ranks "
        "(Llama 3 and 4). Take the tokenizer.model of this model's release."
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
