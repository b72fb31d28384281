"""Converted tokenizers of Llama 3 and 4 give tiktoken's ids, by AutoTokenizer."""

import json
import random
from itertools import product

import pytest
from support.models import dense_config, text_config
from support.texts import NASTY
from support.tokenizer_files import rank_table, write_files
from transformers import AutoTokenizer, GenerationConfig

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import tokenizers as conversion
from llamoe.conversion.tokenizers.chat_templates import llama_4

tiktoken = pytest.importorskip("tiktoken", reason="tables of ranks need the extra 'tokenizers'")

# Copied from Meta's llama-models, independently of the library.
PATTERNS = {
    "llama-3": "|".join(
        [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
    "llama-4": "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
}
COUNT = {"llama-3": 256, "llama-4": 2048}
# Offsets behind the ranks: 200000 + offset is the id in the published Llama 4, 128000 + offset in Llama 3.
OFFSETS = {
    "llama-3": {
        "<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|finetune_right_pad_id|>": 4, "<|start_header_id|>": 6,
        "<|end_header_id|>": 7, "<|eom_id|>": 8, "<|eot_id|>": 9, "<|python_tag|>": 10,
        "<|reserved_special_token_2|>": 12, "<|reserved_special_token_245|>": 255,
    },
    "llama-4": {
        "<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|fim_prefix|>": 2, "<|fim_suffix|>": 4, "<|header_start|>": 5,
        "<|header_end|>": 6, "<|eom|>": 7, "<|eot|>": 8, "<|step|>": 9,
        "<|text_post_train_reserved_special_token_0|>": 10, "<|text_post_train_reserved_special_token_5|>": 15,
        "<|python_start|>": 16, "<|python_end|>": 17, "<|finetune_right_pad|>": 18,
        "<|text_post_train_reserved_special_token_8|>": 19, "<|text_post_train_reserved_special_token_68|>": 79,
        "<|image_start|>": 80, "<|image_end|>": 81, "<|vision_reserved_special_token_0|>": 82,
        "<|vision_reserved_special_token_1|>": 83, "<|tile_x_separator|>": 84, "<|tile_y_separator|>": 85,
        "<|vision_reserved_special_token_2|>": 86, "<|vision_reserved_special_token_5|>": 89, "<|image|>": 90,
        "<|vision_reserved_special_token_6|>": 91, "<|patch|>": 92, "<|vision_reserved_special_token_7|>": 93,
        "<|vision_reserved_special_token_1047|>": 1133, "<|reasoning_reserved_special_token_0|>": 1134,
        "<|reasoning_reserved_special_token_7|>": 1141, "<|reasoning_thinking_start|>": 1142,
        "<|reasoning_thinking_end|>": 1143, "<|reserved_special_token_0|>": 1144,
        "<|reserved_special_token_903|>": 2047,
    },
}  # fmt: skip
# The single bytes in a random order, then tokens that join two earlier ones.
WORDS = (
    "he", "ll", "hell", "hello", " hello", "wo", "or", "wor", "ld", "world", "He", "LL", "12", "123", "aa", "aaaa",
    "'m", "..", "...", "é", "  ", "    ", "\n\n", "  \n",
)  # fmt: skip
TOKENS = random.Random(0).sample([bytes([byte]) for byte in range(256)], 256)
TOKENS += [*(word.encode() for word in WORDS), b"\xe4\xb8", "世".encode()]
TABLE = rank_table(TOKENS)
RANKS = len(TOKENS)


def encoding_of(family):
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    return tiktoken.Encoding("test", pat_str=PATTERNS[family], mergeable_ranks=ranks, special_tokens={})


def config_of(family, vocabulary=None):
    fields = {"vocab_size": vocabulary or RANKS + COUNT[family], "pad_token_id": None}
    if family == "llama-3":
        return dense_config(max_position_embeddings=8192, **fields)
    return text_config(**fields)


@pytest.fixture(scope="module", params=list(COUNT))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def loaded(family, tmp_path_factory):
    config = config_of(family)
    files = conversion.hf_files_from_meta(TABLE, config)
    return AutoTokenizer.from_pretrained(write_files(tmp_path_factory.mktemp(family), files, config, "stock"))


# Ids


def test_loaded_ids_equal_tiktoken(family, loaded):
    reference = encoding_of(family)
    for text in NASTY:
        expected = reference.encode(text, disallowed_special=())
        assert loaded(text)["input_ids"] == [RANKS, *expected], text
        assert loaded(text, add_special_tokens=False)["input_ids"] == expected
        assert loaded.decode(expected) == reference.decode(expected) == text
    assert len({token for text in NASTY for token in reference.encode(text) if token >= 256}) > 15
    assert len(loaded) == RANKS + COUNT[family]


def test_special_tokens_have_metas_names_and_ids(family, loaded):
    for token, offset in OFFSETS[family].items():
        assert loaded.convert_tokens_to_ids(token) == RANKS + offset, token
        assert loaded.convert_ids_to_tokens(RANKS + offset) == token
        assert loaded(f"x{token}y", add_special_tokens=False)["input_ids"].count(RANKS + offset) == 1
    added = loaded.added_tokens_decoder
    assert sorted(added) == list(range(RANKS, RANKS + COUNT[family]))
    assert all(token.special for token in added.values())
    pad = 4 if family == "llama-3" else 18
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (RANKS, RANKS + 1, RANKS + pad)
    spelled = loaded("<|end_of_text|>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert spelled == encoding_of(family).encode("<|end_of_text|>", disallowed_special=())


def test_generation_stops_where_metas_does(family, tmp_path):
    ends = [RANKS + 1, RANKS + 8, RANKS + 9] if family == "llama-3" else [RANKS + 1, RANKS + 7, RANKS + 8]
    for instruct, expected in [(None, ends), (True, ends), (False, RANKS + 1)]:
        files = conversion.hf_files_from_meta(TABLE, config_of(family), instruct=instruct)
        settings = GenerationConfig.from_pretrained(write_files(tmp_path / str(instruct), files))
        assert settings.eos_token_id == expected and settings.bos_token_id == RANKS
        assert settings.pad_token_id == RANKS + (4 if family == "llama-3" else 18)
        assert bool(settings.do_sample) is (instruct is True)


# Chat


def meta_chat(family, dialog, prompt=True):
    """Return a chat's ids as Meta's code encodes them, part by part, and a mask with 1 for tokens of answers."""
    encode = encoding_of(family).encode
    named = {token: RANKS + offset for token, offset in OFFSETS[family].items()}
    names = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
    if family == "llama-4":
        names = ("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>")
    start, end, eom, eot = (named[name] for name in names)

    def header(role):
        return [start, *encode("ipython" if role == "tool" else role), end, *encode("\n\n")]

    ids, marks = [RANKS], [0]
    for message in dialog:
        content = message.get("content", "")
        calls = message.get("tool_calls", [])
        ids += header(message["role"])
        marks += [0] * (len(ids) - len(marks))
        ids += encode(content.strip() if family == "llama-3" else content, disallowed_special=())
        for call in calls:
            call = call["function"]
            text = json.dumps({"type": "function", "name": call["name"], "parameters": call["arguments"]})
            ids += encode(text, disallowed_special=())
        ids.append(eom if calls or message["role"] == "tool" else eot)
        marks += [int(message["role"] == "assistant")] * (len(ids) - len(marks))
    asked = header("assistant") * prompt
    return ids + asked, marks + [0] * len(asked)


ARGUMENTS = {"city": "Köln", "days": [1, 2], "x": None}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
DIALOGS = {
    "not stripped": [{"role": "user", "content": "  hello \n"}, {"role": "assistant", "content": " ok  "}],
    "system": [{"role": "system", "content": "Be kind. "}, {"role": "user", "content": "a\n\nb"}],
    "many": [{"role": role, "content": role + " 世界 12345"} for role in ["user", "assistant"] * 3],
    "starts with assistant": [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "there"}],
    "tool": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": true, "ä": 1}'},
        {"role": "assistant", "content": "It rains."},
    ],
    "call without content": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}],
}


