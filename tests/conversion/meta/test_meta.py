"""Meta folders in and out, bit by bit, against files that `meta_folders` cuts by itself."""

import json
import re
from functools import partial

import pytest
import torch
from support.conversions import META_LLAMA_2
from support.meta_folders import (
    BY_NAME,
    CASES,
    DIM,
    add_ballast,
    assert_same,
    cut,
    hugging_face,
    load_files,
    make_folder,
    whole_model,
    write_folder,
)
from support.tokenizer_files import rank_table, sentencepiece_model
from transformers import AutoConfig, AutoTokenizer

from llamoe.conversion.convert import convert
from llamoe.conversion.io.name_table import Drop
from llamoe.conversion.meta.folder import open_meta, save_meta
from llamoe.conversion.meta.name_tables import llama4_table, llama_table
from llamoe.conversion.open import open_checkpoint
from llamoe.conversion.quantize import quantize

# Each case with two of the numbers of files that it can have; which two comes in turn.
EACH_COUNT = [
    pytest.param(case, n, id=f"{case.name}-{n}")
    for number, case in enumerate(CASES)
    for n in sorted({case.files[number % len(case.files)], case.files[-1]})
]


@pytest.mark.parametrize(("case", "count"), EACH_COUNT)
def test_files_are_joined_as_stock_lays_them_out_and_cut_again_bit_by_bit(case, count, tmp_path):
    full = make_folder(tmp_path / "meta", case, count)
    checkpoint = open_meta(tmp_path / "meta")
    assert checkpoint.kind == ("meta-llama4" if case.family == "llama4" else "meta-llama")
    expected = hugging_face(case, full)
    assert_same(checkpoint.tensors, expected)
    other = (case.files * 2)[case.files.index(count) + 1]  # from 1 to 2 to 4 to 1, and so on
    report = save_meta(checkpoint, tmp_path / "other", shards=other)
    assert report.files == [f"consolidated.{n:02d}.pth" for n in range(other)]
    # A file of Llama 3's is written with rows of the embedding, whatever a single file was taken for.
    for given, wanted in zip(load_files(tmp_path / "other"), cut(case, full, other), strict=True):
        assert_same(given, wanted)
    again = open_meta(tmp_path / "other")
    assert again.config == checkpoint.config
    assert_same(again.tensors, expected)


@pytest.mark.parametrize(("name", "count"), [("llama-4", 1), ("llama-4", 4), ("llama-4-dense", 2)])
def test_unfused_names_of_metas_modules_are_read(name, count, tmp_path):
    case = BY_NAME[name]
    full = make_folder(tmp_path / "meta", case, count, style="unfused")
    assert_same(open_meta(tmp_path / "meta").tensors, hugging_face(case, full))


def test_every_row_of_every_table_is_used_by_a_case(tmp_path):
    """And every tensor that is dropped says why."""
    names = {"llama": set(), "llama4": set()}
    configs = {}
    for case in CASES:
        full = make_folder(tmp_path / case.name, case)
        for style in ("release", "unfused"):
            names[case.family] |= set(add_ballast(case, cut(case, full, 1, style))[0])
        checkpoint = open_meta(tmp_path / case.name)
        configs[case.name] = checkpoint.config
        assert all(len(reason) > 10 for reason in checkpoint.dropped.values())
        ballast = set(add_ballast(case, [{}])[0])
        assert set(checkpoint.dropped) == ballast
    tables = {"llama": llama_table(0) + llama_table(1), "llama4": llama4_table(configs["llama-4"])}
    for family, table in tables.items():
        for row in table:
            for pattern in [row.pattern] if isinstance(row, Drop) else row.sources:
                regex = (
                    re.escape(pattern)
                    .replace(r"\{i\}", r"\d+")
                    .replace(r"\{j\}", r"\d+")
                    .replace(r"\*", ".*")
                )
                assert any(re.fullmatch(regex, name) for name in names[family]), pattern


def test_a_single_file_may_be_called_consolidated_pth_and_params_nested(tmp_path):
    case = BY_NAME["llama-4-text"]
    full = whole_model(case)
    write_folder(tmp_path, {"model": case.params}, cut(case, full, 1), single=True)
    assert_same(open_meta(tmp_path).tensors, hugging_face(case, full))


def test_a_head_that_is_the_embedding_is_written_as_a_copy(tmp_path):
    case = BY_NAME["llama-2"]
    full = make_folder(tmp_path / "meta", case)
    checkpoint = open_meta(tmp_path / "meta")
    checkpoint.config.tie_word_embeddings = True
    del checkpoint.tensors["lm_head.weight"]
    report = save_meta(checkpoint, tmp_path / "tied", shards=2)
    assert any("tie_word_embeddings" in note for note in report.notes)
    again = open_meta(tmp_path / "tied")
    assert again.config.tie_word_embeddings
    assert "tie_word_embeddings" in again.dropped["output.weight"]
    assert again.tensors.keys() == checkpoint.tensors.keys()
    files = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "tied").glob("*.pth"))]
    embedding = full["tok_embeddings.weight"]
    assert torch.equal(again.tensors["model.embed_tokens.weight"].read(), embedding)
    assert torch.equal(torch.cat([file["output.weight"] for file in files]), embedding)


