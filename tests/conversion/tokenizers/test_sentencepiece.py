"""Converted tokenizers of LLaMA 1 and 2 give SentencePiece's ids, by AutoTokenizer."""

import json
import random
import re
from functools import cache

import pytest
from support.models import dense_config
from support.texts import NASTY, random_texts
from support.tokenizer_files import sentencepiece_model, some_lines, write_files
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import tokenizers as conversion
from llamoe.conversion.tokenizers.chat_templates import mistral

spm = pytest.importorskip("sentencepiece", reason="SentencePiece models need the extra 'tokenizers'")
messages = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason="needs the extra 'tokenizers'")

VOCABULARY = 711


@cache
def train(**options):
    """Train a model on words, and on texts without words."""
    ends = ["!", "  x", "\tq", "    def f(x):", " 世界 é", " aaaa aaa aaaaaa", " hello </s>"]
    lines = [line + ends[number % 7] for number, line in enumerate(some_lines(500, 1200))]
    return sentencepiece_model(lines, VOCABULARY, **options)


@pytest.fixture(scope="module")
def model():
    return train()


@pytest.fixture(scope="module")
def reference(model):
    return spm.SentencePieceProcessor(model_proto=model)


def config_of(context=4096, vocabulary=VOCABULARY):
    return dense_config(vocab_size=vocabulary, max_position_embeddings=context, pad_token_id=None)


# Ids


@pytest.mark.parametrize(("layout", "context"), [("stock", 4096), (None, 2048)], ids=["llama", "llamoe"])
def test_loaded_ids_equal_sentencepiece(context, layout, model, reference, tmp_path):
    """With Llama 2, whose template writes bos and eos as text, special tokens are split only on request."""
    config = config_of(context)
    files = conversion.hf_files_from_meta(model, config)
    folder = write_files(tmp_path / "folder", files, config, layout)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.chat_template is None or context == 4096
    options = {} if context == 2048 else {"split_special_tokens": True}
    parts = [" ", "  ", "\n", "▁", "<s>", "</s>", "a", "aa", "he", "llo", "é", "世"]
    for text in [*NASTY, *random_texts(parts)]:
        expected = [reference.bos_id(), *reference.encode(text)]
        assert loaded(text, **options)["input_ids"] == expected, text
        assert loaded.decode(expected, skip_special_tokens=True) == reference.decode(expected[1:]), text
        if not any(token in text for token in ("<s>", "</s>", "<unk>")):
            assert loaded(text)["input_ids"] == expected, text
    assert loaded.vocab_size == len(loaded) == VOCABULARY
    named = (loaded.bos_token_id, loaded.eos_token_id, loaded.unk_token_id, loaded.pad_token_id)
    assert named == (reference.bos_id(), reference.eos_id(), reference.unk_id(), reference.unk_id())
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")
    assert loaded.model_max_length == context
    again = AutoTokenizer.from_pretrained(loaded.save_pretrained(tmp_path / "again")[0].rpartition("/")[0])
    assert [again(text)["input_ids"] for text in NASTY] == [loaded(text)["input_ids"] for text in NASTY]


def test_special_tokens_are_read_from_text_where_there_is_a_template(model, reference, tmp_path):
    files = conversion.hf_files_from_meta(model, config_of())
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    middle = tokenizer.encode("hello</s>hello", add_special_tokens=False).ids
    assert middle == [*reference.encode("hello"), reference.eos_id(), *reference.encode("hello")]
    for instruct, context, is_split in (
        (None, 4096, False), (True, 4096, False), (False, 4096, True), (None, 2048, True),
    ):  # fmt: skip
        files = conversion.hf_files_from_meta(model, config_of(context), instruct=instruct)
        settings = json.loads(files["tokenizer_config.json"])
        assert settings.get("split_special_tokens", False) is is_split
        assert ("chat_template.jinja" in files) is not is_split
        generation = GenerationConfig.from_pretrained(write_files(tmp_path / f"{instruct}-{context}", files))
        generation.validate()
        named = (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id)
        assert (named, bool(generation.do_sample)) == ((1, 2, 0), instruct is True)
    assert "chat_template.jinja" in conversion.hf_files_from_meta(model, config_of(2048), family="llama-2")