def in_parts(message):
    """Return the same message with its text in two parts."""
    texts = message.get("content", "")[:2], message.get("content", "")[2:]
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


@pytest.mark.parametrize("name", DIALOGS)
def test_chat_equals_metas_and_marks_what_the_model_writes(name, family, loaded):
    templates = [None, llama_4(images=True)] if family == "llama-4" else [None]
    for template, prompt in product(templates, (True, False)):
        options = dict(
            tokenize=True, return_dict=True, return_assistant_tokens_mask=True, chat_template=template
        )
        for dialog in (DIALOGS[name], [*map(in_parts, DIALOGS[name])]):
            encoded = loaded.apply_chat_template(dialog, add_generation_prompt=prompt, **options)
            assert (encoded["input_ids"], encoded["assistant_masks"]) == meta_chat(
                family, DIALOGS[name], prompt
            )


def test_chat_takes_arguments_as_text_and_results_as_objects(family, loaded):
    as_text = {"function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
    results = [{"role": "tool", "content": content} for content in ({"rain": True}, '{"rain": true}')]
    dialog = [{"role": "assistant", "content": "", "tool_calls": [as_text]}, results[0]]
    expected = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, results[1]]
    ids = loaded.apply_chat_template(dialog, tokenize=True, return_dict=True)["input_ids"]
    assert ids == meta_chat(family, expected, prompt=False)[0]


