"""Folders of Meta converted to Hugging Face's compute what Meta's formulas give, and convert back to the same bits."""

import json
import re
from dataclasses import replace

import pytest
import torch
import transformers
from support.conversions import (
    META_LLAMA_1,
    META_LLAMA_2,
    META_LLAMA_3,
    META_MAVERICK,
    META_SCOUT,
    MetaCase,
    sums,
)
from support.meta_releases import expert_size, hidden_size, read_ranks
from support.mistral_folders import MistralCase
from support.models import deviation_in_range, load_whole, max_abs
from support.tokenizer_files import rank_table
from transformers import AutoConfig, AutoTokenizer

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert, open_checkpoint, quantize
from llamoe.conversion.io import WriteOptions
from llamoe.conversion.io.name_table import Drop
from llamoe.conversion.meta.folder import open_meta, save_meta
from llamoe.conversion.meta.name_tables import llama4_table, llama_table

# For logits of deviation 1 against float64; measured are up to 5e-6, and 2e-4 with a wrong scaling factor.
TOLERANCE = 1e-5


def other(case, name, counts, **params):
    """Return a case with other entries in params.json."""
    return MetaCase(f"{case.name}, {name}", {**case.params, **params}, case.vocabulary, counts)


DENSE_4 = other(META_MAVERICK, "no experts", (1, 3), moe_args=None, ffn_exp=None)
# Case, number of files of the source, how they are written, number of files converted back.
WAYS = [
    (META_LLAMA_1, 6, {}, 1),
    (META_LLAMA_1, 1, dict(extras=False), 3),
    (other(META_LLAMA_1, "as Llama 2", (1, 2, 3, 6), n_kv_heads=6), 3, {}, 2),
    (other(META_LLAMA_1, "with groups", (1, 3), n_kv_heads=3), 3, {}, 1),
    (META_LLAMA_2, 2, dict(one_storage=True), 1),
    (META_LLAMA_2, 1, dict(extras=False), 2),
    (META_LLAMA_3, 1, {}, 2),
    (META_LLAMA_3, 2, {}, 1),
    (META_SCOUT, 2, {}, 1),
    (META_SCOUT, 1, dict(release=False), 2),
    (META_MAVERICK, 3, dict(one_storage=True), 1),
    (META_MAVERICK, 1, dict(extras=False), 3),
    (other(META_MAVERICK, "all mixtures", (1, 3), moe_args={"num_experts": 3}), 3, dict(release=False), 1),
    (DENSE_4, 3, {}, 1),
    (DENSE_4, 1, dict(release=False), 3),
]


def ids(value):
    return value.name.replace(" ", "-") if hasattr(value, "name") else None


def classes_of(case):
    """Return transformers' class for a case, and ours."""
    if not case.is_llama4:
        return transformers.LlamaForCausalLM, llamoe.LlamoeDenseForCausalLM
    if case.has_images:
        return transformers.Llama4ForConditionalGeneration, llamoe.LlamoeForConditionalGeneration
    return transformers.Llama4ForCausalLM, llamoe.LlamoeForCausalLM


@torch.no_grad()
def logits(model_class, folder, tokens, tiles):
    model = load_whole(model_class, folder, dtype=torch.float32).eval()
    return model(tokens, **({} if tiles is None else {"pixel_values": tiles})).logits


