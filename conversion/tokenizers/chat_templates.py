"""Chat templates in Jinja for `apply_chat_template`: what Meta's and Mistral AI's code writes around messages.

Llama 2: each question and answer is bos + `[INST] question [/INST] answer ` + eos, both stripped; a system message is
first merged into the first question. Llama 3 and 4: bos once, then for each message a header with its role, an empty
line, the content, and an end token.

Mistral: bos once, then each question as `[INST]question[/INST]` and each answer with eos. In version 1 `[INST]` is
text, with spaces around question and answer; later it is a token, and SentencePiece's prefix makes the space. A system
message is put before the first question, in versions 2 and 3 before the last one, and since 7 has tokens of its own.

Sources: Meta's `llama`, `llama3` and `llama-models` repositories; `instruct.py` of mistralai/mistral-common.

Meta's code encodes header, content and calls separately; a template is encoded at once. So Llama 4 content that begins
with a line break may get other tokens, since the break merges with the header's.

The model's own output stands between `generation` and `endgeneration`, including the end token. These marks produce no
text; `apply_chat_template(return_assistant_tokens_mask=True)` and trainers use them.

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
    """Return the chat template of Llama 2; like Meta's code it refuses tags in messages and roles in a wrong order."""
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
"""The last version of Mistral AI's format that `mistral` writes; the next one begins a conversation with settings."""


def mistral(version: int) -> str:
    """Return the chat template of a version of Mistral AI's format of conversations."""
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
        # In version 1 the borders are text.
        "QUESTION": f"'[INST]{' ' * (version == 1)}' + content + '{' ' * (version == 1)}[/INST]'",
        "ANSWER": "' ' + content + eos_token" if version == 1 else "content.rstrip(' ') + eos_token",
    }
    return _filled("turns", words)


def llama_3() -> str:
    """Return the chat template of Llama 3, which joins and strips a message's parts, as Meta's code does."""
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
    """Return the chat template of Llama 4: calls and results of tools end with `<|eom|>`, others with `<|eot|>`.

    With `images` messages may have parts `{"type": "image"}`; `Llama4Processor` writes their tokens. Without `calls`
    those of tools are refused.
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
