"""Tokenizers that get tokens for pictures, and the processor in front of a multimodal model."""

import json

import pytest
import torch
from support.tokenizer_files import rank_table, sentencepiece_model, write_files
from transformers import AutoTokenizer

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import tokenizers as conversion
from llamoe.conversion.tokenizers.chat_templates import llama_4 as chat_template
from llamoe.conversion.tokenizers.processors import IMAGE_TOKENS, processor_files

spm = pytest.importorskip("sentencepiece", reason="SentencePiece models need the extra 'tokenizers'")
pytest.importorskip("google.protobuf", reason="SentencePiece models need the extra 'tokenizers'")

TEXTS = ["", "hello", "  hello world ", "\n\nx", "a  b", "世界 é", "12 345", "<0x0A>", "[INST] hi [/INST]"]
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
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
    return llamoe.LlamoeDenseConfig(
        vocab_size=vocabulary, hidden_size=48, intermediate_size=99, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=context,
    )  # fmt: skip


def multimodal(vocabulary, ids, image=112, patch=14, ratio=0.5, **changes):
    text = dict(
        vocab_size=vocabulary, hidden_size=48, intermediate_size=40, intermediate_size_mlp=77, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, num_local_experts=3, pad_token_id=0,
    )  # fmt: skip
    vision = dict(
        image_size=image, patch_size=patch, pixel_shuffle_ratio=ratio, hidden_size=32, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=64, vision_output_dim=24, projector_input_dim=24,
        projector_output_dim=24,
    )  # fmt: skip
    tokens = {
        "boi_token_index": ids["<|image_start|>"],
        "eoi_token_index": ids["<|image_end|>"],
        "image_token_index": ids["<|patch|>"],
    }
    return llamoe.LlamoeConfig(text_config=text, vision_config={**vision, **changes}, **tokens)


def llama_4(**options):
    """Meta's file with bytes alone as ranks, and a configuration for it."""
    ids = {"<|image_start|>": RANKS + 80, "<|image_end|>": RANKS + 81, "<|patch|>": RANKS + 92}
    return rank_table(), multimodal(RANKS + 2048, ids, **options)


def extended(files, tokens=conversion.MULTIMODAL_TOKENS):
    return conversion.extend_tokenizer(files, tokens)


def assembled(model, size, **options):
    """A LLaMA 1 tokenizer's files with what a model needs that reads pictures."""
    files, ids = extended(conversion.hf_files_from_meta(model, dense(size)))
    config = multimodal(size + len(ids), ids, **options)
    files |= processor_files(config, files, image_mean=CLIP_MEAN, image_std=CLIP_STD, resample=3)
    return files | {"chat_template.jinja": chat_template(images=True).encode()}, ids, config


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
    """`LlamaTokenizer` makes its own steps at load; its folders stay its own."""
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
    # A row of the embedding whose token tokenizer.model does not have.
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


def test_a_model_answers_about_a_picture(model, size, tmp_path):
    """From the files to tokens of an answer, in this process, with what the tower really gives."""
    Image = pytest.importorskip("PIL.Image", reason="pictures need the extra 'vision'")
    pytest.importorskip("torchvision", reason="pictures need the extra 'vision'")
    from transformers import AutoProcessor

    files, ids, config = assembled(model, size, image=48, patch=8)
    torch.manual_seed(0)
    network = llamoe.LlamoeForConditionalGeneration(config).eval()
    processor = AutoProcessor.from_pretrained(write_files(tmp_path / "folder", files, config))
    picture = {"type": "image", "image": Image.new("RGB", (100, 40), (9, 99, 199))}
    chat = [{"role": "user", "content": [picture, {"type": "text", "text": "hello"}]}]
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    features = network.get_image_features(inputs["pixel_values"].float())
    features = features if isinstance(features, torch.Tensor) else features.pooler_output
    assert features.reshape(-1, 48).shape[0] == (inputs["input_ids"] == ids["<|patch|>"]).sum()
    answer = network.generate(**inputs.to(dtype=torch.float32), max_new_tokens=2, do_sample=False)
    assert answer.shape[1] == inputs["input_ids"].shape[1] + 2


def test_a_processor_that_does_not_fit_is_refused(model, size):
    files, ids, config = assembled(model, size)
    plain = conversion.hf_files_from_meta(model, dense(size))
    with pytest.raises(CheckpointError, match="has no <.image_start.>.*extend_tokenizer"):
        processor_files(config, tokenizer_files=plain)
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