@pytest.mark.parametrize(("case", "files", "how", "files_back"), WAYS, ids=ids)
def test_converted_folders_compute_what_metas_maths_does_and_convert_back_to_the_same_bits(
    case, files, how, files_back, tmp_path, record_parity
):
    weights = case.weights()
    source = case.write(tmp_path / "meta", weights, files, **how)
    before = sums(source)
    convert(source, tmp_path / "hf", shard_size="700KB")
    assert (tmp_path / "hf" / "processor_config.json").is_file() == case.has_images

    tokens, tiles = case.inputs()
    expected = case.logits(weights, tokens, tiles)
    assert deviation_in_range(expected)
    for model_class in classes_of(case):
        difference = max_abs(logits(model_class, tmp_path / "hf", tokens, tiles).double(), expected)
        record_parity(
            f"{case.name} through convert, {model_class.__name__}",
            "Meta's maths in float64",
            "float32",
            difference,
        )
        assert difference < TOLERANCE

    report = convert(tmp_path / "hf", tmp_path / "back", to="meta", shards=files_back)
    assert report.files == [f"consolidated.{number:02d}.pth" for number in range(files_back)]
    back = case.read(tmp_path / "back")
    assert back.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(back[name], weights[name])] == []
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == case.tokenizer()
    assert open_checkpoint(tmp_path / "back").config == open_checkpoint(source).config
    assert sums(source) == before

    # By the written params.json Meta's formulas give the same logits.
    params = json.loads((tmp_path / "back" / "params.json").read_text())
    assert params.get("vocab_size", -1) in (-1, case.vocabulary)
    assert torch.equal(replace(case, params=params).logits(weights, tokens, tiles), expected)
    # Meta's code makes layers of these sizes before it loads the tensors.
    assert hidden_size(params) == hidden_size(case.params) or META_SCOUT is case
    if case.params.get("moe_args"):
        assert expert_size(params) == expert_size(case.params)


def test_every_row_of_every_table_is_used_by_a_case(tmp_path):
    """For every dropped tensor there is a reason, too."""
    names = {False: set(), True: set()}
    for number, (case, files, how, _) in enumerate(WAYS):
        folder = case.write(tmp_path / str(number), case.weights(), files, **how)
        names[case.is_llama4] |= set(read_ranks(folder)[0])
        assert all(len(reason) > 10 for reason in open_meta(folder, companions=False).dropped.values())
        if case is META_SCOUT:
            tables = {False: llama_table(0), True: llama4_table(open_meta(folder).config)}
    for is_llama4, table in tables.items():
        for row in table:
            for pattern in [row.pattern] if isinstance(row, Drop) else row.sources:
                regex = re.sub(r"\\{\w\\}", r"\\d+", re.escape(pattern)).replace(r"\*", ".*")
                assert any(re.fullmatch(regex, name) for name in names[is_llama4]), pattern


def test_params_may_be_nested_and_leave_numbers_to_a_single_file(tmp_path):
    case = other(META_SCOUT, "counted", (1,), moe_args={**META_SCOUT.params["moe_args"], "num_experts": -1})
    folder = META_SCOUT.write(tmp_path / "meta", META_SCOUT.weights(), 1)
    expected = open_meta(folder)
    (folder / "params.json").write_text(json.dumps({"model": case.params}))
    (folder / "consolidated.00.pth").rename(folder / "consolidated.pth")
    opened = open_meta(folder)
    assert opened.config == expected.config and opened.tensors.keys() == expected.tensors.keys()
    text = opened.config.text_config
    assert (text.num_local_experts, text.vocab_size) == (5, case.vocabulary)
    base = case.vocabulary - 2048
    assert (opened.config.boi_token_index, opened.config.image_token_index) == (base + 80, base + 92)


def test_a_head_that_is_the_embedding_is_written_as_a_copy(tmp_path):
    weights = META_LLAMA_2.weights()
    checkpoint = open_meta(META_LLAMA_2.write(tmp_path / "meta", weights, 1))
    checkpoint.config.tie_word_embeddings = True
    del checkpoint.tensors["lm_head.weight"]
    report = save_meta(checkpoint, tmp_path / "tied", shards=2)
    assert any("tie_word_embeddings" in note for note in report.notes)
    again = open_meta(tmp_path / "tied")
    assert again.config.tie_word_embeddings
    assert "tie_word_embeddings" in again.dropped["output.weight"]
    assert again.tensors.keys() == checkpoint.tensors.keys()
    embedding = weights["tok_embeddings.weight"]
    assert torch.equal(again.tensors["model.embed_tokens.weight"].read(), embedding)
    assert torch.equal(META_LLAMA_2.read(tmp_path / "tied")["output.weight"], embedding)


