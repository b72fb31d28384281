"""Meta's tokenizer.model to the files of a Hugging Face folder (tokenizer, chat, generation, processor), and back.

Functions map file names to bytes and write nothing to disk. The original tokenizer.model stays in the folder, so that
the way back gives the same bytes.

The files name transformers' general tokenizer class, which uses tokenizer.json as it is. `LlamaTokenizer` rebuilds the
steps when it loads and gives other ids.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...configuration import LlamoeConfig
from ...configuration.errors import CheckpointError
from ...configuration.json_files import reading, to_json
from . import chat_templates, sentencepiece_models, tiktoken_tables
from .processors import IMAGE_TOKENS, processor_files

FAMILIES = ("llama-1", "llama-2", "llama-3", "llama-4")
# Tokens that an assembled model needs: for pictures, and the message borders in `multimodal_chat_template`.
MULTIMODAL_TOKENS = ("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", *IMAGE_TOKENS)
# The context of LLaMA 1, which alone tells it from Llama 2. LLaMA 1 has no chat models.
_LLAMA_1_CONTEXT = 2048
_SETTINGS = {
    "tokenizer_class": "TokenizersBackend",
    "clean_up_tokenization_spaces": False,
    "padding_side": "left",
}


@dataclass(frozen=True)
class MetaTokenizer:
    """A parsed tokenizer.model.

    Attributes:
        kind: "sentencepiece" or "tiktoken".
        family: one of `FAMILIES`.
        size: number of tokens, special ones included.
        parsed: SentencePiece's `ModelProto`, or the tokens in order of their ranks.
        origin: file named in messages.
    """

    kind: str
    family: str
    size: int
    parsed: Any
    origin: str

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
    if _kind(content, origin) == "tiktoken":
        tokens = tiktoken_tables.read(content, origin)
        return _tiktoken(tokens, text, family, origin)
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
    return MetaTokenizer("sentencepiece", family, size, proto, origin)


def hf_files_from_meta(
    tokenizer_model: Path | bytes,
    config: Any,
    *,
    instruct: bool | None = None,
    family: str | None = None,
    origin: str | None = None,
) -> dict[str, bytes]:
    """All files besides weights and config.json that a Hugging Face folder needs, from Meta's tokenizer.model.

    Ids are those of Meta's `encode(text, bos=True, eos=False)`, with one difference where a chat template exists: text
    that spells a special token (`</s>`, `<|eot|>`) becomes that token, since templates write them as text. Pass
    `split_special_tokens=True` to the tokenizer to encode such text as Meta does. Without a template (LLaMA 1, and
    Llama 2 with `instruct=False`) that is the default.

    Args:
        tokenizer_model: the file, or its content: a SentencePiece model or a tiktoken table.
        config: `LlamoeDenseConfig`, `LlamoeTextConfig` or `LlamoeConfig`; the last one also gets a processor.
        instruct: whether the model was trained to chat. True writes the chat template, the tokens that end an answer,
            and the sampling settings of Meta's examples (temperature 0.6, top_p 0.9). None, unknown, omits the sampling
            settings. False, a base model, stops only at the end of text and, for Llama 2, has no template.
        family: as in `check_tokenizer`.
        origin: as in `check_tokenizer`.

    Returns:
        file name to content: the original tokenizer.model, tokenizer.json, tokenizer_config.json,
        generation_config.json, and where the model has them chat_template.jinja and processor_config.json.

    Raises:
        CheckpointError: as for `check_tokenizer`; or configuration and tokenizer have different image tokens.
    """
    content = tokenizer_model if isinstance(tokenizer_model, bytes) else _read(tokenizer_model)
    origin = origin or ("tokenizer.model" if isinstance(tokenizer_model, bytes) else str(tokenizer_model))
    meta = check_tokenizer(content, config, family=family, origin=origin)
    text = getattr(config, "text_config", config)
    template = _template(meta.family, instruct, images=isinstance(config, LlamoeConfig))
    settings: dict[str, Any] = {
        **_SETTINGS,
        **meta.roles(),
        "add_bos_token": True,
        "add_eos_token": False,
        "model_max_length": text.max_position_embeddings,
    }
    if template is None and meta.kind == "sentencepiece":
        settings["split_special_tokens"] = True
    files = {
        "tokenizer.model": content,
        "tokenizer.json": _tokenizer_json(meta),
        "tokenizer_config.json": to_json(settings),
        "generation_config.json": _generation_config(meta, instruct),
    }
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    if isinstance(config, LlamoeConfig):
        files.update(processor_files(config, tokenizer_files=files))
    return files


def generation_config(
    bos_token_id: int, eos_token_id: int | Sequence[int], pad_token_id: int, *, sample: bool = False
) -> bytes:
    """The content of generation_config.json.

    Args:
        bos_token_id, pad_token_id: ids of the tokens.
        eos_token_id: one or several ids that end an answer.
        sample: whether to sample as Meta's examples do, at temperature 0.6 and top_p 0.9, instead of greedily.
    """
    eos = eos_token_id if isinstance(eos_token_id, int) else list(eos_token_id)
    content = {"bos_token_id": bos_token_id, "eos_token_id": eos, "pad_token_id": pad_token_id}
    if sample:
        content.update(do_sample=True, temperature=0.6, top_p=0.9)
    return to_json(content)


def extend_tokenizer(
    companions: Mapping[str, bytes], special_tokens: Sequence[str] = MULTIMODAL_TOKENS
) -> tuple[dict[str, bytes], dict[str, int]]:
    """Add special tokens to a folder's tokenizer; every text without them keeps its ids.

    Args:
        companions: file name to content; tokenizer.json, or a tokenizer.model to make it from.
        special_tokens: the tokens; existing ones keep their ids.

    Returns:
        all companions with the changed ones replaced, and the ids of `special_tokens`. New ids follow all old ones.

    Raises:
        CheckpointError: there is no tokenizer, or it is damaged.
        ValueError: a token is empty.
    """
    if not all(special_tokens):
        raise ValueError(
            f"special_tokens is {list(special_tokens)!r}: names that are not empty were expected."
        )
    files = dict(companions)
    if "tokenizer.json" not in files:
        if "tokenizer.model" not in files:
            raise CheckpointError("tokenizer.json: there is none, nor a tokenizer.model to make it of.")
        meta = check_tokenizer(files["tokenizer.model"])
        files["tokenizer.json"] = _tokenizer_json(meta)
        settings = {**_SETTINGS, **meta.roles(), "add_bos_token": True, "add_eos_token": False}
    else:
        settings = _json(files, "tokenizer_config.json")
    content = _json(files, "tokenizer.json")
    known = _vocabulary(content)
    added = content.setdefault("added_tokens", [])
    following = max(known.values(), default=-1) + 1
    ids = {}
    for token in dict.fromkeys(special_tokens):
        entry = next((entry for entry in added if entry["content"] == token), None)
        if entry is None:
            if token not in known:
                known[token], following = following, following + 1
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            entry = {"id": known[token], "content": token, **flags}
            added.append(entry)
        entry["special"] = True
        ids[token] = entry["id"]
    added.sort(key=lambda entry: entry["id"])
    if isinstance(listed := settings.get("added_tokens_decoder"), dict):
        flags = {entry["id"]: {**entry} for entry in added if entry["content"] in ids}
        listed.update(
            {str(index): {key: entry[key] for key in entry if key != "id"} for index, entry in flags.items()}
        )
    # Prompts with pictures spell special tokens in their text.
    settings.pop("split_special_tokens", None)
    files["tokenizer.json"] = to_json(content)
    files["tokenizer_config.json"] = to_json(settings)
    return files, ids


def multimodal_chat_template() -> bytes:
    """A chat template for assembled models: Llama 4's with pictures, using `MULTIMODAL_TOKENS`."""
    return chat_templates.llama_4(images=True).encode()


