"""Which experts compute which tokens, as the routers' own logits and the layers' weights say."""

import pytest
import torch
from support.models import MODELS

import llamoe

CASES = {case.name: case for case in MODELS}
TEXT, MIXTRAL, WHOLE = (
    CASES[name]
    for name in ("LlamoeForCausalLM", "LlamoeMixtralForCausalLM", "LlamoeForConditionalGeneration")
)


def tokens(count, rows=1):
    return torch.randint(1, 101, (rows, count), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("case", "top_k"), [(TEXT, 1), (TEXT, 3), (MIXTRAL, 2)], ids=lambda it: getattr(it, "name", it)
)
def test_choices_and_scores_follow_the_logits(case, top_k):
    model = case.make(num_experts_per_tok=top_k).eval()
    with torch.no_grad(), llamoe.trace_experts(model) as trace:
        output = model(tokens(17), output_router_logits=True)
    logits = torch.stack(output.router_logits)
    values, chosen = (logits.softmax(-1) if case is MIXTRAL else logits.sigmoid()).topk(top_k)
    assert trace.num_passes == 1
    assert trace.experts().shape == (len(logits), 17, top_k)
    assert torch.equal(trace.experts(), chosen)
    expected = values / values.sum(-1, keepdim=True) if case is MIXTRAL else values
    assert torch.allclose(trace.scores(), expected, atol=1e-6)


@pytest.mark.parametrize("case", [TEXT, MIXTRAL], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_generated_row_is_traced_token_by_token(case, dtype):
    """By the prompt's pass and one of each new token but the last, with the same answer as without a trace."""
    model, prompt = case.make().eval().to(dtype), tokens(9)
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    with llamoe.trace_experts(model) as trace:
        row = model.generate(prompt, **options)
    assert torch.equal(row, model.generate(prompt, **options))
    assert trace.num_passes == 7
    assert trace.experts().shape[1] == row.shape[1] - 1
    assert torch.equal(trace.experts(first=1), trace.experts()[:, 9:])
    assert torch.equal(trace.scores(first=-1), trace.scores()[:, -1:])
    if dtype == torch.float32:
        with torch.no_grad(), llamoe.trace_experts(model) as whole:
            model(row[:, :-1])
        assert torch.equal(trace.experts(), whole.experts())


def test_pictures_and_rows_of_a_batch_are_traced():
    model = WHOLE.make().eval()
    with torch.no_grad(), llamoe.trace_experts(model) as trace:
        model(tokens(5, rows=3))
        model(tokens(2, rows=3))
    assert trace.experts().shape[1] == 3 * (5 + 2)


def test_nothing_stays_behind():
    model = TEXT.make().eval()
    hooks = [module for module in model.modules() if module._forward_hooks]
    with pytest.raises(RuntimeError, match="in the middle"), llamoe.trace_experts(model):
        raise RuntimeError("in the middle")
    assert [module for module in model.modules() if module._forward_hooks] == hooks


def test_a_pass_that_fails_half_way_is_left_out():
    model = TEXT.make().eval()
    last = model.model.layers[model.config.moe_layers[-1]].feed_forward.router
    with torch.no_grad(), llamoe.trace_experts(model) as trace:
        model(tokens(4))

        def fail(*_):
            raise RuntimeError("no memory")

        hook = last.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            model(tokens(6))
        hook.remove()
        model(tokens(5))
    assert trace.num_passes == 2
    assert trace.experts().shape[1] == 4 + 5


def test_what_checkpointing_computes_again_is_no_pass():
    model = TEXT.make().train()
    model.gradient_checkpointing_enable()
    with llamoe.trace_experts(model) as trace:
        model(tokens(6), labels=tokens(6), use_cache=False).loss.backward()
    assert trace.experts().shape[1] == 6


@pytest.mark.parametrize(
    "case", [case for case in MODELS if not case.has_experts], ids=lambda case: case.name
)
def test_a_model_without_experts_is_refused(case):
    with (
        pytest.raises(ValueError, match=f"{case.name} has no experts to trace"),
        llamoe.trace_experts(case.make()),
    ):
        pass


def test_a_trace_of_nothing_says_so():
    with llamoe.trace_experts(TEXT.make()) as trace:
        assert trace.num_passes == 0
        with pytest.raises(ValueError, match="Nothing was traced"):
            trace.experts()