def test_which_llama_it_is_shows_in_the_context_length(tmp_path):
    lengths = {META_LLAMA_1: 2048, META_LLAMA_2: 4096, META_LLAMA_3: 131072, META_SCOUT: 262144}
    for (case, length), tuned in zip(lengths.items(), (2048, 4096, 131072, 10485760), strict=True):
        folder = case.write(tmp_path / case.name / "original", case.weights(), 1)
        assert open_checkpoint(folder).config.get_text_config().max_position_embeddings == length
        folder = folder.rename(tmp_path / f"{case.name}-Instruct")
        assert open_checkpoint(folder).config.get_text_config().max_position_embeddings == tuned


@pytest.mark.parametrize("case", [META_LLAMA_2, META_SCOUT], ids=ids)
def test_a_tokenizer_is_found_above_the_folder(case, tmp_path):
    source = case.write(tmp_path / "release" / "7B", case.weights(), 2)
    (source / "tokenizer.model").rename(tmp_path / "release" / "tokenizer.model")
    convert(source, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    config = AutoConfig.from_pretrained(tmp_path / "hf").get_text_config()
    assert tokenizer("az").input_ids[0] == tokenizer.bos_token_id == config.bos_token_id
    assert (tmp_path / "hf" / "chat_template.jinja").is_file()
    assert (tmp_path / "hf" / "generation_config.json").is_file()


def test_a_tokenizer_decides_between_llama_2_and_3(tmp_path):
    case = MetaCase("Llama 3 as Llama 2", META_LLAMA_2.params, 512, (1,))
    folder = case.write(tmp_path / "meta", case.weights(), 1)
    (folder / "tokenizer.model").unlink()
    assert open_meta(folder).config.rope_parameters["rope_theta"] == 10000.0
    assert any("no tokenizer.model" in note for note in open_meta(folder).notes)
    (folder / "tokenizer.model").write_bytes(rank_table())
    config = open_meta(folder).config
    assert (config.rope_parameters["rope_theta"], config.bos_token_id) == (500000.0, 256)


def in_8_bits(source, target, **options):
    return quantize(source, target, to="int8", **options)


@pytest.mark.parametrize(
    ("kind", "write", "instruct", "template"),
    [
        ("llama", convert, None, True),
        ("llama", convert, True, True),
        ("llama", convert, False, False),
        ("mistral", convert, None, True),
        ("mistral", convert, False, False),
        ("llama", in_8_bits, False, False),
    ],
)
def test_it_can_be_said_whether_a_model_was_tuned(kind, write, instruct, template, tmp_path):
    """A model that is not tuned has no chat template, and text that spells a special token stays text."""
    if kind == "llama":
        META_LLAMA_2.write(tmp_path / "source", META_LLAMA_2.weights(), 1)
    else:
        MistralCase(kind, {"vocab_size": 310}).write(tmp_path / "source")
        (tmp_path / "source" / "tokenizer.model").write_bytes(META_LLAMA_2.tokenizer())
    write(tmp_path / "source", tmp_path / "hf", instruct=instruct)
    assert (tmp_path / "hf" / "chat_template.jinja").is_file() == template
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert settings.get("split_special_tokens", False) != template


@pytest.mark.parametrize(
    ("case", "shards", "words"),
    [
        (META_LLAMA_2, 6, "shards = 6: .* divide 2,"),
        (META_MAVERICK, 2, "shards = 2: .* divide 3,"),
        (META_SCOUT, 3, "shards = 3: .* divide 2,"),
        (META_LLAMA_2, 0, "shards=0"),
    ],
)
def test_files_that_heads_cannot_be_divided_by_are_refused(case, shards, words, tmp_path):
    folder = case.write(tmp_path / "meta", case.weights(), 1)
    with pytest.raises(ValueError, match=words):
        save_meta(open_meta(folder), tmp_path / "to", shards=shards)
    assert not (tmp_path / "to").exists()


def test_dtypes_that_one_tensor_of_metas_cannot_mix_are_refused(tmp_path):
    checkpoint = open_meta(META_SCOUT.write(tmp_path / "meta", META_SCOUT.weights(), 1))
    name = "language_model.model.layers.0.self_attn.k_proj.weight"
    checkpoint.tensors[name] = checkpoint.tensors[name].cast(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"is bfloat16 .* is float32 .*one dtype"):
        save_meta(checkpoint, tmp_path / "to", shards=2)
    save_meta(checkpoint, tmp_path / "to", WriteOptions(dtype="float32"), shards=2)
