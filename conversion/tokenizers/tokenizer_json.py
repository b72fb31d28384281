"""A folder's tokenizer.json: checked, compared with the embedding, and extended by special tokens."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from ...configuration.errors import CheckpointError
from ...configuration.json_files import reading, to_json
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
    known = token_ids(files)
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
    if isinstance(decoder := settings.get("added_tokens_decoder"), dict):
        for entry in added:
            if entry["content"] in ids:
                decoder[str(entry["id"])] = {key: value for key, value in entry.items() if key != "id"}
    # Prompts with pictures spell special tokens in their text.
    settings.pop("split_special_tokens", None)
    files["tokenizer.json"] = to_json(content)
    files["tokenizer_config.json"] = to_json(settings)
    return files, ids


def token_ids(companions: Mapping[str, bytes]) -> dict[str, int]:
    """Map each token to its id, for all tokens in the companions' tokenizer.json, special ones included."""
    try:
        return Tokenizer.from_buffer(companions["tokenizer.json"]).get_vocab(with_added_tokens=True)
    # The library raises nothing more specific.
    except Exception as error:
        raise CheckpointError(f"tokenizer.json: tokenizers cannot read it ({error}).") from error


def check_companions(companions: Mapping[str, bytes], config: Any, origin: str) -> list[str]:
    """Refuse a vocabulary with ids beyond the embedding; fewer tokens than rows are usual.

    Returned are notes on added tokens without a row, such as a padding token that is never read. `origin` is the
    folder, for messages.
    """
    if "tokenizer.json" not in companions:
        return []
    text = config.get_text_config()
    beyond = {token: index for token, index in token_ids(companions).items() if index >= text.vocab_size}
    if not beyond:
        return []
    rows = f"{type(text).__name__}.vocab_size is {text.vocab_size}"
    added = {token["content"] for token in read_part(companions, "tokenizer.json").get("added_tokens", [])}
    if wrong := sorted(beyond.keys() - added, key=beyond.__getitem__):
        raise CheckpointError(
            f"{origin}: tokenizer.json gives {wrong[-1]!r} the id {beyond[wrong[-1]]}, and {rows}. Take this model's "
            "own tokenizer, or resize the embedding."
        )
    return [f"tokenizer.json: added tokens {', '.join(map(repr, list(beyond)[:5]))} have no row: {rows}"]


def read_part(companions: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Read the object in one of the small JSON files around a tokenizer; empty if there is no such file."""
    if name not in companions:
        return {}
    with reading(name, ValueError):
        return json.loads(companions[name])
