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
"""

from collections.abc import Mapping

_NO_TOOLS = """{%- if tools is defined and tools -%}
    {{- raise_exception('This template has no place for descriptions of tools: put them into the system message.') -}}
{%- endif -%}
"""
_NO_CALLS = """{%- for message in messages -%}
    {%- if message['role'] == 'tool' or message['tool_calls'] -%}
        {{- raise_exception('This model knows no calls of tools and no results of them; message ' + \
loop.index | string + ' holds one.') -}}
    {%- endif -%}
{%- endfor -%}
"""

# Questions and answers in turn.
_TURNS = (
    """{#- TITLE -#}
{%- macro text_of(message) -%}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] != 'text' -%}
                {{- raise_exception('This model reads text only, and a message holds a part of type ' + \
part['type'] + '.') -}}
            {%- endif -%}
            {{- part['text'] -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""
    + _NO_TOOLS
    + _NO_CALLS
    + """{%- set first = 1 if messages[0]['role'] == 'system' else 0 -%}
{%- if messages | length == first -%}
    {{- raise_exception('A system message is part of the first question: a message of the user must follow.') -}}
{%- endif -%}
BEGIN{%- for message in messages -%}
    {%- set content = text_of(message) -%}
    {%- for tag in TAGS -%}
        {%- if tag in content -%}
            {{- raise_exception('A message holds ' + tag + ', which MODEL reads as the border of a message.') -}}
        {%- endif -%}
    {%- endfor -%}
    {%- if loop.index0 >= first -%}
        {%- set expected = 'user' if (loop.index0 - first) % 2 == 0 else 'assistant' -%}
        {%- if message['role'] != expected -%}
            {{- raise_exception('Roles must be user, assistant, user and so on, after one system message at most; \
message ' + loop.index | string + ' has the role ' + message['role'] + '.') -}}
        {%- endif -%}
        {%- if expected == 'user' -%}
            {%- if first and MERGES -%}
                {%- set content = MERGED -%}
            {%- endif -%}
            {{- QUESTION -}}
        {%- else -%}
            {%- generation -%}
                {{- ANSWER -}}
            {%- endgeneration -%}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
"""
)

_HEADERS = (
    """{#- TITLE -#}
{%- macro write(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is mapping -%}
        {{- content | tojson -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'text' -%}
                {{- part['text'] -}}
            IMAGE{%- else -%}
                {{- raise_exception('This model cannot read a part of type ' + part['type'] + '.') -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro write_call(call) -%}
    {%- set called = call['function'] if 'function' in call else call -%}
    {{- '{"type": "function", "name": ' + called['name'] | tojson(ensure_ascii=true) + ', "parameters": ' -}}
    {%- if called['arguments'] is string -%}
        {{- called['arguments'] -}}
    {%- else -%}
        {{- called['arguments'] | tojson(ensure_ascii=true) -}}
    {%- endif -%}
    {{- '}' -}}
{%- endmacro -%}
{%- macro write_rest(message, role) -%}
    {%- if 'content' in message -%}
        {{- write(message['content']) TRIM-}}
    {%- endif -%}
    {%- set calls = message['tool_calls'] if 'tool_calls' in message and message['tool_calls'] else [] -%}
    {%- for call in calls -%}
        {{- write_call(call) -}}
    {%- endfor -%}
    {{- 'EOM' if role == 'ipython' or calls else 'EOT' -}}
{%- endmacro -%}
"""
    + _NO_TOOLS
    + """{{- bos_token -}}
{%- for message in messages -%}
    {%- set role = 'ipython' if message['role'] == 'tool' else message['role'] -%}
    {%- if role not in ['system', 'user', 'assistant', 'ipython'] -%}
        {{- raise_exception('Roles are system, user, assistant and tool; message ' + loop.index | string + \
' has the role ' + role + '.') -}}
    {%- endif -%}
    {{- 'START' + role + 'END\\n\\n' -}}
    {%- if role == 'assistant' -%}
        {%- generation -%}
            {{- write_rest(message, role) -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- write_rest(message, role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'STARTassistantEND\\n\\n' -}}
{%- endif -%}
"""
)

_IMAGE = """{%- elif part['type'] == 'image' -%}
                {{- '<|image|>' -}}
            """


def llama_2() -> str:
    """The chat template of Llama 2; like Meta's code it refuses tags in messages and roles out of turn."""
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
    return _filled(words, _TURNS)


LAST_OF_MISTRAL = 13
"""The last version that `mistral` writes; the next one has settings in front of a conversation."""


def mistral(version: int) -> str:
    """The chat template of Mistral AI's format of conversations, by its version."""
    begin, here, tags = "{{- bos_token -}}\n", "false", ["[INST]", "[/INST]"]
    if version >= 7:
        tags += ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
        system = "'[SYSTEM_PROMPT]' + text_of(messages[0]) + '[/SYSTEM_PROMPT]'"
        begin += f"{{%- if first -%}}\n    {{{{- {system} -}}}}\n{{%- endif -%}}\n"
    else:
        here = "loop.index0 == 1" if version == 1 else "loop.index0 + 2 >= loop.length"
    words = {
        "TITLE": f"Mistral instruct, version {version}.",
        "BEGIN": begin,
        "TAGS": str(tags),
        "MODEL": "Mistral",
        "MERGES": here,
        "MERGED": "text_of(messages[0]) + '\\n\\n' + content",
        # In version 1 the borders are text.
        "QUESTION": f"'[INST]{' ' * (version == 1)}' + content + '{' ' * (version == 1)}[/INST]'",
        "ANSWER": "' ' + content + eos_token" if version == 1 else "content.rstrip(' ') + eos_token",
    }
    return _filled(words, _TURNS)


def llama_3() -> str:
    """The chat template of Llama 3, which strips each message's content, its parts joined, as Meta's code does."""
    borders = {
        "START": "<|start_header_id|>",
        "END": "<|end_header_id|>",
        "EOM": "<|eom_id|>",
        "EOT": "<|eot_id|>",
    }
    return _filled({"TITLE": "Llama 3 chat.", **borders, "TRIM": "| trim ", "IMAGE": ""})


def llama_4(*, images: bool, calls: bool = True) -> str:
    """The chat template of Llama 4: tool calls and tool results end with `<|eom|>`, other messages with `<|eot|>`.

    With `images` messages may have parts `{"type": "image"}`; `Llama4Processor` writes their tokens. Without `calls`
    those of tools are refused.
    """
    borders = {"START": "<|header_start|>", "END": "<|header_end|>", "EOM": "<|eom|>", "EOT": "<|eot|>"}
    words = {"TITLE": "Llama 4 chat.", **borders, "TRIM": "", "IMAGE": _IMAGE if images else ""}
    return ("" if calls else _NO_CALLS) + _filled(words)


def _filled(words: Mapping[str, str], template: str = _HEADERS) -> str:
    for word, value in words.items():
        template = template.replace(word, value)
    return template
