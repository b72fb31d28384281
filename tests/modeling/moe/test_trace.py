"""`trace_experts` records the experts and scores that follow from the routers' logits."""

import pytest
import torch
from support.models import MODELS, random_ids

import llamoe

_, MIXTRAL, TEXT, WHOLE = [case for case in MODELS if case.is_head]


@pytest.mark.parametrize(
    ("case", "top_k"), [(TEXT, 1), (TEXT, 3), (MIXTRAL, 2)], ids=lambda it: getattr(it, "name", it)
)
def test_choices_and_scores_follow_the_logits(case, top_k):
    model = case.make(num_experts_per_tok=top_k).eval()
    with torch.no_grad(), llamoe.trace_experts(model) as trace:
        output = model(random_ids(1, 17), output_router_logits=True)
    logits = torch.stack(output.router_logits)
    values, chosen = (logits.softmax(-1) if case is MIXTRAL else logits.sigmoid()).topk(top_k)
    assert trace.experts().shape == (len(logits), 17, top_k)
    assert torch.equal(trace.experts(), chosen)
    expected = values / values.sum(-1, keepdim=True) if case is MIXTRAL else values
    assert torch.allclose(trace.scores(), expected, atol=1e-6)


@pytest.mark.parametrize("case", [TEXT, MIXTRAL], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_generated_row_is_traced_token_by_token(case, dtype):
    """The prompt and each new token but the last have a forward pass; the answer is the same as without a trace."""
    model, prompt = case.make().eval().to(dtype), random_ids(1, 9)
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    with llamoe.trace_experts(model) as trace:
        row = model.generate(prompt, **options)
    assert torch.equal(row, model.generate(prompt, **options))
    assert len(trace.complete()) == 7
    assert trace.experts().shape[1] == row.shape[1] - 1
    if dtype == torch.float32:
        with torch.no_grad(), llamoe.trace_experts(model) as whole:
            model(row[:, :-1])
        assert torch.equal(trace.experts(), whole.experts())


def test_a_forward_pass_that_fails_is_left_out():
    """No hook is left. The tokens of a batch with several rows are in one sequence."""
    model = WHOLE.make().eval()
    hooks = [module for module in model.modules() if module._forward_hooks]
    last = model.language_model.model.layers[model.config.text_config.moe_layers[-1]].feed_forward.router
    with torch.no_grad(), llamoe.trace_experts(model) as trace:
        for length in (5, 2):
            model(random_ids(3, length))
        last.top_k = "none"
        with pytest.raises(TypeError):
            model(random_ids(1, 6))
    assert trace.experts().shape[1] == 3 * (5 + 2)
    assert [module for module in model.modules() if module._forward_hooks] == hooks


def test_layers_that_checkpointing_computes_again_are_left_out():
    model = TEXT.make().train()
    model.gradient_checkpointing_enable()
    with llamoe.trace_experts(model) as trace:
        model(random_ids(1, 6), labels=random_ids(1, 6), use_cache=False).loss.backward()
    assert trace.experts().shape[1] == 6
