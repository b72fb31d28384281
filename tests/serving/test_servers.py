"""Servers that run our models by transformers' classes get every weight, and say what they compute otherwise.

Their rules stand in `server_rules`, and are always tested. With vLLM or SGLang on the path, as after
`pip download --no-deps vllm` and unpacking the wheel, the rules are compared with the published code besides. Where
all that vLLM imports is there too, vLLM itself builds and fills our models, on the CPU.
"""

import logging
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from support import load_with_vllm, server_rules
from support.models import MODELS, for_models
from support.paths import SUPPORT, environment
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import llamoe

CASES = {case.name: case for case in MODELS}
TEXT, WHOLE = CASES["LlamoeForCausalLM"], CASES["LlamoeForConditionalGeneration"]


def built_by_a_server(config, name):
    """What `AutoModel.from_config` gives a server, which names its attention in the text's config before."""
    config.get_text_config()._attn_implementation = name
    with torch.device("meta"):
        return AutoModel.from_config(config)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name in ("vllm", "sglang"):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, lambda *args, **kwargs: None)
    logging.Logger.warning_once.cache_clear()


# Names of weights


@for_models("is_text")
def test_vllm_finds_a_place_for_every_weight(case):
    """A model takes over its children's patterns of keys to ignore, and vLLM drops every key that one matches."""
    config = case.make_config()
    config.architectures = [case.name]
    keys = case.model_class(config).state_dict()
    model = built_by_a_server(config, "vllm")
    places = {f"model.{name}" for name in model.state_dict()} | {"lm_head.weight"}
    named = {key: server_rules.vllm_name(model, key, config.architectures) for key in keys}
    assert set(named.values()) <= places
    assert len(set(named.values())) == len(keys)
    missing = places - set(named.values())
    assert missing <= (set() if case.is_head else {"lm_head.weight"})


@for_models("is_text")
def test_the_rule_is_vllms_own(case):
    utils = server_rules.published("vllm", "model_executor/models/utils.py", "WeightsMapper")
    if utils is None:
        pytest.skip("vLLM is not on the path")
    names = ("_create_hf_to_vllm_mapper", "_weight_conversions")
    base = server_rules.published("vllm", "model_executor/models/transformers/base.py", *names)
    base._create_hf_to_vllm_mapper.__globals__["WeightsMapper"] = utils.WeightsMapper
    config = case.make_config()
    config.architectures = [case.name]
    keys = case.model_class(config).state_dict()
    model = built_by_a_server(config, "vllm")
    # As it was before, too: with patterns that drop everything.
    for ignored in (set(), {r"^vision_model\.", r"^language_model\."}):
        model._keys_to_ignore_on_load_unexpected = ignored
        server = SimpleNamespace(model=model, config=config, _maybe_apply_model_mapping=lambda: None)
        server._weight_conversions = lambda server=server: base._weight_conversions(server)
        base._create_hf_to_vllm_mapper(server)
        for key in keys:
            expected = server.hf_to_vllm_mapper.map_name(key)
            assert server_rules.vllm_name(model, key, config.architectures) == expected


@pytest.mark.xfail(
    find_spec("vllm") is not None,
    reason="vLLM's transformers backend wants a call of the attention interface in the source of Attention.forward, "
    "and ours stands in attend_in_form; docs/limits.md says so",
)
@pytest.mark.parametrize("case", [CASES["LlamoeDenseForCausalLM"], TEXT, WHOLE], ids=lambda case: case.name)
def test_vllm_itself_loads_every_weight(case):
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not on the path: its rule is tested as it is written in server_rules")
    program = SUPPORT / "load_with_vllm.py"
    command = [sys.executable, program, case.name]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if run.returncode == load_with_vllm.CANNOT_IMPORT:
        pytest.skip(run.stderr.splitlines()[-1])
    assert run.returncode == 0, run.stderr
    print(run.stdout)


@for_models()
def test_no_model_hands_on_patterns_of_keys_to_ignore(case):
    assert not case.make()._keys_to_ignore_on_load_unexpected


