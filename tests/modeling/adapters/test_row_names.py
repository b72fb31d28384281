"""Rows with adapters of their own (`adapter_names`), against each row by itself with its adapter active."""

from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, RoadConfig, get_peft_model
from support.models import MULTIMODAL, SHALLOW_MODELS, generate, max_abs, run

import llamoe

pytestmark = pytest.mark.slow

MIXTRAL, TEXT = (
    case for case in SHALLOW_MODELS if case.name in ("LlamoeMixtralForCausalLM", "LlamoeForCausalLM")
)
# Row 0 has no tile, row 1 two, row 2 one.
NAMES = ["second", "first", "__base__"]


@pytest.fixture(scope="module", params=[MULTIMODAL, MIXTRAL, TEXT], ids=lambda case: case.name)
def adapted(request):
    """Two adapters of all linear layers, of tower and projector, too, and of routers."""
    case = request.param
    torch.manual_seed(1)
    model = case.make()
    config = llamoe.lora_config(
        model, r=3, lora_alpha=2, experts=False, vision=case.has_images, router=True, init_lora_weights=False
    )
    model = get_peft_model(model, config, "first")
    model.add_adapter("second", config)
    return case, model.eval()


def rows_of(inputs):
    """Each row by itself, with its tiles."""
    tiles = [0, 0, 2, 3]
    for row, (first, end) in enumerate(pairwise(tiles)):
        mine = {name: value[row : row + 1] for name, value in inputs.items() if name != "pixel_values"}
        if end > first and "pixel_values" in inputs:
            mine["pixel_values"] = inputs["pixel_values"][first:end]
        yield mine


def by_rows(model, inputs, call):
    """What `call(model, inputs)` gives for each row alone."""
    results = []
    for name, mine in zip(NAMES, rows_of(inputs), strict=True):
        if name == "__base__":
            with model.disable_adapter():
                results.append(call(model, mine))
        else:
            model.set_adapter(name)
            results.append(call(model, mine))
    model.set_adapter("first")
    return torch.cat(results)


def inputs_of(case):
    return case.inputs(padding=(0, 0, 0), length=37)


def test_each_row_has_its_adapter(adapted):
    case, model = adapted
    inputs = inputs_of(case)
    expected = by_rows(model, inputs, lambda model, mine: run(model, **mine))
    given = run(model, **inputs, adapter_names=NAMES)
    # Sums in another order.
    assert max_abs(given, expected) < 3e-5
    others = run(model, **inputs, adapter_names=NAMES[::-1])
    assert all(max_abs(*rows) > 0.05 for rows in zip(given[[0, 2]], others[[0, 2]], strict=True))


# Rows with pictures in both ways that repeat rows.
WAYS = {
    MULTIMODAL: [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    ],
    MIXTRAL: [{"num_beams": 2}],
    TEXT: [{}],
}


def test_rows_that_are_generated_have_theirs(adapted):
    case, model = adapted
    inputs = inputs_of(case)
    for options in WAYS[case]:
        options = {"max_new_tokens": 4, **options}
        expected = by_rows(model, inputs, lambda model, mine, how=options: generate(model, mine, **how))
        assert torch.equal(generate(model, inputs, adapter_names=NAMES, **options), expected), options


def hooks(model):
    return {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}


@pytest.mark.parametrize("names", [NAMES[:2], [*NAMES, "first"], ["first"] * 9], ids=len)
def test_after_an_error_the_model_is_as_before(adapted, names):
    case, model = adapted
    inputs, before = inputs_of(case), hooks(model)
    expected = run(model, **inputs)
    for call in (run, lambda model, **given: generate(model, given, num_beams=2)):
        with pytest.raises(ValueError, match="adapter_names"):
            call(model, **inputs, adapter_names=names)
        assert hooks(model) == before
    assert torch.equal(run(model, **inputs), expected)


def test_rows_of_another_method_have_theirs():
    model = get_peft_model(
        MULTIMODAL.make(), RoadConfig(target_modules=["q_proj", "linear_1", "fc1"], group_size=4), "first"
    )
    model.add_adapter("second", RoadConfig(target_modules=["q_proj", "linear_1", "fc1"], group_size=4))
    for name, parameter in model.named_parameters():
        if ".road_" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    inputs = inputs_of(MULTIMODAL)
    expected = by_rows(model.eval(), inputs, lambda model, mine: run(model, **mine))
    assert max_abs(run(model, **inputs, adapter_names=NAMES), expected) < 3e-5


def test_parameters_that_peft_wraps_are_named():
    config = LoraConfig(target_modules=["k_proj"], target_parameters=["q_proj.weight"])
    model = get_peft_model(TEXT.make(), config).eval()
    inputs, before = inputs_of(TEXT), hooks(model)
    with pytest.raises(ValueError, match=r"q_proj\.weight"):
        model(**inputs, adapter_names=["default"] * 3)
    assert hooks(model) == before
