"""What `import llamoe` does to a process: little, quickly, and nothing to stock model types."""

import json
import re
import subprocess
import sys
import types

import pytest
from support import programs


def json_from_python(code, run):
    done = run(["-c", code])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_anew(arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def imports():
    """What `import llamoe` does in a fresh process that has torch and transformers: calls, and new modules."""
    code = """
import json, sys
sys.path.append("tests")
from support.counting import calls_of
import torch
from transformers import GenerationMixin, PreTrainedModel
before = set(sys.modules)
calls, _ = calls_of(lambda: __import__("llamoe"))
print(json.dumps([calls, sorted(set(sys.modules) - before), sorted(before)]))
"""
    calls, added, before = json_from_python(code, run_anew)
    packages = {name.partition(".")[0] for name in added} - {name.partition(".")[0] for name in before}
    return calls, added, packages


def test_import_adds_little(imports):
    """Counted: 812,000 calls, and 201 modules of which 134 are llamoe's; a library more would be seen."""
    calls, added, _ = imports
    assert calls < 1_000_000
    assert len([name for name in added if name.partition(".")[0] != "llamoe"]) < 100


def test_import_leaves_heavy_libraries_alone(imports):
    *_, packages = imports
    assert "llamoe" in packages
    assert not packages & {"accelerate", "open_clip", "peft", "timm", "torchvision"}


def test_import_overwrites_no_stock_type():
    """Looked up in one process, before and after: configs, models and heads."""
    code = """
import json, sys
assert "llamoe" not in sys.modules
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers import Llama4Config, Llama4TextConfig, Llama4VisionConfig, LlamaConfig

STOCK = (LlamaConfig, Llama4Config, Llama4TextConfig, Llama4VisionConfig)
AUTO = (AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText)

def answers():
    configs = {c.model_type: CONFIG_MAPPING[c.model_type].__module__ for c in STOCK}
    models = {
        f"{auto.__name__}[{c.__name__}]": f"{auto._model_mapping[c].__module__}.{auto._model_mapping[c].__name__}"
        for auto in AUTO for c in STOCK if c in auto._model_mapping
    }
    return configs | models

before = answers()
import llamoe
print(json.dumps([before, answers()]))
"""
    before, after = json_from_python(code, programs.run)
    assert before == after
    assert (
        before["AutoModelForCausalLM[LlamaConfig]"]
        == "transformers.models.llama.modeling_llama.LlamaForCausalLM"
    )


@pytest.mark.parametrize(
    ("model_type", "config", "classes"),
    [
        (
            "llamoe_dense",
            "LlamoeDenseConfig",
            {
                "AutoModel": "LlamoeDenseModel",
                "AutoModelForCausalLM": "LlamoeDenseForCausalLM",
                "AutoModelForSequenceClassification": "LlamoeDenseForSequenceClassification",
                "AutoModelForTokenClassification": "LlamoeDenseForTokenClassification",
                "AutoModelForQuestionAnswering": "LlamoeDenseForQuestionAnswering",
            },
        ),
        (
            "llamoe_text",
            "LlamoeTextConfig",
            {
                "AutoModel": "LlamoeTextModel",
                "AutoModelForCausalLM": "LlamoeForCausalLM",
                "AutoModelForSequenceClassification": "LlamoeForSequenceClassification",
            },
        ),
        ("llamoe_vision", "LlamoeVisionConfig", {"AutoModel": "LlamoeVisionModel"}),
        (
            "llamoe",
            "LlamoeConfig",
            {
                "AutoModel": "LlamoeModel",
                "AutoModelForCausalLM": "LlamoeForCausalLM",
                "AutoModelForImageTextToText": "LlamoeForConditionalGeneration",
                "AutoModelForMultimodalLM": "LlamoeForConditionalGeneration",
                "AutoModelForSequenceClassification": "LlamoeForSequenceClassification",
                "AutoModelForTextEncoding": "LlamoeTextModel",
            },
        ),
    ],
)
def test_auto_classes_know_our_types(model_type, config, classes):
    import transformers

    import llamoe

    config_class = getattr(llamoe, config)
    assert config_class.model_type == model_type
    assert type(transformers.AutoConfig.for_model(model_type)) is config_class
    for auto, model in classes.items():
        assert getattr(transformers, auto)._model_mapping[config_class] is getattr(llamoe, model)


def test_public_names_are_there():
    """`__all__` names what is public: nothing is announced and missing, nothing is there unannounced."""
    import llamoe

    there = {
        name
        for name, value in vars(llamoe).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(llamoe.__all__) - {"__version__"} == there
    assert len(llamoe.__all__) == len(set(llamoe.__all__))
    assert {"preset", "PRESETS"} | {
        f"Llamoe{name}"
        for name in (
            *("DenseConfig", "TextConfig", "VisionConfig", "Config"),
            *("DenseModel", "DenseForCausalLM", "TextModel", "ForCausalLM", "VisionModel"),
            *("Model", "ForConditionalGeneration"),
        )
    } <= there


def test_unsupported_transformers_is_refused_in_one_sentence():
    code = "import transformers; transformers.__version__ = '4.57.6'; import llamoe"
    done = programs.run(["-c", code])
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == (
        "ImportError: llamoe needs transformers>=5.21,<6, but transformers 4.57.6 is installed: "
        'pip install "transformers>=5.21,<6".'
    )


@pytest.mark.parametrize("found", ["5.20.2", "5.9", "6.0.0", "6.0.0.dev0", "5.21.0", "5.23.1", "5.99.0.dev0"])
def test_supported_versions(monkeypatch, found):
    import transformers

    from llamoe.modeling._compat import require_supported_transformers

    monkeypatch.setattr(transformers, "__version__", found)
    if found in ("5.21.0", "5.23.1", "5.99.0.dev0"):
        require_supported_transformers()
    else:
        with pytest.raises(ImportError, match=re.escape(f"transformers {found} is installed")):
            require_supported_transformers()