def test_chat_refuses_what_it_cannot_say(loaded):
    question = {"role": "user", "content": "hello"}
    for dialog, named, more in (
        ([{"role": "user", "content": [{"type": "image"}]}], "type image", {}),
        ([question, {"role": "robot", "content": "x"}], "message 2 has the role robot", {}),
        ([question], "of tools", {"tools": [{"type": "function", "function": {}}]}),
    ):
        with pytest.raises(Exception, match=named):
            loaded.apply_chat_template(dialog, tokenize=False, **more)


# Wrong files


def replaced(number, line):
    lines = TABLE.splitlines()
    lines[number - 1] = line
    return b"\n".join(lines) + b"\n"


BROKEN = "a/tokenizer.model: (is no table|.*one token for each rank)"
# A file, the configuration's vocabulary (None: the table's), and words of the error.
REFUSED = {
    "no base64": (replaced(5, b"!!! 4"), None, BROKEN),
    "no rank": (replaced(7, b"QQ=="), None, BROKEN),
    "no number": (TABLE + b"\xff\xfe\n", None, BROKEN),
    "a rank below 0": (replaced(9, b"QQ== -1"), None, BROKEN),
    "a rank twice": (replaced(270, TABLE.splitlines()[269].split()[0] + b" 3"), None, BROKEN),
    "a token twice": (replaced(270, TABLE.splitlines()[9].split()[0] + b" 269"), None, BROKEN),
    "a lost line": (b"\n".join(TABLE.splitlines()[:99] + TABLE.splitlines()[100:]), None, BROKEN),
    "a byte without a rank": (rank_table(TOKENS[10:]), None, BROKEN),
    **{
        f"cut to {length}": (TABLE[:length], None, "a/tokenizer.model") for length in (3, 700, len(TABLE) - 5)
    },
    "another model's": (TABLE, 999, rf"{RANKS + 256} .* or {RANKS + 2048} .*vocab_size is 999"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_table_or_another_models_is_refused(name, family):
    content, vocabulary, words = REFUSED[name]
    with pytest.raises(CheckpointError, match=words):
        conversion.hf_files_from_meta(content, config_of(family, vocabulary), origin="a/tokenizer.model")


def test_the_number_of_tokens_decides_between_llama_3_and_4(family):
    tokenizer = conversion.check_tokenizer(TABLE, config_of(family))
    assert (tokenizer.family, tokenizer.size) == (family, RANKS + COUNT[family])
