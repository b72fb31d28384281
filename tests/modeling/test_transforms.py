"""Transforms of `torch.func`, under which no check can read values.

`vmap` computes the loss and gradients of each row; the reference is a loop over rows.
"""

import pytest
import torch
from support.models import IMAGE_TOKEN, MODELS, draw, for_models, max_abs
from support.tables import in_turn
from torch.func import functional_call, grad, vmap

import llamoe

HEADS = [case for case in MODELS if case.is_head]
# `vmap` has no rule for torch's grouped product, so it loops over the rows, with this warning.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def rows_of(case, length=21):
    """Return three rows, two of them padded, with labels on all but padding."""
    inputs = case.inputs(padding=(5, 0, 17), length=length)
    inputs.pop("pixel_values", None)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    ids[ids == IMAGE_TOKEN] = 7
    return {**inputs, "labels": ids.masked_fill(mask == 0, -100)}


def call(model, parameters, inputs, **options):
    """Return the output for one row, from which `vmap` has taken the axis of rows."""
    inputs = {name: value[None] for name, value in inputs.items()}
    return functional_call(model, parameters, (), {**inputs, "use_cache": False, **options})


def check_rows(model, inputs, **options):
    """Check that `vmap` gives each row the gradients of a backward for that row alone."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    by_row = grad(lambda parameters, inputs: call(model, parameters, inputs, **options).loss)
    given = vmap(by_row, in_dims=(None, 0))(parameters, inputs)
    for row in range(len(inputs["input_ids"])):
        model.zero_grad()
        model(**{name: value[row : row + 1] for name, value in inputs.items()}, **options).loss.backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        # The gradient of some biases is rounding alone: compare it with the largest gradient.
        floor = max(gradient.abs().max() for gradient in expected.values()) / 100
        for name, gradient in given.items():
            if name not in expected:
                assert not gradient.any(), name
            else:
                scale = max(expected[name].abs().max(), floor)
                assert max_abs(gradient[row], expected[name]) < 1e-5 * scale, name


@pytest.mark.parametrize(
    ("case", "attention"), in_turn(HEADS, ["sdpa", "eager"]), ids=lambda each: getattr(each, "name", each)
)
def test_gradients_of_each_row(case, attention):
    model = case.make_small().train()
    model.set_attn_implementation(attention)
    inputs = rows_of(case)
    check_rows(model, inputs)
    check_rows(model, inputs, skip_logits=True)
    if case.has_experts:
        check_rows(model, inputs, output_router_logits=True)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@for_models("is_head")
def test_values_that_are_not_read(case, attention):
    """Under `vmap` no values of masks, positions of packed rows, embeddings or image tokens are read."""
    model = case.make_small()
    model.set_attn_implementation(attention)
    inputs = rows_of(case)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    given = [
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids, "position_ids": torch.arange(21) % torch.tensor([[8], [30], [13]])},
        {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask},
    ]
    if case.has_images:
        pictured = torch.where((torch.arange(21) > 18 - 8) & (torch.arange(21) < 19), IMAGE_TOKEN, ids)
        pixels = case.inputs()["pixel_values"]
        pixels = torch.stack([pixels[:2], pixels[1:], pixels[::2]])
        given.append({"input_ids": pictured, "pixel_values": pixels})

    def by_itself(row):
        batch = {name: value if name == "pixel_values" else value[None] for name, value in row.items()}
        return model(**batch).logits[0]

    for rows in given:
        for row, logits in enumerate(vmap(by_itself)(rows)):
            expected = by_itself({name: value[row] for name, value in rows.items()})
            real = mask[row] == 1 if "attention_mask" in rows else slice(None)
            assert max_abs(logits[real], expected[real]) < 1e-5


CLASSIFIERS = {
    "LlamoeDenseForQuestionAnswering": {
        "start_positions": torch.tensor([18, 3, 19]),
        "end_positions": torch.tensor([19, 7, 20]),
    },
    "LlamoeMixtralForTokenClassification": {"labels": torch.arange(63).view(3, 21) % 4},
    "LlamoeForSequenceClassification": {"labels": torch.tensor([0, 3, 1])},
}


@pytest.mark.parametrize(
    ("name", "case"), zip(CLASSIFIERS, HEADS, strict=False), ids=lambda value: getattr(value, "name", value)
)
def test_gradients_of_each_row_of_classifiers(name, case):
    model = draw(getattr(llamoe, name), case.make_config(num_hidden_layers=2, num_labels=4))
    inputs = rows_of(HEADS[0])
    del inputs["labels"]
    check_rows(model, inputs | CLASSIFIERS[name])
