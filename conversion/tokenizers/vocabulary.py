"""Add special tokens to a folder's tokenizer.json, and check a folder's tokenizer.model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from ...configuration.errors import CheckpointError
from ...configuration.json_files import reading, to_json
from . import chat_templates
from .folder_files import check_tokenizer
from .processors import IMAGE_TOKENS

# Tokens that an assembled model needs for pictures, and around messages in the chat template `llama_4`.
MULTIMODAL_TOKENS = ("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", *IMAGE_TOKENS)
_PAD = "<|finetune_right_pad|>"
# Tokens that end an answer in the chat template of Llama 4.
_ENDS = ("<|eot|>", "<|eom|>")
# Files of the decoder's folder that an assembled model does not use, or that are written anew for it.
_REPLACED = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def extend_tokenizer(
    companions: Mapping[str, bytes], special_tokens: Sequence[str]
) -> tuple[dict[str, bytes], dict[str, int]]:
    """Add special tokens to a folder's tokenizer; a text without them keeps its ids.

    `companions` are the folder's small files by name, among them tokenizer.json, or a tokenizer.model to make it from.

    Returns:
        all files, with the changed ones of the tokenizer; and the ids of `special_tokens`. New ids follow all old ones.

    Raises:
        CheckpointError: there is no tokenizer, or it is damaged.
    """
    files = dict(companions)
    if "tokenizer.json" not in files:
        if "tokenizer.model" not in files:
            raise CheckpointError("tokenizer.json: there is none, nor a tokenizer.model to make it from.")
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
    # Prompts with pictures contain special tokens as text, so the tokenizer must not split them.
    settings.pop("split_special_tokens", None)
    files["tokenizer.json"] = to_json(content)
    files["tokenizer_config.json"] = to_json(settings)
    return files, ids


def token_ids(companions: Mapping[str, bytes]) -> dict[str, int]:
    """Map each token of tokenizer.json to its id, special tokens included."""
    try:
        return Tokenizer.from_buffer(companions["tokenizer.json"]).get_vocab(with_added_tokens=True)
    # The library raises nothing more specific.
    except Exception as error:
        raise CheckpointError(f"tokenizer.json: tokenizers cannot read it ({error}).") from error


def read_part(companions: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Read a small JSON file beside the weights; empty if there is no such file."""
    if name not in companions:
        return {}
    with reading(name, ValueError):
        return json.loads(companions[name])


def meta_tokenizer_file(companions: Mapping[str, bytes], config: Any) -> dict[str, bytes]:
    """Return the tokenizer.model among a Hugging Face folder's small files, by its name; empty without a tokenizer.

    Raises:
        CheckpointError: the folder has only a tokenizer.json, or the tokenizer.model has another number of tokens than
            the embedding has rows.
    """
    original = companions.get("tokenizer.model")
    if original is None:
        if "tokenizer.json" not in companions:
            return {}
        raise CheckpointError(
            "tokenizer.json: it cannot be converted to a tokenizer.model. Add that of the model's release to the "
            "source's folder."
        )
    check_tokenizer(original, config)
    return {"tokenizer.model": original}


@dataclass
class Vocabulary:
    """The decoder's vocabulary, extended by the tokens for pictures and messages.

    Attributes:
        files: the decoder's small files by name, with the extended tokenizer.
        ids: the tokens for pictures and messages, and their ids.
        known: number of tokens before the extension.
        rows: number of rows that the embedding needs now.
        pad_token_id: id of the padding token.
        notes: sentences for the user about the changes.
    """

    files: dict[str, bytes]
    ids: dict[str, int]
    known: int
    rows: int
    pad_token_id: int
    notes: list[str]


def extend_vocabulary(companions: Mapping[str, bytes], config: Any) -> Vocabulary:
    """Add the tokens for pictures and messages; new ids are above all old ids and all rows of the embedding."""
    files, _ = extend_tokenizer(companions, ())
    present, before = token_ids(files), config.vocab_size
    known = max(present.values(), default=-1) + 1
    settings = json.loads(files["tokenizer_config.json"])
    pad = _pad_token(settings, present, config.pad_token_id)
    wanted = [*MULTIMODAL_TOKENS, pad]
    missing = [token for token in wanted if token not in present]
    unused = [f"<|unused_{index}|>" for index in range(known, before) if missing]
    notes = []
    if unused:
        notes.append(f"{before - known} unused tokens fill the vocabulary's rows {known} to {before - 1}")
    if known > before:
        notes.append(
            f"the tokenizer has {known - before} tokens more than the decoder had rows; their rows are new, too"
        )
    # A padding token that the tokenizer already has is not changed.
    named = [token for token in wanted if token != pad or pad in missing]
    files, ids = extend_tokenizer(files, [*unused, *named])
    if missing:
        notes.append(
            f"{len(missing)} special tokens are new, ids {ids[missing[0]]} to {ids[missing[-1]]}; their rows are the "
            f"mean of the old ones: {' '.join(missing)}"
        )
    pad_token_id = ids[pad] if pad in ids else present[pad]
    rows = max(before, known, *(index + 1 for index in ids.values()))
    notes += _prompt_files(files, ids, config, pad, pad_token_id)
    return Vocabulary(files, ids, known, rows, pad_token_id, notes)


def _pad_token(settings: dict[str, Any], present: dict[str, int], pad_token_id: int | None) -> str:
    """Choose the padding token: the tokenizer's, the configuration's, or a new one."""
    pad = settings.get("pad_token")
    pad = pad["content"] if isinstance(pad, dict) else pad
    names = {index: token for token, index in present.items()}
    return pad if pad in present else names.get(pad_token_id, _PAD)


def _prompt_files(
    files: dict[str, bytes], ids: dict[str, int], config: Any, pad: str, pad_token_id: int
) -> list[str]:
    """Write chat template, processor and generation files into `files`; return notes on what was there before."""
    notes = []
    settings = json.loads(files["tokenizer_config.json"])
    generation = read_part(files, "generation_config.json")
    ends = generation.get("eos_token_id")
    ends = _as_list(config.eos_token_id if ends is None else ends)
    template = files.get("chat_template.jinja", str(settings.get("chat_template") or "").encode())
    if b"<|image|>" not in template:
        if template:
            notes.append("the decoder's chat template reads no pictures and was replaced")
        template = chat_templates.llama_4(images=True).encode()
        ends += [ids[token] for token in _ENDS if ids[token] not in ends]
    for name in [*files]:
        if name in _REPLACED or name.startswith("additional_chat_templates/"):
            del files[name]
    settings.pop("chat_template", None)
    settings["pad_token"] = pad
    generation.update(eos_token_id=ends, pad_token_id=pad_token_id)
    generation.setdefault("bos_token_id", config.bos_token_id)
    files["chat_template.jinja"] = template
    files["tokenizer_config.json"] = to_json(settings)
    files["generation_config.json"] = to_json(generation)
    return notes


def _as_list(ids: int | list[int] | None) -> list[int]:
    return list(ids) if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]