def test_numbers_of_experts_and_tokens_may_be_left_to_the_tensors(tmp_path):
    case = BY_NAME["llama-4"]
    params = case.params | {"vocab_size": -1, "moe_args": {"interleave_moe_layer_step": 2, "num_experts": -1}}
    write_folder(tmp_path, params, cut(case, whole_model(case), 2))
    config = open_meta(tmp_path).config
    assert (config.text_config.num_local_experts, config.text_config.vocab_size) == (5, 2304)
    assert (config.boi_token_index, config.image_token_index) == (256 + 80, 256 + 92)


def test_which_llama_it_is_shows_in_the_context_length(tmp_path):
    lengths = {"llama-1": 2048, "llama-2": 4096, "llama-3": 131072, "llama-4": 262144}
    for name, length in lengths.items():
        make_folder(tmp_path / name, BY_NAME[name])
        assert open_checkpoint(tmp_path / name).config.get_text_config().max_position_embeddings == length
    make_folder(tmp_path / "Llama-4-Instruct" / "original", BY_NAME["llama-4"])
    text = open_meta(tmp_path / "Llama-4-Instruct" / "original").config.text_config
    assert text.max_position_embeddings == 10485760


@pytest.mark.parametrize(("name", "place"), [("llama-3", "."), ("llama-4", "..")])
def test_the_tokenizer_comes_along_from_the_folder_or_from_above_and_goes_back(name, place, tmp_path):
    make_folder(tmp_path / "release" / "meta", BY_NAME[name], 2)
    (tmp_path / "release" / "meta" / place / "tokenizer.model").write_bytes(rank_table())
    convert(tmp_path / "release" / "meta", tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("az").input_ids == [256, ord("a"), ord("z")]
    assert (
        tokenizer.bos_token_id == AutoConfig.from_pretrained(tmp_path / "hf").get_text_config().bos_token_id
    )
    assert (tmp_path / "hf" / "chat_template.jinja").is_file()
    assert (tmp_path / "hf" / "generation_config.json").is_file()
    assert (tmp_path / "hf" / "processor_config.json").is_file() == (name == "llama-4")
    report = convert(tmp_path / "hf", tmp_path / "back", to="meta", shards=1)
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == rank_table()
    assert not report.notes


def test_a_tokenizer_decides_between_llama_2_and_3(tmp_path):
    case = BY_NAME["llama-2-gqa"]
    params = case.params | {"vocab_size": 512}
    full = whole_model(case) | {
        name: torch.ones(512, DIM) for name in ("tok_embeddings.weight", "output.weight")
    }
    write_folder(tmp_path, params, [full])
    assert open_meta(tmp_path).config.rope_parameters["rope_theta"] == 10000.0
    assert any("no tokenizer.model" in note for note in open_meta(tmp_path).notes)
    (tmp_path / "tokenizer.model").write_bytes(rank_table())
    config = open_meta(tmp_path).config
    assert (config.rope_parameters["rope_theta"], config.bos_token_id) == (500000.0, 256)


def test_a_sentencepiece_model_comes_along_to_a_llama_2_and_goes_back(tmp_path):
    spm = pytest.importorskip("sentencepiece", reason="SentencePiece models need the extra 'tokenizers'")
    model = sentencepiece_model([f"the {n} of a net on {n * 7}" for n in range(200)], 312)
    case = BY_NAME["llama-2"]
    full = whole_model(case)
    full |= {name: full[name].repeat(3, 1)[:312] for name in ("tok_embeddings.weight", "output.weight")}
    write_folder(tmp_path / "7B", case.params | {"vocab_size": -1}, cut(case, full, 2))
    (tmp_path / "tokenizer.model").write_bytes(model)
    convert(tmp_path / "7B", tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    reference = spm.SentencePieceProcessor(model_proto=model)
    for text in ("the net", " of a net", "  12 é"):
        assert tokenizer(text).input_ids == [1, *reference.encode(text)]
    convert(tmp_path / "hf", tmp_path / "back", to="meta", shards=2)
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == model
    for given, wanted in zip(load_files(tmp_path / "back"), cut(case, full, 2), strict=True):
        assert_same(given, wanted)


@pytest.mark.parametrize(("instruct", "template"), [(None, True), (True, True), (False, False)])
@pytest.mark.parametrize(
    "write",
    # 60 inputs are none that int8 stores.
    [
        convert,
        partial(quantize, to="int8", keep=[f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up")]),
    ],
    ids=["convert", "quantize"],
)
def test_it_can_be_said_whether_a_model_was_tuned(write, instruct, template, tmp_path):
    """Llama 2 not tuned has no template, and text that spells a special token is not read as one."""
    META_LLAMA_2.write(tmp_path / "meta", META_LLAMA_2.weights(), 1)
    write(tmp_path / "meta", tmp_path / "hf", instruct=instruct)
    assert (tmp_path / "hf" / "chat_template.jinja").is_file() == template
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert settings.get("split_special_tokens", False) != template
