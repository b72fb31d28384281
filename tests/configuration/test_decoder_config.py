"""Test the decoders' configurations: plans of layers, fields that follow from others, and errors."""

import math
import re

import pytest
from transformers import Llama4TextConfig

from llamoe.configuration import LayerPlan, LlamoeDenseConfig, LlamoeTextConfig, from_stock, to_stock

CHUNKED, FULL = "chunked_attention", "full_attention"


def message(owner: str, field: str, value: object) -> str:
    return "^" + re.escape(f"{owner}.{field} = {value!r}: ")


def test_dense_layers_have_equal_plans():
    config = LlamoeDenseConfig(num_hidden_layers=3, intermediate_size=77)
    for idx in range(3):
        assert config.layer_plan(idx) == LayerPlan(idx, FULL, False, 77)
    assert config.feed_forward_name == "mlp"
    assert not config.rope_interleave


def test_text_layers_follow_the_lists():
    config = LlamoeTextConfig(
        num_hidden_layers=4, interleave_moe_layer_step=2, intermediate_size=8, intermediate_size_mlp=16
    )
    assert config.no_rope_layers == [1, 1, 1, 0]
    assert config.moe_layers == [1, 3]
    assert config.layer_types == [CHUNKED, CHUNKED, CHUNKED, FULL]
    assert config.layer_plan(0) == LayerPlan(0, CHUNKED, False, 16, True, True, False)
    assert config.layer_plan(1) == LayerPlan(1, CHUNKED, True, 8, True, True, False)
    assert config.layer_plan(3) == LayerPlan(3, FULL, True, 8, False, False, True)
    assert config.feed_forward_name == "feed_forward"
    assert config.rope_interleave


# Class, arguments, and the fields that follow from them.
DERIVED = [
    (LlamoeDenseConfig, dict(hidden_size=96, num_attention_heads=6), dict(head_dim=16)),
    (LlamoeDenseConfig, dict(hidden_size=100, num_attention_heads=6, head_dim=16), dict(hidden_size=100, head_dim=16)),
    (LlamoeDenseConfig, dict(num_attention_heads=8), dict(num_key_value_heads=8)),
    (LlamoeDenseConfig, {}, dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    (LlamoeTextConfig, {}, dict(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})),
    (LlamoeTextConfig, dict(hidden_size=80), dict(head_dim=128)),
    (LlamoeTextConfig, dict(hidden_size=80, head_dim=None), dict(head_dim=2)),
    (LlamoeTextConfig, dict(num_key_value_heads=None), dict(num_key_value_heads=40)),
    *((LlamoeTextConfig, dict(num_hidden_layers=5, no_rope_layer_interval=interval), dict(no_rope_layers=[1] * 5))
      for interval in (None, 0)),
    *((LlamoeTextConfig, dict(num_hidden_layers=4, no_rope_layers=layers), dict(no_rope_layers=[1, 1, 1, 0]))
      for layers in (None, [])),
    *((LlamoeTextConfig, dict(num_hidden_layers=2, attention_chunk_size=size, layer_types=kinds),
       dict(attention_chunk_size=None, layer_types=[FULL, FULL]))
      for size in (None, 0) for kinds in (None, [CHUNKED, FULL])),
    (LlamoeTextConfig, dict(num_hidden_layers=3, moe_layers=[]), dict(moe_layers=[])),
    (LlamoeTextConfig, dict(interleave_moe_layer_step=0, moe_layers=[5]), dict(moe_layers=[5])),
    (LlamoeTextConfig, dict(num_hidden_layers=4, moe_layers=range(0, 4, 2), layer_types=(FULL,) * 4),
     dict(moe_layers=[0, 2], layer_types=[FULL] * 4)),
]  # fmt: skip


@pytest.mark.parametrize(("config_class", "fields", "expected"), DERIVED)
def test_fields_that_follow_from_others(config_class, fields, expected):
    config = config_class(**fields)
    assert {name: getattr(config, name) for name in expected} == expected
    for idx in range(config.num_hidden_layers):
        assert config.layer_plan(idx).is_moe == (idx in config.moe_layers)


def test_layers_past_the_last_are_cut():
    config = LlamoeTextConfig(num_hidden_layers=2, no_rope_layers=[0, 1, 1, 0], moe_layers=[0, 2])
    assert config.no_rope_layers == [0, 1]
    assert config.layer_types == [FULL, CHUNKED]
    assert config.moe_layers == [0]
    config = LlamoeDenseConfig(
        num_hidden_layers=2, sliding_window=8, layer_types=[FULL, *["sliding_attention"] * 2]
    )
    config.num_hidden_layers = 1
    config.validate()
    assert config.layer_types == [FULL]