def meta_tokenizer_model(companions: Mapping[str, bytes], *, vocab_size: int | None = None) -> bytes | None:
    """Meta's tokenizer.model for the tokenizer of a Hugging Face folder.

    Args:
        companions: file name to content.
        vocab_size: rows of the embedding; special tokens with larger ids are left out, since no model has them. None
            keeps all.

    Returns:
        the folder's own tokenizer.model, byte by byte, if tokenizer.json adds no token to it; else one built from
        tokenizer.json that gives the same ids; None where the folder has no tokenizer.

    Raises:
        CheckpointError: Meta's formats cannot express tokenizer.json; the message says why.
    """
    original = companions.get("tokenizer.model")
    if "tokenizer.json" not in companions:
        return original
    origin = "tokenizer.json"
    content = _json(companions, origin)
    if vocab_size is not None:
        tokens = content.get("added_tokens", [])
        content["added_tokens"] = [token for token in tokens if token["id"] < vocab_size]
    model = content["model"]
    if original is not None:
        return _with_added(original, content)
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise CheckpointError(
            f"{origin}: a model of type {model.get('type')}; a tokenizer.model can be made of byte-pair encoding only. "
            "Put the original tokenizer.model into the folder."
        )
    if '"ByteLevel"' in json.dumps(content.get("pre_tokenizer")):
        return tiktoken_tables.from_json(content, origin)
    settings = _json(companions, "tokenizer_config.json")
    names = {
        role: value["content"] if isinstance(value, dict) else value
        for role, value in settings.items()
        if role in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    return sentencepiece_models.from_json(content, names, origin)


def token_ids(companions: Mapping[str, bytes]) -> dict[str, int]:
    """Token to id for every token in tokenizer.json, special ones included.

    Args:
        companions: file name to content; tokenizer.json among them.

    Raises:
        CheckpointError: it is damaged.
    """
    return _vocabulary(_json(companions, "tokenizer.json"))


def check_companions(companions: Mapping[str, bytes], config: Any, origin: str | None = None) -> list[str]:
    """Refuse a tokenizer with ids beyond the embedding; fewer tokens than rows are usual.

    Args:
        companions: file name to content.
        config: a configuration of llamoe.
        origin: folder named in messages.

    Returns:
        notes on added tokens without a row, such as a padding token that is never read.

    Raises:
        CheckpointError: tokenizer.json is damaged, or its vocabulary holds an id beyond the embedding.
    """
    if "tokenizer.json" not in companions:
        return []
    place = f"{origin}: " if origin else ""
    text = getattr(config, "text_config", config)
    try:
        content = _json(companions, "tokenizer.json")
    except CheckpointError as error:
        raise CheckpointError(f"{place}{error}") from error
    rows = f"{type(text).__name__}.vocab_size is {text.vocab_size}"
    added = {token["content"] for token in content.get("added_tokens", [])}
    beyond = {token: index for token, index in _vocabulary(content).items() if index >= text.vocab_size}
    if wrong := [token for token in beyond if token not in added]:
        token = max(wrong, key=beyond.__getitem__)
        raise CheckpointError(
            f"{place}tokenizer.json: gives {token!r} the id {beyond[token]}, and {rows}. Take this model's own "
            "tokenizer, or resize the embedding."
        )
    return (
        [f"tokenizer.json: added tokens {', '.join(map(repr, list(beyond)[:5]))} have no row: {rows}"]
        if beyond
        else []
    )


def _read(path: Path) -> bytes:
    if not Path(path).exists():
        raise CheckpointError(
            f"{path}: no such file. It is part of a release from Meta, one level above the weights of LLaMA 1 and 2."
        )
    with reading(path):
        return Path(path).read_bytes()


def _kind(content: bytes, origin: str) -> str:
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


def _tiktoken(tokens: list[bytes], text: Any, family: str | None, origin: str) -> MetaTokenizer:
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
    return MetaTokenizer("tiktoken", fitting[0], len(tokens) + sizes[fitting[0]], tokens, origin)


def _tokenizer_json(meta: MetaTokenizer) -> bytes:
    if meta.kind == "tiktoken":
        return tiktoken_tables.to_json(meta.parsed, meta.family)
    return sentencepiece_models.to_json(meta.parsed, meta.origin)


def _template(family: str, instruct: bool | None, *, images: bool) -> str | None:
    if family == "llama-4":
        return chat_templates.llama_4(images=images)
    if family == "llama-3":
        return chat_templates.llama_3()
    return chat_templates.llama_2() if family == "llama-2" and instruct is not False else None


def _generation_config(meta: MetaTokenizer, instruct: bool | None) -> bytes:
    roles, ids = meta.roles(), meta.token_ids()
    eos = ids[roles["eos_token"]]
    if meta.kind == "tiktoken" and instruct is not False:
        eos = [eos, *(ids[token] for token in tiktoken_tables.STOPS[meta.family])]
    return generation_config(
        ids[roles["bos_token"]],
        eos,
        ids[roles["pad_token"]],
        sample=instruct is True and meta.family != "llama-1",
    )


def _with_added(original: bytes, content: Mapping[str, Any]) -> bytes:
    """The original tokenizer.model with the tokens that tokenizer.json adds to it."""
    ids = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    origin = "tokenizer.model"
    if _kind(original, origin) == "tiktoken":
        ranks = len(tiktoken_tables.read(original, origin))
        last = ranks + max(map(len, tiktoken_tables.SPECIAL_TOKENS.values())) - 1
        beyond = {token: index for token, index in ids.items() if index > last}
        if beyond:
            raise CheckpointError(
                f"tokenizer.json: gives {next(iter(beyond))!r} the id {next(iter(beyond.values()))}, and Meta's code "
                f"knows special tokens up to {last} behind {ranks} ranks; a tokenizer.model cannot name more."
            )
        return original
    vocabulary = content["model"]["vocab"]
    beyond = {token: index for token, index in ids.items() if index >= len(vocabulary)}
    return sentencepiece_models.extended(original, beyond, origin) if beyond else original


def _json(companions: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in companions:
        return {}
    try:
        content = json.loads(companions[name])
    except ValueError as error:
        raise CheckpointError(
            f"{name}: is no JSON ({error}). Take the file from its source again."
        ) from error
    if name == "tokenizer.json":
        _check_json(companions[name], name)
    if not isinstance(content, dict) or (name == "tokenizer.json" and not _is_tokenizer(content)):
        raise CheckpointError(
            f"{name}: is JSON, but not what a tokenizer's file holds. Take it from its source again."
        )
    return content


def _check_json(content: bytes, name: str) -> None:
    try:
        Tokenizer.from_buffer(content)
    # The library raises nothing more specific.
    except Exception as error:
        raise CheckpointError(
            f"{name}: is JSON, but the library tokenizers cannot read it ({error}). Take it from its source again."
        ) from error


def _is_tokenizer(content: Mapping[str, Any]) -> bool:
    model = content.get("model")
    tokens = content.get("added_tokens", [])
    return (
        isinstance(model, dict)
        and isinstance(model.get("vocab"), (dict, list))
        and isinstance(tokens, list)
        and all(isinstance(token, dict) and {"id", "content"} <= token.keys() for token in tokens)
    )


def _vocabulary(content: Mapping[str, Any]) -> dict[str, int]:
    vocab = content["model"]["vocab"]
    # A Unigram vocabulary is a list of [token, score], in order of ids.
    if isinstance(vocab, list):
        vocab = {token: index for index, (token, _) in enumerate(vocab)}
    return {**vocab, **{token["content"]: token["id"] for token in content.get("added_tokens", [])}}
