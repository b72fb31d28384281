"""Test that a configuration is equal after saving and reading, and in the other forms in which it can be copied."""

import copy
import json
import pickle

import pytest
from support.models import dense_config, multimodal_config, text_config, vision_config
from transformers import AutoConfig

import llamoe
from llamoe.configuration import from_stock

MAKERS = {
    "dense": dense_config,
    "text": text_config,
    "vision": vision_config,
    "multimodal": multimodal_config,
}
FAMILIES = pytest.mark.parametrize("family", MAKERS)
NOT_DEFAULT = {
    "dense": dict(
        rms_norm_eps=1e-4,
        attention_bias=True,
        id2label={0: "no", 1: "yes", 2: "perhaps"},
        label2id={"no": 0, "yes": 1, "perhaps": 2},
    ),
    "text": dict(router_aux_loss_coef=0.03, no_rope_layers=[1, 0, 1, 1, 0], eos_token_id=[3, 5]),
    "vision": dict(projection_dim=24, hidden_act="quick_gelu", attention_dropout=0.1),
    "multimodal": dict(tie_word_embeddings=False, image_token_index=96, dtype="float16"),
}


def check_same(read, saved):
    assert type(read) is type(saved)
    assert read == saved and saved == read
    # Only `AutoConfig` sets the folder that a configuration was read from, as for transformers' own.
    assert {**read.to_dict(), "_name_or_path": ""} == {**saved.to_dict(), "_name_or_path": ""}
    assert read.to_diff_dict() == saved.to_diff_dict()
    for use_diff in (True, False):
        content, expected = (json.loads(config.to_json_string(use_diff=use_diff)) for config in (read, saved))
        assert {**content, "_name_or_path": ""} == {**expected, "_name_or_path": ""}
    for part in read.sub_configs:
        check_same(getattr(read, part), getattr(saved, part))


@FAMILIES
@pytest.mark.parametrize("fields", ["default", "others"])
def test_copies_are_equal(family, fields, tmp_path):
    config = MAKERS[family]()
    if fields == "others":
        config = type(config).from_dict(config.to_dict(), **NOT_DEFAULT[family])
    config.save_pretrained(tmp_path / "once")
    read = type(config).from_pretrained(tmp_path / "once")
    assert read.to_dict() == config.to_dict()
    make, data = type(config).from_dict, config.to_dict()
    copies = (
        make(data),
        make(config.to_diff_dict()),
        type(config)(**data),
        pickle.loads(pickle.dumps(config)),
    )
    for again in (read, AutoConfig.from_pretrained(tmp_path / "once"), copy.deepcopy(config), *copies):
        check_same(again, config)
    assert from_stock(config) is config
    read.save_pretrained(tmp_path / "twice")
    check_same(type(config).from_pretrained(tmp_path / "twice"), config)
    once, twice = ((tmp_path / name / "config.json").read_text() for name in ("once", "twice"))
    assert once == twice
    assert json.loads(once)["model_type"] == config.model_type and "llama4" not in once


def test_parts_from_folders_of_their_own(tmp_path):
    """The `auto_map` of a part's folder is not written into the configuration of the whole."""
    text_config().save_pretrained(tmp_path / "text")
    vision_config().save_pretrained(tmp_path / "vision")
    parts = {
        "text_config": llamoe.LlamoeTextConfig.from_pretrained(tmp_path / "text"),
        "vision_config": llamoe.LlamoeVisionConfig.from_pretrained(tmp_path / "vision"),
    }
    whole = llamoe.LlamoeConfig(**parts)
    whole.save_pretrained(tmp_path / "whole")
    content = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert "auto_map" in content
    assert not any("auto_map" in content[name] for name in parts)
    check_same(llamoe.LlamoeConfig.from_pretrained(tmp_path / "whole"), whole)


def test_a_users_entries_in_auto_map_are_kept(tmp_path):
    """A user's class for one Auto class stands beside llamoe's classes for others."""
    config = dense_config()
    config.auto_map = {
        "AutoModelForMaskedLM": "modeling_mine.Mine",
        "AutoModel": "me/it--llamoe_hub.LlamoeDenseModel",
    }
    assert config.to_dict()["auto_map"] == {"AutoModelForMaskedLM": "modeling_mine.Mine"}
    config.architectures = ["Mine"]
    config.save_pretrained(tmp_path)
    read = llamoe.LlamoeDenseConfig.from_pretrained(tmp_path)
    check_same(read, config)
    assert read.auto_map.keys() == {"AutoConfig", "AutoModel", "AutoModelForMaskedLM"}


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    """transformers would take the default configuration, which is that of another model."""
    (tmp_path / "llama-2-7b").mkdir()
    (tmp_path / "llama-2-7b" / "params.json").write_text('{"dim": 64}')
    for config_class in (llamoe.LlamoeDenseConfig, llamoe.LlamoeTextConfig, llamoe.LlamoeConfig):
        with pytest.raises(llamoe.CheckpointError, match="no file named config.json.*llamoe convert"):
            config_class.from_pretrained(tmp_path / "llama-2-7b")
    (tmp_path / "part").mkdir()
    with pytest.raises(llamoe.CheckpointError, match="part: no file named config.json"):
        llamoe.LlamoeVisionConfig.from_pretrained(tmp_path, subfolder="part")
