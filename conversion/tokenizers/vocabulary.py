"""The decoder's vocabulary with the tokens that pictures and messages need, and the files that say so."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...configuration.json_files import to_json
from . import chat_templates
from .tokenizer_json import MULTIMODAL_TOKENS, extend_tokenizer, read_part, token_ids

_PAD = "<|finetune_right_pad|>"
# Tokens that end an answer in the chat template that is written.
_ENDS = ("<|eot|>", "<|eom|>")
# The decoder's companion files that the assembled model replaces.
_REPLACED = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


@dataclass
class Vocabulary:
    """The decoder's vocabulary, extended by the tokens that pictures need.

    Attributes:
        files: all companion files, with the extended tokenizer.
        ids: token ids that pictures and messages need.
        known: number of tokens that the tokenizer had.
        rows: number of rows that the embedding needs.
    """

    files: dict[str, bytes]
    ids: dict[str, int]
    known: int
    rows: int
    pad_token_id: int
    notes: list[str]


def extend_vocabulary(companions: Mapping[str, bytes], config: Any) -> Vocabulary:
    """Add the tokens that pictures and messages need, after all ids that are in use."""
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
            f"the tokenizer has {known - before} tokens more than the decoder had rows; those are new, too"
        )
    # A padding token that the tokenizer has stays as it is.
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