@pytest.mark.parametrize("chunk", [None, 8192])
@pytest.mark.parametrize("listed", [None, []])
@pytest.mark.parametrize("experts", [{}, {"num_local_experts": 0, "num_experts_per_tok": 0}])
def test_a_step_of_zero_means_no_mixtures(experts, listed, chunk, tmp_path):
    """llamoe and transformers read back a decoder like Llama Guard 4's, with and without chunks."""
    config = LlamoeTextConfig(
        num_hidden_layers=3,
        interleave_moe_layer_step=0,
        no_rope_layer_interval=0,
        moe_layers=listed,
        attention_chunk_size=chunk,
        **experts,
    )
    assert config.moe_layers == [] and not any(config.layer_plan(i).is_moe for i in range(3))
    assert {config.layer_plan(i).intermediate_size for i in range(3)} == {config.intermediate_size_mlp}
    config.save_pretrained(tmp_path)
    read = LlamoeTextConfig.from_pretrained(tmp_path)
    assert read == config and read.interleave_moe_layer_step == 0
    stock = Llama4TextConfig(**to_stock(config))
    assert stock.moe_layers == [] and from_stock(stock).moe_layers == []
    assert (stock.no_rope_layers, stock.layer_types) == ([1] * 3, config.layer_types)
    # transformers makes a mask of chunks even if no layer uses it.
    assert stock.attention_chunk_size == (chunk or config.max_position_embeddings)


@pytest.mark.parametrize(("value", "tuned"), [(True, True), (False, False), (4, True), (0, False)])
def test_temperature_tuning_is_a_truth_value(value, tuned):
    config = LlamoeTextConfig(num_hidden_layers=4, attn_temperature_tuning=value)
    assert config.layer_plan(3).use_temperature_tuning is tuned
    assert config.layer_plan(0).use_temperature_tuning is False


def test_num_experts_is_another_name():
    config = LlamoeTextConfig(num_experts=4)
    assert config.num_experts == config.num_local_experts == 4
    config.num_experts = 8
    assert config.num_local_experts == 8
    assert "num_experts" not in config.to_dict()


def test_integers_become_floats():
    config = LlamoeTextConfig(attention_dropout=0, rms_norm_eps=1, expert_capacity_factor=2)
    for value in (config.attention_dropout, config.rms_norm_eps, config.expert_capacity_factor):
        assert type(value) is float


@pytest.mark.parametrize("config_class", [LlamoeDenseConfig, LlamoeTextConfig])
def test_old_rotary_fields(config_class):
    scaling = {"type": "linear", "factor": 2.0}
    config = config_class(rope_theta=1234.0, rope_scaling=scaling)
    assert config.rope_parameters["rope_type"] == "linear"
    assert config.rope_parameters["rope_theta"] == 1234.0
    assert config.rope_parameters["factor"] == 2.0
    assert scaling == {"type": "linear", "factor": 2.0}, "the caller's dictionary was changed"


OUTSIDE = {
    LlamoeDenseConfig: {
        **dict.fromkeys(
            ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings"), (0, -4),
        ),
        "num_hidden_layers": (0, 10**9),
        "hidden_size": (-4, 2**40),
        "attention_dropout": (-0.1, 1.0),
        "rms_norm_eps": (-1e-6, math.inf),
        "initializer_range": (math.nan,),
    },
    LlamoeTextConfig: {
        "intermediate_size_mlp": (0,),
        "floor_scale": (0,),
        **dict.fromkeys(
            ("interleave_moe_layer_step", "no_rope_layer_interval", "attention_chunk_size", "num_local_experts"), (-1,)
        ),
        **dict.fromkeys(("router_dropout", "router_jitter_noise"), (-0.1, 1.0, 2.0)),
        **dict.fromkeys(("router_aux_loss_coef", "router_z_loss_coef", "attn_scale"), (-0.1, math.inf)),
        "expert_capacity_factor": (0.0, -1.5, math.inf, -math.inf, math.nan),
    },
}  # fmt: skip


@pytest.mark.parametrize("config_class", OUTSIDE)
def test_numbers_out_of_range_are_refused(config_class):
    """As arguments, and when they are assigned."""
    config = config_class()
    for name, values in OUTSIDE[config_class].items():
        for value in values:
            match = message(config_class.__name__, name, value) + ".*valid: .*at (least|most)"
            with pytest.raises(ValueError, match=match):
                config_class(**{name: value})
            with pytest.raises(ValueError, match=match):
                setattr(config, name, value)
    assert config == config_class()


