"""Tokens for pictures are added to tokenizers, and the processor of a multimodal model writes them."""

import json

import pytest
from support.models import dense_config, multimodal_config
from support.tokenizer_files import rank_table, sentencepiece_model, write_files
from transformers import AutoTokenizer

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import tokenizers as conversion
from llamoe.conversion.tokenizers.processors import IMAGE_TOKENS, processor_files

spm = pytest.importorskip("sentencepiece", reason="SentencePiece models need the extra 'tokenizers'")
pytest.importorskip("google.protobuf", reason="SentencePiece models need the extra 'tokenizers'")

TEXTS = ["", "hello", "  hello world ", "\n\nx", "a  b", "世界 é", "12 345", "<0x0A>", "[INST] hi [/INST]"]
RANKS = 256


@pytest.fixture(scope="module")
def model():
    lines = [
        "hello world and more of it",
        "a picture of the world x y z",
        "12 345 [INST] question [/INST] answer",
    ] * 40
    return sentencepiece_model(lines, 331, hard_vocab_limit=False)


@pytest.fixture(scope="module")
def size(model):
    return spm.SentencePieceProcessor(model_proto=model).vocab_size()


def dense(vocabulary, context=2048):
    return dense_config(vocab_size=vocabulary, max_position_embeddings=context, pad_token_id=None)


def multimodal(vocabulary, ids, **vision):
    config = multimodal_config(vision, vocab_size=vocabulary)
    config.image_token_index = ids["<|patch|>"]
    config.boi_token_index, config.eoi_token_index = ids["<|image_start|>"], ids["<|image_end|>"]
    return config


def llama_4():
    """Return Meta's table of ranks with nothing but single bytes, and a configuration for it."""
    ids = {"<|image_start|>": RANKS + 80, "<|image_end|>": RANKS + 81, "<|patch|>": RANKS + 92}
    return rank_table(), multimodal(RANKS + 2048, ids)


def extended(files, tokens=conversion.MULTIMODAL_TOKENS):
    return conversion.extend_tokenizer(files, tokens)


# More tokens


@pytest.mark.parametrize("context", [2048, 4096])
def test_old_texts_keep_their_ids(context, model, size, tmp_path):
    config = dense(size, context)
    before = conversion.hf_files_from_meta(model, config)
    files, ids = extended(before)
    assert list(ids) == list(conversion.MULTIMODAL_TOKENS)
    assert list(ids.values()) == list(range(size, size + len(ids)))
    old = AutoTokenizer.from_pretrained(write_files(tmp_path / "old", before, config))
    new = AutoTokenizer.from_pretrained(write_files(tmp_path / "new", files, dense(size + len(ids), context)))
    for text in TEXTS:
        assert new(text)["input_ids"] == old(text)["input_ids"]
        assert new.decode(new(text)["input_ids"]) == old.decode(old(text)["input_ids"])
    for token, index in ids.items():
        assert new.convert_tokens_to_ids(token) == index
        assert new(f"x{token}y")["input_ids"].count(index) == 1
        assert new.decode([index], skip_special_tokens=True) == ""
    assert len(new) == size + len(ids)
    assert before == conversion.hf_files_from_meta(model, config), "what was given is not changed"
    again, same = extended(files)
    assert (again, same) == (files, ids)


def test_a_tokenizer_of_transformers_own_class_is_extended(model, size, tmp_path):
    """`LlamaTokenizer` ignores steps of tokenizer.json when it loads, so its folders keep its class."""
    from transformers import LlamaTokenizer

    source = write_files(tmp_path / "source", {"tokenizer.model": model})
    old = LlamaTokenizer.from_pretrained(source, add_bos_token=True)
    old.save_pretrained(tmp_path / "saved")
    old = AutoTokenizer.from_pretrained(tmp_path / "saved")
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    files, ids = extended(files, ["<|image|>", "<|patch|>"])
    new = AutoTokenizer.from_pretrained(write_files(tmp_path / "new", files))
    assert type(new) is type(old) is LlamaTokenizer
    assert ids == {"<|image|>": size, "<|patch|>": size + 1}
    for text in TEXTS:
        assert new(text)["input_ids"] == old(text)["input_ids"]
    assert new("x<|patch|>")["input_ids"][-1] == size + 1


def test_tokens_that_exist_keep_their_ids():
    table, config = llama_4()
    before = conversion.hf_files_from_meta(table, config)
    files, ids = extended(before)
    assert ids["<|image_start|>"] == RANKS + 80 and ids["<|eot|>"] == RANKS + 8
    assert json.loads(files["tokenizer.json"]) == json.loads(before["tokenizer.json"])
    files, ids = extended(before, ["<new>", "<|patch|>", "<new>"])
    assert ids == {"<new>": RANKS + 2048, "<|patch|>": RANKS + 92}
    # The embedding has a row for a token that tokenizer.model lacks.
    with pytest.raises(CheckpointError, match="vocab_size is 2305"):
        conversion.meta_tokenizer_file(files, dense(RANKS + 2049))


def test_a_bare_sentencepiece_model_is_enough(model, size):
    files, ids = extended({"tokenizer.model": model}, ["<a>"])
    assert ids == {"<a>": size} and {"tokenizer.json", "tokenizer_config.json"} <= files.keys()
    with pytest.raises(CheckpointError, match="there is none, nor a tokenizer"):
        extended({"tokenizer_config.json": b"{}"}, ["<a>"])
    for content in (b"{", b"[]"):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*cannot"):
            extended({"tokenizer.json": content}, ["<a>"])


def test_a_padding_token_beyond_the_embedding_is_no_row_of_metas(model, size):
    files, _ = extended(conversion.hf_files_from_meta(model, dense(size)), ["<a>"])
    assert conversion.meta_tokenizer_file(files, dense(size)) == {"tokenizer.model": model}


# The processor


def test_a_processor_that_does_not_fit_is_refused(model, size):
    plain = conversion.hf_files_from_meta(model, dense(size))
    files, ids = extended(plain)
    config = multimodal(size + len(ids), ids)
    assert processor_files(config, files)
    with pytest.raises(CheckpointError, match="has no <.image_start.>.*of this model"):
        processor_files(config, plain)
    for field, token in {"image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>"}.items():
        shifted = multimodal(size + len(ids), ids | {token: 3})
        with pytest.raises(CheckpointError, match=rf"the id {ids[token]}, and LlamoeConfig.{field} is 3"):
            processor_files(shifted, tokenizer_files=files)
    with pytest.raises(ValueError, match="use_adapter"):
        processor_files(multimodal(size + len(ids), ids, use_adapter=False), files)
    table, config = llama_4()
    config.image_token_index = 7
    with pytest.raises(CheckpointError, match=f"id {RANKS + 92}"):
        conversion.hf_files_from_meta(table, config)
    assert set(IMAGE_TOKENS) < set(conversion.MULTIMODAL_TOKENS)
