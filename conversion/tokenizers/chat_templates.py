"""Chat templates in Jinja for `apply_chat_template`: what Meta's and Mistral AI's code writes around messages.

Llama 2: each question with its answer is bos + `[INST] question [/INST] answer ` + eos, question and answer stripped. A
system message is first merged into the first question. Llama 3 and 4: bos once, then for each message a header with its
role, an empty line, the content, and an end token.

Mistral: bos once, then `[INST]question[/INST]` for each question, and each answer with eos. In version 1 `[INST]` is
text, with spaces around question and answer. In later versions it is a token, and SentencePiece makes the space. A
system message is put before the first question, and in versions 2 and 3 before the last one; since version 7 it has
tokens of its own.

Sources: Meta's `llama`, `llama3` and `llama-models` repositories; `instruct.py` of mistralai/mistral-common.

Meta's code encodes header, content and calls of tools separately, but a filled template is encoded at once. So Llama 4
content that begins with a line break may get other tokens, since the break merges with the header's.

The templates put what the model itself writes, including the end token, between `generation` and `endgeneration`. These
marks produce no text; `apply_chat_template(return_assistant_tokens_mask=True)` and trainers use them.

turns.jinja is for formats that alternate questions and answers, headers.jinja for messages with headers. The words in
capitals in both files are replaced here.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent
_NO_CALLS = (_FOLDER / "no_calls.jinja").read_text(encoding="utf-8")
_IMAGE = """{%- elif part['type'] == 'image' -%}
                {{- '<|image|>' -}}
            """


def llama_2() -> str:
    """Return the chat template of Llama 2, which like Meta's code refuses tags in messages and roles out of order."""
    words = {
        "TITLE": "Llama 2 chat.",
        "BEGIN": "",
        "TAGS": "['[INST]', '[/INST]', '<<SYS>>', '<</SYS>>']",
        "MODEL": "Llama 2",
        "MERGES": "loop.index0 == 1",
        "MERGED": "'<<SYS>>\\n' + text_of(messages[0]) + '\\n<</SYS>>\\n\\n' + content",
        "QUESTION": "bos_token + '[INST] ' + content | trim + ' [/INST]'",
        "ANSWER": "' ' + content | trim + ' ' + eos_token",
    }
    return _filled("turns", words)


LAST_OF_MISTRAL = 13
"""The last version of Mistral AI's chat format that `mistral` knows; the next begins a conversation with settings."""


def mistral(version: int) -> str:
    """Return the chat template of a version of Mistral AI's chat format."""
    begin, merges, tags = "{{- bos_token -}}\n", "false", ["[INST]", "[/INST]"]
    if version >= 7:
        tags += ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
        system = "'[SYSTEM_PROMPT]' + text_of(messages[0]) + '[/SYSTEM_PROMPT]'"
        begin += f"{{%- if first -%}}\n    {{{{- {system} -}}}}\n{{%- endif -%}}\n"
    else:
        merges = "loop.index0 == 1" if version == 1 else "loop.index0 + 2 >= loop.length"
    words = {
        "TITLE": f"Mistral instruct, version {version}.",
        "BEGIN": begin,
        "TAGS": str(tags),
        "MODEL": "Mistral",
        "MERGES": merges,
        "MERGED": "text_of(messages[0]) + '\\n\\n' + content",
        # In version 1 `[INST]` is text, and needs spaces.
        "QUESTION": f"'[INST]{' ' * (version == 1)}' + content + '{' ' * (version == 1)}[/INST]'",
        "ANSWER": "' ' + content + eos_token" if version == 1 else "content.rstrip(' ') + eos_token",
    }
    return _filled("turns", words)


def llama_3() -> str:
    """Return the chat template of Llama 3, which joins a message's parts and strips the text, as Meta's code does."""
    words = {
        "TITLE": "Llama 3 chat.",
        "START": "<|start_header_id|>",
        "END": "<|end_header_id|>",
        "EOM": "<|eom_id|>",
        "EOT": "<|eot_id|>",
        "TRIM": "| trim ",
        "IMAGE": "",
    }
    return _filled("headers", words)


def llama_4(*, images: bool, calls: bool = True) -> str:
    """Return the chat template of Llama 4: calls and results of tools end with `<|eom|>`, all else with `<|eot|>`.

    Args:
        images: messages may have parts `{"type": "image"}`, for which `Llama4Processor` writes the tokens.
        calls: messages may have calls of tools; else they are refused.
    """
    words = {
        "TITLE": "Llama 4 chat.",
        "START": "<|header_start|>",
        "END": "<|header_end|>",
        "EOM": "<|eom|>",
        "EOT": "<|eot|>",
        "TRIM": "",
        "IMAGE": _IMAGE if images else "",
    }
    return ("" if calls else _NO_CALLS) + _filled("headers", words)


def _filled(name: str, words: dict[str, str]) -> str:
    template = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    for word, value in {"NO_CALLS": _NO_CALLS, **words}.items():
        template = template.replace(word, value)
    return template
