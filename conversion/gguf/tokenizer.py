"""Convert the tokenizer in a GGUF file's keys to the files of a Hugging Face folder.

From the pieces of a SentencePiece vocabulary its model is built again, and converted as Meta's is. For a byte-pair
vocabulary the file only names the pattern that splits texts into words. transformers' converter is not used: it adds a
token `<|endoftext|>`, whose id is beyond the embedding.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from ..consolidated import Params
from ..tokenizers import WORD_PATTERNS, begin_with, hf_files_from_meta, model_of_pieces

# Names of the patterns in `WORD_PATTERNS`, by llama.cpp's names.
_PATTERNS = {
    "llama-bpe": "llama-3",
    "llama3": "llama-3",
    "llama-v3": "llama-3",
    "llama4": "llama-4",
    "gpt-4o": "llama-4",
    "tekken": "tekken",
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
# Further tokens that end an answer.
_STOPS = ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>")


def read_tokenizer(params: Params, config: LlamoeBaseConfig, notes: list[str]) -> dict[str, bytes]:
    """Make the files of a tokenizer, its chat template and generation_config.json, by name.

    Args:
        params: the keys of the file.
        config: of the model.
        notes: gets a line if no tokenizer can be made.

    Raises:
        CheckpointError: the tokenizer has more or fewer tokens than the embedding has rows.
    """
    prefix = "tokenizer.ggml."
    keys = {
        key.removeprefix(prefix): value for key, value in params.entries.items() if key.startswith(prefix)
    }
    tokens, model, pre = (keys.get(name) for name in ("tokens", "model", "pre"))
    if tokens is None or not (model == "llama" or (model == "gpt2" and pre in _PATTERNS)):
        notes.append(
            f"no tokenizer is made of {prefix}model = {model!r} and {prefix}pre = {pre!r}: add the model's"
        )
        return {}
    if len(tokens) != config.vocab_size:
        raise CheckpointError(
            f"{params.origin}: {prefix}tokens has {len(tokens)} tokens, and token_embd.weight {config.vocab_size} rows."
        )
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: keys[f"{name}_token_id"] for role, name in names.items() if f"{name}_token_id" in keys}
    template = params.entries.get("tokenizer.chat_template")
    kinds = keys.get("token_type") or [_NORMAL] * len(tokens)
    if model == "llama":
        pieces = zip(tokens, keys.get("scores") or [0.0] * len(tokens), kinds, strict=True)
        proto = model_of_pieces(pieces, ids, keys.get("add_space_prefix", True))
        files = hf_files_from_meta(
            proto, config, instruct=bool(template), family="llama-2", origin=params.origin
        )
    else:
        files = _byte_pairs(keys, kinds, ids, config)
    stops = [ids["eos"]] if "eos" in ids else []
    if template is not None:
        files["chat_template.jinja"] = template.encode()
        stops += [tokens.index(token) for token in _STOPS if token in tokens]
    roles = {f"{role}_token_id": ids[role] for role in ("bos", "pad") if role in ids}
    generation = {**roles, "eos_token_id": [*dict.fromkeys(stops)] or None}
    return files | {"generation_config.json": to_json(generation)}


def _byte_pairs(
    keys: Mapping[str, Any], kinds: list[int], ids: Mapping[str, int], config: LlamoeBaseConfig
) -> dict[str, bytes]:
    """Make tokenizer.json and tokenizer_config.json of a byte-pair vocabulary."""
    tokens = keys["tokens"]
    merges = [tuple(merge.split(" ")) for merge in keys.get("merges", ())]
    tokenizer = Tokenizer(BPE({token: id_ for id_, token in enumerate(tokens)}, merges, ignore_merges=True))
    words = Regex(WORD_PATTERNS[_PATTERNS[keys["pre"]]])
    split, to_bytes = (
        pre_tokenizers.Split(words, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    adds_bos = "bos" in ids and keys.get("add_bos_token", True)
    if adds_bos:
        tokenizer.post_processor = begin_with(tokens[ids["bos"]], ids["bos"])
    settings = {
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        **{f"{role}_token": tokens[number] for role, number in ids.items()},
        "add_bos_token": adds_bos,
        "model_max_length": config.max_position_embeddings,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": to_json(settings),
    }
