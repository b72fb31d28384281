"""Test the best sizes and numbers of tokens for a budget against the formulas of the papers."""

import math

import pytest

from llamoe import ConfigurationError, compute_optimal, preset


@pytest.mark.parametrize("flops", [1e15, 3.3e19, 5.76e23, 1e27])
def test_dense_optima_are_those_of_the_closed_form(flops):
    """The closed form is equation 4 of Hoffmann et al. 2022, with the numbers of approach 3."""
    a, alpha, b, beta = 406.4, 0.3392, 410.7, 0.2849
    scale = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    parameters = scale * (flops / 6) ** (beta / (alpha + beta))
    tokens = (flops / 6) ** (alpha / (alpha + beta)) / scale
    best = compute_optimal(flops=flops)
    assert best.parameters == best.active_parameters == pytest.approx(parameters, rel=1e-6)
    assert best.tokens == pytest.approx(tokens, rel=1e-6)
    assert best.loss == pytest.approx(1.69 + a / parameters**alpha + b / tokens**beta, rel=1e-12)


def loss_of_mixture(total, tokens, sparsity):
    """Return the loss by equation 6 of Abnar et al. 2025, as printed there."""
    alpha, beta, lamda, delta, gamma = 0.5962, 0.3954, -0.1666, 0.1603, 0.1595
    a, b, c, d, e = 16612.50, 5455.67, 0.4598, 17.26, 0.94
    rest = c / (1 - sparsity) ** lamda + d / ((1 - sparsity) ** delta * total**gamma)
    return a / total**alpha + b / tokens**beta + rest + e


@pytest.mark.parametrize("flops", [1e18, 2e21, 1e25])
def test_no_other_mixture_of_the_same_cost_is_better(flops):
    config = preset("llama-4-maverick")
    best = compute_optimal(config, flops=flops)
    sparsity = 127 / 128
    assert best.loss == pytest.approx(loss_of_mixture(best.parameters, best.tokens, sparsity), rel=1e-12)
    # Mixtures reach less loss than dense models, except for small budgets.
    assert (best.loss < compute_optimal(flops=flops).loss) == (flops > 1e20)
    for factor in (0.25, 0.8, 0.99, 1.01, 1.3, 5):
        total = factor * best.parameters
        tokens = flops / (6 * best.active_parameters * factor)
        assert loss_of_mixture(total, tokens, sparsity) > best.loss


@pytest.mark.parametrize("name", ["llama-2-13b", "llama-4-scout"])
def test_all_arguments_lead_to_one_optimum(name):
    """A model's optimum has FLOPs, tokens and parameters; given any of them, the optimum is the same."""
    config = preset(name)
    best = compute_optimal(config)
    for argument in ("flops", "tokens", "parameters"):
        again = compute_optimal(config, **{argument: getattr(best, argument)})
        for field in ("flops", "tokens", "parameters", "active_parameters"):
            assert getattr(again, field) == pytest.approx(getattr(best, field), rel=1e-5)


def test_of_a_multimodal_model_the_decoder_counts():
    config = preset("llama-4-scout")
    best = compute_optimal(config)
    assert best == compute_optimal(config.text_config)
    # 17 billion of 108 billion parameters, without the tower.
    assert best.parameters == pytest.approx(107.77e9, rel=1e-4)
    assert best.active_parameters == pytest.approx(17.17e9, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "one of flops, tokens and parameters, not none"),
        ({"flops": 1e20, "tokens": 1e9}, "not flops and tokens"),
        ({"flops": 0}, "flops = 0: give a number above zero"),
        ({"tokens": -1.0}, "tokens = -1.0: give a number above zero"),
        ({"parameters": math.nan}, "parameters = nan: give a number above zero"),
        ({"flops": math.inf}, "flops = inf: give a number above zero"),
        ({"flops": True}, "flops = True: give a number above zero"),
        ({"flops": "1e20"}, "flops = '1e20': give a number above zero"),
        ({"flops": 1e40}, r"between 1e\+12 and 1e\+32 FLOPs"),
        ({"parameters": 2}, r"between 1e\+12"),
        ({"tokens": 1e300}, r"between 1e\+12"),
        ({"config": preset("metaclip-b32"), "flops": 1e20}, "config = LlamoeVisionConfig: give a decoder's"),
        ({"config": "llama-7b"}, "config = str: give a decoder's"),
    ],
)
def test_wrong_arguments_are_refused(arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        compute_optimal(**arguments)
