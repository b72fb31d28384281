"""Test that `import llamoe` imports few other libraries, and does not change stock model types."""

import json
import sys
import types

import pytest
from support import programs
from support.paths import environment

# Look up transformers' classes before and after `import llamoe`.
BEFORE_AND_AFTER = """
import json, sys
assert "llamoe" not in sys.modules
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers import GenerationMixin, PreTrainedModel
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

types, modules = answers(), set(sys.modules)
calls = []
# Count calls, as the time of the import would depend on the machine.
sys.setprofile(lambda frame, event, argument: event in ("call", "c_call") and calls.append(event))
import llamoe
sys.setprofile(None)
print(json.dumps([types, answers(), sorted(modules), sorted(sys.modules), len(calls)]))
"""


@pytest.fixture(scope="module")
def imported():
    """Return stock types and modules before and after `import llamoe`, and the number of calls that it makes."""
    done = programs.run(["-c", BEFORE_AND_AFTER], env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_import_brings_no_other_library(imported):
    """Nor does it import the vLLM plugin. The import makes about 812,000 calls; another library would make more."""
    _, _, before, after, calls = imported
    assert calls < 1_000_000
    assert len([name for name in after if name.partition(".")[0] != "llamoe"]) < len(before) + 100
    packages = {name.split(".")[0] for name in after} - {name.split(".")[0] for name in before}
    assert packages - sys.stdlib_module_names == {"llamoe"}
    assert "llamoe.serving.vllm_plugin" not in after


def test_import_overwrites_no_stock_type(imported):
    """Compare configurations, models and heads."""
    before, after, *_ = imported
    assert before == after
    assert (
        before["AutoModelForCausalLM[LlamaConfig]"]
        == "transformers.models.llama.modeling_llama.LlamaForCausalLM"
    )


def test_public_names_are_there():
    """`__all__` names every public name, and all of its names exist."""
    import llamoe

    there = {
        name
        for name, value in vars(llamoe).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(llamoe.__all__) - {"__version__"} == there
    assert len(llamoe.__all__) == len(set(llamoe.__all__))
