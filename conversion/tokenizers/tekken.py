"""Convert the tokenizer of Mistral AI's newer models, tekken.json.

The file holds tokens in base64 with their ranks, the pattern that splits a text into words, and since version 11 the
special tokens. A small model may use only the first tokens. Special tokens have the first ids, so another token's id
is its rank plus the number of special tokens. Text that spells a special token becomes that token, since chat templates
write special tokens as text; mistral-common never makes a special token from text.

Source: `tekken.py` of mistralai/mistral-common.
"""

import base64
import json

from .source_tokenizer import SourceTokenizer, refuse
from .tiktoken_tables import BYTES, build_json

# Special tokens of files before version 11, which do not name them.
_UNNAMED = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read(content: bytes, origin: str) -> SourceTokenizer:
    """Read a tekken.json as a tokenizer with mistral-common's ids and `<s>` in front of each text.

    Raises:
        CheckpointError: the file is damaged, or lacks one of the tokens in `_ROLES`.
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
        special = {names.get(number, f"<SPECIAL_{number}>"): number for number in range(specials)}
        version, pattern = int(config["version"].removeprefix("v")), config["pattern"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(origin, f"is not a tekken.json ({error!r})")
    if list(ranks.values()) != list(range(size - specials)) or not BYTES <= ranks.keys():
        problem = (
            f"is not one token for each rank from 0 to {size - specials - 1}, with every byte among them"
        )
        refuse(origin, f"has {len(ranks)} different tokens, which {problem}")
    if len(special) != specials or not {*_ROLES.values()} <= special.keys():
        refuse(origin, f"has a special token twice, or lacks one of {', '.join(_ROLES.values())}")
    return SourceTokenizer(
        "tekken",
        "mistral",
        content,
        size,
        special,
        _ROLES,
        lambda: build_json(ranks, pattern, special, _ROLES["bos_token"], first=specials),
        version=version,
    )
