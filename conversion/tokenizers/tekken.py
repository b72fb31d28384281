"""The tokenizer of newer models of Mistral AI, tekken.json, to tokenizer.json.

The file holds tokens in base64 with their ranks, of which the model may have the first ones only, the pattern that
splits a text into words, and since version 11 the special tokens. Special tokens have the first ids, so a token's id is
its rank and their number. Text that spells a special token becomes that token here, since templates write them as text;
mistral-common never reads one from text.

Source: `tekken.py` of mistralai/mistral-common.
"""

import base64
import json
from dataclasses import dataclass

from ...configuration.errors import CheckpointError
from .tiktoken_tables import build_json

_ADVICE = "Take the file from the release again."
# Special tokens of files that name none.
_UNNAMED = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclass(frozen=True)
class Tekken:
    """The content of a tekken.json.

    Attributes:
        tokens: in order of their ranks.
        special: special tokens in order of their ids, which precede those of `tokens`.
        pattern: regular expression of a word.
        version: of the format of conversations, such as 3.
    """

    tokens: list[bytes]
    special: list[str]
    pattern: str
    version: int


def read(content: bytes, origin: str) -> Tekken:
    """Read a tekken.json.

    Raises:
        CheckpointError: it is damaged, or lacks one of the tokens of `ROLES`.
    """
    try:
        data = json.loads(content)
        config = data["config"]
        size, specials = config["default_vocab_size"], config["default_num_special_tokens"]
        entries = data["vocab"][: size - specials]
        ranks = {base64.b64decode(entry["token_bytes"], validate=True): entry["rank"] for entry in entries}
        named = data.get("special_tokens") or [
            {"rank": i, "token_str": name} for i, name in enumerate(_UNNAMED)
        ]
        names = {entry["rank"]: entry["token_str"] for entry in named}
        special = [names.get(number, f"<SPECIAL_{number}>") for number in range(specials)]
        result = Tekken(list(ranks), special, config["pattern"], int(config["version"].removeprefix("v")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{origin}: is not a tekken.json ({error!r}). {_ADVICE}") from error
    if list(ranks.values()) != list(range(size - specials)):
        raise CheckpointError(
            f"{origin}: has {len(ranks)} different tokens, not one for each rank from 0 to {size - specials - 1}. "
            + _ADVICE
        )
    missing = [token for token in ROLES.values() if token not in special]
    if (
        missing
        or len(set(special)) != specials
        or any(byte not in ranks for byte in map(bytes, zip(range(256))))
    ):
        problem = f"no {missing[0]}" if missing else "a special token twice, or a byte without a token"
        raise CheckpointError(f"{origin}: has {problem}. {_ADVICE}")
    return result


def special_token_ids(tekken: Tekken) -> dict[str, int]:
    """The ids of the special tokens."""
    return {token: number for number, token in enumerate(tekken.special)}


def to_json(tekken: Tekken) -> bytes:
    """Build tokenizer.json; ids equal mistral-common's for texts without special tokens, `<s>` in front."""
    return build_json(
        tekken.tokens,
        tekken.pattern,
        special_token_ids(tekken),
        ROLES["bos_token"],
        first=len(tekken.special),
    )