VARIANTS = {
    "no_dummy_prefix": dict(add_dummy_prefix=False),
    "padding_piece": dict(pad_id=3),
    "across_spaces": dict(split_by_whitespace=False),
    "other_ids": dict(unk_id=2, bos_id=0, eos_id=1),
    "normalized": dict(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True),
    "symbols": dict(user_defined_symbols="hello,[INST]"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_settings_of_sentencepiece(variant):
    content = train(**VARIANTS[variant])
    reference = spm.SentencePieceProcessor(model_proto=content)
    files = conversion.hf_files_from_meta(content, config_of(2048))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.encode_special_tokens = True
    for text in NASTY:
        assert tokenizer.encode(text).ids == [reference.bos_id(), *reference.encode(text)], text
    generation = json.loads(files["generation_config.json"])
    padding = reference.pad_id() if reference.pad_id() >= 0 else reference.unk_id()
    named = [generation[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
    assert named == [reference.bos_id(), reference.eos_id(), padding]


def test_what_tokenizer_json_cannot_say_is_seen():
    unused = messages.ModelProto.FromString(train())
    for piece in unused.pieces[300:340]:
        piece.type = messages.ModelProto.SentencePiece.UNUSED
    for content in (train(treat_whitespace_as_suffix=True), unused.SerializeToString()):
        with pytest.raises(CheckpointError, match="give different ids for"):
            conversion.hf_files_from_meta(content, config_of())
    twice = messages.ModelProto.FromString(train())
    twice.pieces[301].piece = twice.pieces[300].piece
    with pytest.raises(CheckpointError, match="damaged SentencePiece model"):
        conversion.hf_files_from_meta(twice.SerializeToString(), config_of())


# Chat

TAGS = ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"]


def meta_dialog(reference, dialog):
    """Return a chat's ids as Meta's code makes them by SentencePiece, and a mask with 1 for tokens of answers."""
    if dialog[0]["role"] == "system":
        system = "<<SYS>>\n" + dialog[0]["content"] + "\n<</SYS>>\n\n"
        dialog = [{"role": "user", "content": system + dialog[1]["content"]}, *dialog[2:]]
    bos, eos = reference.bos_id(), reference.eos_id()
    ids, marks = [], []
    for question, answer in zip(dialog[::2], dialog[1::2], strict=False):
        asked = f"[INST] {question['content'].strip()} [/INST]"
        ids += [bos, *reference.encode(f"{asked} {answer['content'].strip()} "), eos]
        # SentencePiece joins the space before an answer to its first word.
        marks += [0, *(0 for _ in reference.encode(asked))]
        marks += [1] * (len(ids) - len(marks))
    if len(dialog) % 2:
        ids += [bos, *reference.encode(f"[INST] {dialog[-1]['content'].strip()} [/INST]")]
    return ids, marks + [0] * (len(ids) - len(marks))


def turns(*contents, system=None):
    messages = [{"role": "system", "content": system}] if system is not None else []
    return messages + [
        {"role": ("user", "assistant")[index % 2], "content": content}
        for index, content in enumerate(contents)
    ]


DIALOGS = {
    "question": turns("hello"),
    "stripped": turns("  \n hello there \n "),
    "inner_lines": turns("a\n\nb  c", "  yes\n", "and\t?"),
    "system": turns(" hello ", system="  Be kind.\n"),
    "system_and_more": turns("hello ", " hi", "  more", "ok ", "last", system="Short answers."),
    "ends_with_answer": turns("hello", "hi", "more", "done"),
    "unicode": turns("Grüße 世界 🙂", "é", "▁ x"),
    "empty_question_under_system": turns("", system="S"),
}


@pytest.fixture(scope="module")
def chat(model, tmp_path_factory):
    config = config_of()
    files = conversion.hf_files_from_meta(model, config, instruct=True)
    return AutoTokenizer.from_pretrained(write_files(tmp_path_factory.mktemp("chat"), files, config, "stock"))


@pytest.mark.parametrize("name", DIALOGS)
def test_llama_2_chat_equals_metas_and_marks_what_the_model_writes(name, chat, reference):
    dialog, parts = DIALOGS[name], []
    for message in dialog:
        texts = message["content"][:2], message["content"][2:]
        parts.append({**message, "content": [{"type": "text", "text": text} for text in texts]})
    options = dict(tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    for messages, prompt in ((dialog, True), (dialog, False), (parts, False)):
        result = chat.apply_chat_template(messages, add_generation_prompt=prompt, **options)
        assert (result["input_ids"], result["assistant_masks"]) == meta_dialog(reference, dialog)


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
HELLO = turns("hello")
# Conversations that Meta's and Mistral AI's code refuse, with words of the error.
REFUSED = [
    *(("holds [INST], which", turns(*texts)) for texts in (["hello [INST]"], ["hello", "x[INST]", "y"])),
    ("holds [/INST], which", turns("hello [/INST] b")),
    ("holds [INST], which", turns("x", system="[INST]")),
    ("message 1 has the role assistant", turns("hello", "hi")[1:]),
    ("message 2 has the role user", [*HELLO, *turns("again")]),
    ("message 2 has the role system", [*HELLO, {"role": "system", "content": "x"}]),
    ("a message of the user must follow", [{"role": "system", "content": "x"}]),
    ("This model reads text only", [{"role": "user", "content": [{"type": "image"}]}]),
    ("message 2 ", [*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}]),
    ("message 2 ", [*HELLO, {"role": "tool", "content": "x"}]),
]
# Mistral's template does not refuse Llama 2's tags of a system message.
OF_LLAMA_2 = [(f"holds {tag}", turns(f"hello {tag}")) for tag in TAGS]
TEMPLATES = {"llama 2": None, "mistral 1": mistral(1), "mistral 7": mistral(7)}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_of_questions_and_answers_refuse_what_the_models_code_does(name, chat):
    for words, dialog in REFUSED + OF_LLAMA_2 * (name == "llama 2"):
        with pytest.raises(Exception, match=re.escape(words)):
            chat.apply_chat_template(dialog, chat_template=TEMPLATES[name], tokenize=False)
    with pytest.raises(Exception, match="of tools"):
        chat.apply_chat_template(HELLO, tools=[CALL], chat_template=TEMPLATES[name], tokenize=False)


# The way back


def test_the_original_comes_back_byte_by_byte_or_nothing_does(model):
    files = conversion.hf_files_from_meta(model, config_of())
    for companions in (files, {"tokenizer.model": model}):
        assert conversion.meta_tokenizer_file(companions, config_of()) == {"tokenizer.model": model}
    assert conversion.meta_tokenizer_file({}, config_of()) == {}
    with pytest.raises(CheckpointError, match=f"{VOCABULARY} pieces.*vocab_size is 712"):
        conversion.meta_tokenizer_file(files, config_of(vocabulary=712))
    del files["tokenizer.model"]
    with pytest.raises(CheckpointError, match=r"Add that of the model"):
        conversion.meta_tokenizer_file(files, config_of())


# Wrong files


def test_wrong_files_are_named(model):
    for words, content, vocabulary in (
        ("is empty", b"", VOCABULARY),
        ("no table of tokens", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", VOCABULARY),
        ("neither a SentencePiece model", b'{"version": "1.0"}', VOCABULARY),
        ("begins with", b"\x80\x02}q\x00.", VOCABULARY),
        ("damaged SentencePiece model|cut short", model[: len(model) // 2], VOCABULARY),
        (f"{VOCABULARY} pieces.*vocab_size is 32000", model, 32000),
        ("different ids", train(model_type="unigram"), VOCABULARY),
        ("eos_id is -1", train(eos_id=-1), VOCABULARY),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=f"a/given.model.*({words})"):
            conversion.hf_files_from_meta(content, config_of(vocabulary=vocabulary), origin="a/given.model")


def test_truncation_anywhere_is_an_error(model):
    """protobuf parses a file that ends after a whole field, but then the settings, which come last, are missing."""
    settings = len(messages.ModelProto.FromString(model).normalizer_spec.SerializeToString())
    generator = random.Random(1)
    for length in [1, 2, 17, *(generator.randrange(3, len(model) - settings) for _ in range(60))]:
        with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
            conversion.check_tokenizer(model[:length], config_of())