@pytest.mark.parametrize(
    ("config_class", "fields", "match"),
    [
        (LlamoeDenseConfig, dict(num_key_value_heads=5, num_attention_heads=6, hidden_size=96), "1, 2, 3 or 6"),
        (LlamoeDenseConfig, dict(hidden_size=100, num_attention_heads=6), "a multiple of 6"),
        (LlamoeDenseConfig, dict(head_dim=7), "a multiple of 2"),
        (LlamoeDenseConfig, dict(sliding_window=0), "a number of tokens"),
        (LlamoeDenseConfig, dict(sliding_window=None, layer_types=["sliding_attention"] * 32), "a number of tokens"),
        (LlamoeDenseConfig, dict(hidden_size="64"), "int"),
        (LlamoeDenseConfig, dict(hidden_size=64.0), "int"),
        (LlamoeDenseConfig, dict(tie_word_embeddings="yes"), "bool"),
        (LlamoeDenseConfig, dict(num_hidden_layers=True), "int"),
        (LlamoeDenseConfig, dict(eos_token_id="2"), "int"),
        (LlamoeDenseConfig, dict(skip_logits="never"), "always"),
        (LlamoeTextConfig, dict(num_experts_per_tok=5, num_local_experts=4), "1 to 4"),
        (LlamoeTextConfig, dict(num_experts_per_tok=0), "1 to 16"),
        (LlamoeTextConfig, dict(no_rope_layers=[1, 0], num_hidden_layers=3, layer_types=[FULL] * 3), "a list of 3"),
        (LlamoeTextConfig, dict(layer_types=[FULL], num_hidden_layers=2), "a list of 2"),
        (LlamoeTextConfig, dict(layer_types=FULL, num_hidden_layers=2), r"list\[str\]"),
        (LlamoeTextConfig, dict(moe_layers=[0.5], num_hidden_layers=2), r"list\[int\]"),
        (LlamoeTextConfig, dict(moe_layers=[-1], num_hidden_layers=2), "layers from 0 to 1, each once"),
        (LlamoeTextConfig, dict(moe_layers=[1, 1], num_hidden_layers=2), "layers from 0 to 1, each once"),
        (LlamoeTextConfig, dict(router_score_function="argmax"), "'sigmoid' or 'softmax'"),
        (LlamoeTextConfig, dict(router_pre_softmax=True), "False, or router_score_function"),
        (LlamoeTextConfig, dict(router_balancing="loss"), "'bias' or None"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(config_class, fields, match):
    name, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match=message(config_class.__name__, name, value) + f".*valid: .*{match}"):
        config_class(**fields)


@pytest.mark.parametrize("fields", [{}, {"attention_chunk_size": None}])
@pytest.mark.parametrize("kind", ["nope", "sliding_attention"])
def test_unknown_attention_types_are_refused(kind, fields):
    with pytest.raises(ValueError, match=rf"layer_types\[1\] = '{kind}': .*'full_attention' or"):
        LlamoeTextConfig(num_hidden_layers=2, layer_types=[FULL, kind], **fields)


@pytest.mark.parametrize(
    ("rope", "match"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, ".*low_freq_factor"),
        ({FULL: {"rope_type": "default"}}, ".*the same entries for all layers"),
        ({"rope_type": "default", "rope_theta": 0.0}, r".*\['rope_theta'\] = 0.0: must be positive; valid: "),
        ({"rope_type": "default", "rope_theta": math.inf}, r".*\['rope_theta'\] = inf: "),
        ({"rope_type": "default", "rope_theta": "10000"}, r".*\['rope_theta'\] = '10000': "),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, r".*\['partial_rotary_factor'\] = 0.5: "),
    ],
)
@pytest.mark.parametrize("config_class", [LlamoeDenseConfig, LlamoeTextConfig])
def test_wrong_rotary_parameters_are_refused(config_class, rope, match):
    with pytest.raises(ValueError, match=rf"^{config_class.__name__}{match}"):
        config_class(rope_parameters=rope)


def test_odd_heads_are_fine_where_nothing_rotates():
    config = LlamoeTextConfig(num_hidden_layers=2, no_rope_layers=[0, 0], head_dim=9)
    assert config.head_dim == 9
    with pytest.raises(ValueError, match=r"LlamoeTextConfig\.head_dim = 9"):
        LlamoeTextConfig(num_hidden_layers=2, no_rope_layers=[0, 1], head_dim=9)


def test_types_are_checked_on_every_assignment():
    config = LlamoeTextConfig()
    with pytest.raises(ValueError, match="num_local_experts"):
        config.num_experts = "4"
    with pytest.raises(ValueError, match="use_qk_norm = 1"):
        config.use_qk_norm = 1
    assert config.num_local_experts == 16


def test_validate_checks_again(tmp_path):
    config = LlamoeTextConfig(num_hidden_layers=2)
    config.num_experts_per_tok = 17
    with pytest.raises(ValueError, match="num_experts_per_tok = 17"):
        config.validate()
    with pytest.raises(ValueError, match="num_experts_per_tok = 17"):
        config.save_pretrained(tmp_path)
    config.num_experts_per_tok = 1
    config.attention_chunk_size = None
    with pytest.raises(ValueError, match="attention_chunk_size"):
        config.validate()


def test_a_subclass_is_just_as_strict():
    class Derived(LlamoeDenseConfig):
        extra: int = 3

    assert Derived(extra=4, model_type="llama").extra == 4
    with pytest.raises(ValueError, match=r"^Derived\.extra = 'x': wrong type str; valid: int"):
        Derived(extra="x")
    with pytest.raises(ValueError, match=r"^Derived\.head_dim = 7"):
        Derived(head_dim=7)
    with pytest.raises(ValueError, match=r"^Derived\.model_type = 'qwen2'"):
        Derived(model_type="qwen2")
