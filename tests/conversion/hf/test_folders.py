"""Read and write folders of Hugging Face: shards, dtypes, layouts, experts in stacks or one by one."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.models import (
    MULTIMODAL,
    SHALLOW_MODELS,
    assert_same_weights,
    draw,
    for_models,
    stock_dense_config,
    stock_model,
    tensors_in,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert


@pytest.fixture
def dense(tmp_path):
    model = draw(LlamaForCausalLM, stock_dense_config(vocab_size=97, num_hidden_layers=2)).bfloat16()
    model.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense", model


@for_models("is_head", models=SHALLOW_MODELS)
def test_experts_are_split_and_stacked_bit_for_bit(case, tmp_path):
    model = case.make().bfloat16()
    model.save_pretrained(tmp_path / "model", layout="stock")
    expected = tensors_in(tmp_path / "model")
    report = convert(tmp_path / "model", tmp_path / "split", experts="split", shard_size="60KB")
    assert report.files == sorted(path.name for path in (tmp_path / "split").glob("*.safetensors"))
    parts = tensors_in(tmp_path / "split")
    assert report.tensors == len(parts)
    assert report.bytes == sum(tensor.nbytes for tensor in parts.values())
    for name, tensor in expected.items():
        if name.endswith("experts.gate_up_proj"):
            stem, inner = name.removesuffix(".gate_up_proj"), tensor.shape[-1] // 2
            for expert, matrix in enumerate(tensor):
                assert torch.equal(parts[f"{stem}.{expert}.gate_proj.weight"], matrix[:, :inner].t())
                assert torch.equal(parts[f"{stem}.{expert}.up_proj.weight"], matrix[:, inner:].t())
    # Mixtral's files are always split, under other names.
    is_mixtral = case.stock_name.startswith("Mixtral")
    assert any("experts.0.w2.weight" in name for name in expected) == is_mixtral
    split = "experts.0.w2.weight" if is_mixtral else "experts.0.down_proj.weight"
    assert any(split in name for name in parts) == case.has_experts
    convert(tmp_path / "split", tmp_path / "back")
    assert_same_weights(tensors_in(tmp_path / "back"), expected)
    config = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "back")]
    assert config[0] == config[1]


@for_models("is_head", models=SHALLOW_MODELS)
def test_result_loads_as_stock_and_as_ours(case, tmp_path):
    model = case.make()
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "stock", shard_size=100_000)
    convert(tmp_path / "model", tmp_path / "ours", layout="llamoe")
    stock = getattr(transformers, case.stock_name)
    expected = model.state_dict()
    for folder, model_class in (("stock", stock), ("ours", case.model_class)):
        model, info = model_class.from_pretrained(tmp_path / folder, dtype="auto", output_loading_info=True)
        assert not any(info.values()), info
        assert_same_weights({name: model.state_dict()[name] for name in expected}, expected)
    types = [
        json.loads((tmp_path / name / "config.json").read_text())["model_type"] for name in ("stock", "ours")
    ]
    assert types == [case.model_class.config_class.stock_model_type, case.model_class.config_class.model_type]


def test_sharded_and_pickled_sources_are_read(dense, tmp_path):
    folder, model = dense
    expected = tensors_in(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_bytes((folder / "config.json").read_bytes())
    shards = [dict(list(expected.items())[::2]), dict(list(expected.items())[1::2])]
    shards[0]["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    names = [f"pytorch_model-{i}-of-2.bin" for i in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        torch.save(shard, old / name)
    index = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for source in ("sharded", "old"):
        report = convert(tmp_path / source, tmp_path / f"from-{source}")
        assert_same_weights(tensors_in(tmp_path / f"from-{source}"), expected)
    assert list(report.dropped) == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


def test_tied_head_is_dropped_with_its_reason(tmp_path):
    model = stock_model(LlamaForCausalLM, stock_dense_config(tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "model")
    state = tensors_in(tmp_path / "model")
    save_file(
        {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()},
        tmp_path / "model/model.safetensors",
    )
    report = convert(tmp_path / "model", tmp_path / "out")
    assert list(report.dropped) == ["lm_head.weight"]
    assert_same_weights(tensors_in(tmp_path / "out"), state)
    # Refused: a stored head of another dtype, or with other numbers.
    for other in (state["model.embed_tokens.weight"].half(), state["model.embed_tokens.weight"] + 1):
        save_file({**state, "lm_head.weight": other}, tmp_path / "model/model.safetensors")
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: .*tie_word_embeddings"):
            convert(tmp_path / "model", tmp_path / "other")
        assert not (tmp_path / "other").exists()


def test_companions_come_along_and_the_source_is_not_touched(dense, tmp_path):
    folder, _ = dense
    tokenizer = Tokenizer(WordLevel({f"word{i}": i for i in range(97)}, unk_token="word0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes.txt").write_text("mine")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    convert(folder, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == before.keys() - {"notes.txt"}
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_dtype_is_that_of_every_part(tmp_path):
    MULTIMODAL.make().save_pretrained(tmp_path / "model", layout="stock")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["text_config"]["dtype"] = "float32"
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    convert(tmp_path / "model", tmp_path / "out", dtype="bfloat16")
    plain = {name: tensor.bfloat16() for name, tensor in tensors_in(tmp_path / "model").items()}
    assert_same_weights(tensors_in(tmp_path / "out"), plain)
    assert llamoe.LlamoeForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "gguf"}, "to = 'gguf'"),
        ({"dtype": "int8"}, "dtype = 'int8'"),
        ({"shard_size": "5 apples"}, "shard_size='5 apples'"),
        ({"shard_size": 0}, "shard_size=0"),
        ({"experts": "stacked"}, "experts = 'stacked'"),
        ({"layout": "meta"}, "layout = 'meta'"),
        ({"resume": True}, "nothing to resume"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(dense, tmp_path, options, message):
    folder, _ = dense
    if "resume" in options:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/file").touch()
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "out", **options)
    assert (tmp_path / "out").exists() == ("resume" in options)
