"""The tokenizer in a GGUF file gives the ids of the tokenizer that the file was made from."""

import json

import pytest
from support.gguf_files import write_gguf
from support.texts import NASTY, random_texts
from support.tokenizer_files import rank_table, sentencepiece_model, some_lines, write_files
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from llamoe.conversion import convert, open_checkpoint
from llamoe.conversion.tokenizers import hf_files_from_meta

SIZE = 400
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PARTS = [
    " ",
    "  ",
    "a",
    "th",
    "he",
    "é",
    "世",
    "12",
    "\n",
    "'m",
    "</s>",
    "<|eot_id|>",
    "...",
    "\u00a0",
    "🙂",
    "He",
]


def of_pieces(content):
    """Return a function that writes a SentencePiece model into a file, as llama.cpp's converter does."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    numbers = range(model.vocab_size())
    checks = {2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
    kinds = [next((kind for kind, check in checks.items() if check(i)), 1) for i in numbers]

    def put(writer, size):
        # The embedding has this many rows without a token.
        spare = size - len(kinds)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([model.id_to_piece(i) for i in numbers] + [f"[PAD{i}]" for i in range(spare)])
        writer.add_token_scores([model.get_score(i) for i in numbers] + [-1000.0] * spare)
        writer.add_token_types(kinds + [5] * spare)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_chat_template(TEMPLATE)

    return put


@pytest.mark.parametrize("spare", [0, 7])
def test_pieces_give_the_ids_of_sentencepiece(spare, tmp_path):
    lines = some_lines(300, 700) + [" 世界 é", "    def f(x):", "aaaa aaa aaaaaa"] * 9
    content = sentencepiece_model(lines, SIZE)
    write_gguf(
        tmp_path / "model.gguf", "llama", config={"vocab_size": SIZE + spare}, vocabulary=of_pieces(content)
    )
    convert(tmp_path / "model.gguf", tmp_path / "folder")
    made = AutoTokenizer.from_pretrained(tmp_path / "folder")
    config = open_checkpoint(tmp_path / "model.gguf", companions=False).config
    config.vocab_size = SIZE
    expected = write_files(
        tmp_path / "expected", hf_files_from_meta(content, config, family="llama-2", instruct=True), config
    )
    expected = AutoTokenizer.from_pretrained(expected)
    for text in [*NASTY, *random_texts(PARTS, 200), *lines[:50]]:
        assert made(text).input_ids == expected(text).input_ids, text
        assert made.decode(made(text).input_ids) == expected.decode(expected(text).input_ids)
    assert made.chat_template == TEMPLATE
    assert GenerationConfig.from_pretrained(tmp_path / "folder").eos_token_id == [2]


def byte_pairs(family):
    """Return a small table of Meta's, and the size of its vocabulary with special tokens."""
    pytest.importorskip("tiktoken")
    words = [b"th", b"he", b" t", b"the", b" the", b"in", b"\xc3\xbc", b"  ", b"12", b"\n\n", b"'m", b"He"]
    table = rank_table([*(bytes([byte]) for byte in range(256)), *words])
    special = {"llama-3": 256, "llama-4": 2048}[family]
    return table, 256 + len(words) + special


@pytest.mark.parametrize(("family", "pre"), [("llama-3", "llama-bpe"), ("llama-4", "llama4")])
def test_byte_pairs_give_the_ids_of_the_table(family, pre, tmp_path):
    table, size = byte_pairs(family)
    kind = "llama" if family == "llama-3" else "llama4"
    config = {"vocab_size": size}
    plain = write_gguf(tmp_path / "plain.gguf", kind, config=config)
    model = open_checkpoint(plain.path).config
    files = hf_files_from_meta(table, model, family=family, instruct=True)
    content = json.loads(files["tokenizer.json"])
    vocabulary = content["model"]["vocab"] | {
        entry["content"]: entry["id"] for entry in content["added_tokens"]
    }
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)

    def put(writer, _):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        special = {entry["content"] for entry in content["added_tokens"]}
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        writer.add_token_merges(
            [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
        )
        writer.add_bos_token_id(vocabulary["<|begin_of_text|>"])
        writer.add_eos_token_id(vocabulary["<|end_of_text|>"])
        writer.add_chat_template(TEMPLATE)

    write_gguf(tmp_path / "model.gguf", kind, config=config, vocabulary=put)
    convert(tmp_path / "model.gguf", tmp_path / "folder")
    made = AutoTokenizer.from_pretrained(tmp_path / "folder")
    expected = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in [*NASTY, *random_texts(PARTS, 200), f"a{tokens[-1]}<|begin_of_text|>b"]:
        assert made(text).input_ids == expected.encode(text).ids, text
        assert made.decode(made(text).input_ids) == expected.decode(
            expected.encode(text).ids, skip_special_tokens=False
        )
    stop = "<|eot_id|>" if family == "llama-3" else "<|eot|>"
    ends = GenerationConfig.from_pretrained(tmp_path / "folder").eos_token_id
    assert ends[0] == vocabulary["<|end_of_text|>"] and vocabulary[stop] in ends


def test_an_unknown_kind_is_named_and_none_is_made(tmp_path):
    def put(writer, size):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([str(number) for number in range(size)])

    write_gguf(tmp_path / "model.gguf", "llama", vocabulary=put)
    report = convert(tmp_path / "model.gguf", tmp_path / "folder")
    assert "tokenizer.ggml.pre = 'qwen2'" in report.notes[-1]
    assert not (tmp_path / "folder" / "tokenizer.json").exists()


def test_another_number_of_tokens_is_named(tmp_path):
    content = sentencepiece_model(some_lines(300, 700), SIZE)

    def put(writer, size):
        of_pieces(content)(writer, size)
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"]
        tokens.value = tokens.value[:-1]

    write_gguf(tmp_path / "model.gguf", "llama", config={"vocab_size": SIZE}, vocabulary=put)
    with pytest.raises(ValueError, match=rf"model\.gguf: tokenizer\.ggml\.tokens has {SIZE - 1} tokens"):
        convert(tmp_path / "model.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