@for_models("has_images", "is_text")
def test_parts_of_a_whole_still_load_without_a_word_of_the_rest(case, tmp_path):
    """What the patterns were for: a part of a multimodal folder, or a model without its head."""
    WHOLE.make().save_pretrained(tmp_path)
    for name in ("LlamoeTextModel", "LlamoeForCausalLM", "LlamoeVisionModel", "LlamoeModel", case.name):
        _, info = getattr(llamoe, name).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values()), (name, info)


@for_models("is_text")
def test_sglang_finds_a_place_for_every_weight(case):
    config = case.make_config()
    keys = case.model_class(config).state_dict()
    model = built_by_a_server(config, "sglang")
    places = {f"model.{name}" for name in model.state_dict()} | {"lm_head.weight"}
    named = {server_rules.sglang_name(key, case.has_images) for key in keys}
    assert named <= places
    assert len(named) == len(keys)


@for_models("is_text")
def test_the_names_are_sglangs_own(case):
    mappers = server_rules.sglangs_own_mappers()
    if mappers is None:
        pytest.skip("SGLang is not on the path")
    whole = mappers["TransformersBase"]
    whole = mappers["MultiModalMixin"] | whole if case.has_images else whole
    for key in case.make().state_dict():
        assert whole._map_name(key) == server_rules.sglang_name(key, case.has_images)


# Plans


@for_models()
def test_every_style_of_the_plans_is_one_that_sglang_takes(case):
    model = built_by_a_server(case.make_config(), "sglang") if case.is_text else case.make()
    assert model.tp_plan
    assert {server_rules.sglang_style(style) for style in model.tp_plan.values()} <= {
        "colwise",
        "rowwise",
        "replicate",
    }
    with pytest.raises(ValueError, match="colwise_gather_output"):
        server_rules.sglang_style("colwise_gather_output")


def test_the_styles_are_sglangs_own():
    source = server_rules.published("sglang", "srt/models/transformers.py", "_normalize_tp_style")
    if source is None:
        pytest.skip("SGLang is not on the path")
    for style in (*server_rules.SGLANG_STYLES, *server_rules.SGLANG_OTHER_NAMES):
        assert source._normalize_tp_style(style) == server_rules.sglang_style(style)
    with pytest.raises(ValueError, match="Unsupported"):
        source._normalize_tp_style("colwise_gather_output")


# Warnings


def warned(caplog):
    return [record.message for record in caplog.records if "transformers backend" in record.message]


@pytest.mark.parametrize("case", [TEXT, WHOLE], ids=lambda case: case.name)
@pytest.mark.parametrize(("name", "server"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_a_server_is_told_what_it_computes_otherwise(case, name, server, caplog):
    config = case.make_config(hidden_act="gelu", num_experts_per_tok=2)
    for _ in range(2):  # vLLM builds a model twice
        built_by_a_server(config, name)
    messages = warned(caplog)
    wanted = ["attention_chunk_size = 16", "num_experts_per_tok = 2", "hidden_act says ('gelu'"]
    wanted += ["--experts split"] if server == "SGLang" else []
    assert len(messages) == len(wanted)
    for message, says in zip(messages, wanted, strict=True):
        assert message.startswith(f"{server}'s transformers backend") and says in message


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "sdpa"),
        ({}, "eager"),
        (dict(attention_chunk_size=None, num_experts_per_tok=1), "vllm"),
        (dict(attention_chunk_size=256, num_experts_per_tok=1), "vllm"),
        (dict(attention_chunk_size=None, num_experts_per_tok=1, hidden_act="swish"), "vllm"),
        (dict(attention_chunk_size=None, moe_layers=[]), "sglang"),
    ],
)
def test_there_is_no_warning_where_nothing_differs(fields, name, caplog):
    built_by_a_server(TEXT.make_config(**fields), name)
    built_by_a_server(CASES["LlamoeDenseForCausalLM"].make_config(), name)
    assert not warned(caplog)
