"""A folder's tokenizer.json: checked, compared with the embedding, and extended by special tokens."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from .check_tokenizer import check_tokenizer
from .processors import IMAGE_TOKENS

# Tokens that an assembled model needs: for pictures, and the message borders in the chat template `llama_4`.
MULTIMODAL_TOKENS = ("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", *IMAGE_TOKENS)


def extend_tokenizer(
    companions: Mapping[str, bytes], special_tokens: Sequence[str] = MULTIMODAL_TOKENS
) -> tuple[dict[str, bytes], dict[str, int]]:
    """Add special tokens to a folder's tokenizer; every text without them keeps its ids.

    The companions hold tokenizer.json, or a tokenizer.model to make it from.

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
        files["tokenizer.json"], settings = meta.to_json(), meta.settings()
    else:
        settings = read_part(files, "tokenizer_config.json")
    content = read_part(files, "tokenizer.json")
    known = _vocabulary(content)
    added = content.setdefault("added_tokens", [])
    following = max(known.values(), default=-1) + 1
    ids = {}
    for token in dict.fromkeys(special_tokens):
        entry = next((entry for entry in added if entry["content"] == token), None)
        if entry is None:
            if token not in known:
                known[token], following = following, following + 1
            entry = _added(known[token], token)
            added.append(entry)
        entry["special"] = True
        ids[token] = entry["id"]
    added.sort(key=lambda entry: entry["id"])
    if isinstance(decoder := settings.get("added_tokens_decoder"), dict):
        for entry in added:
            if entry["content"] in ids:
                decoder[str(entry["id"])] = {key: value for key, value in entry.items() if key != "id"}
    # Prompts with pictures spell special tokens in their text.
    settings.pop("split_special_tokens", None)
    files["tokenizer.json"] = to_json(content)
    files["tokenizer_config.json"] = to_json(settings)
    return files, ids


def fill_vocabulary(tokenizer: bytes, start: int, stop: int) -> bytes:
    """A tokenizer.json with special tokens of no use for the ids `start` to `stop`."""
    content = json.loads(tokenizer)
    unused = [{**_added(index, f"<|unused_{index}|>"), "special": True} for index in range(start, stop)]
    return to_json({**content, "added_tokens": content.get("added_tokens", []) + unused})


def _added(index: int, token: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags}


def token_ids(companions: Mapping[str, bytes]) -> dict[str, int]:
    """Token to id for every token in the companions' tokenizer.json, special ones included."""
    return _vocabulary(read_part(companions, "tokenizer.json"))


def check_companions(companions: Mapping[str, bytes], config: Any, origin: str | None = None) -> list[str]:
    """Refuse a vocabulary with ids beyond the embedding; fewer tokens than rows are usual.

    Returned are notes on added tokens without a row, such as a padding token that is never read.
    """
    if "tokenizer.json" not in companions:
        return []
    place = f"{origin}: " if origin else ""
    text = getattr(config, "text_config", config)
    try:
        content = read_part(companions, "tokenizer.json")
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
    shown = ", ".join(map(repr, list(beyond)[:5]))
    return [f"tokenizer.json: added tokens {shown} have no row: {rows}"] if beyond else []


def read_part(companions: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object in one of the small JSON files around a tokenizer; empty if there is no such file."""
    if name not in companions:
        return {}
    try:
        content = json.loads(companions[name])
    except ValueError as error:
        raise CheckpointError(
            f"{name}: is no JSON ({error}). Take the file from its source again."
        ) from error
    if name == "tokenizer.json":
        try:
            Tokenizer.from_buffer(companions[name])
        # The library raises nothing more specific.
        except Exception as error:
            raise CheckpointError(
                f"{name}: is JSON, but the library tokenizers cannot read it ({error}). Take it from its source again."
            ) from error
    if not isinstance(content, dict) or (name == "tokenizer.json" and not _is_tokenizer(content)):
        raise CheckpointError(
            f"{name}: is JSON, but not what such a file holds. Take it from its source again."
        )
    return content


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
