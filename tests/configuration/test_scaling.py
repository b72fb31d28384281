"""Parameters and tokens for a budget follow the papers' formulas."""

import math

import pytest

from llamoe import ConfigurationError, compute_optimal, preset


@pytest.mark.parametrize("flops", [1e15, 3.3e19, 5.76e23, 1e27])
def test_dense_optima_are_those_of_the_closed_form(flops):
    """Hoffmann et al. 2022, equation 4, approach 3; the search ends where floats of the loss are equal."""
    a, alpha, b, beta = 406.4, 0.3392, 410.7, 0.2849
    scale = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    parameters = scale * (flops / 6) ** (beta / (alpha + beta))
    tokens = (flops / 6) ** (alpha / (alpha + beta)) / scale
    found = compute_optimal(flops=flops)
    assert found.parameters == found.active_parameters == pytest.approx(parameters, rel=1e-6)
    assert found.tokens == pytest.approx(tokens, rel=1e-6)
    assert found.loss == pytest.approx(1.69 + a / parameters**alpha + b / tokens**beta, rel=1e-12)


def loss_of_mixture(total, tokens, sparsity):
    """Abnar et al. 2025, equation 6, as it is printed."""
    alpha, beta, lamda, delta, gamma = 0.5962, 0.3954, -0.1666, 0.1603, 0.1595
    a, b, c, d, e = 16612.50, 5455.67, 0.4598, 17.26, 0.94
    rest = c / (1 - sparsity) ** lamda + d / ((1 - sparsity) ** delta * total**gamma)
    return a / total**alpha + b / tokens**beta + rest + e


@pytest.mark.parametrize("flops", [1e18, 2e21, 1e25])
def test_no_other_mixture_of_the_same_cost_is_better(flops):
    config = preset("llama-4-maverick")
    found = compute_optimal(config, flops=flops)
    sparsity = 127 / 128
    assert found.loss == pytest.approx(loss_of_mixture(found.parameters, found.tokens, sparsity), rel=1e-12)
    # Except for the smallest budgets, mixtures reach a lower loss than dense models.
    assert (found.loss < compute_optimal(flops=flops).loss) == (flops > 1e20)
    for factor in (0.25, 0.8, 0.99, 1.01, 1.3, 5):
        total = factor * found.parameters
        tokens = flops / (6 * found.active_parameters * factor)
        assert loss_of_mixture(total, tokens, sparsity) > found.loss


@pytest.mark.parametrize("name", ["llama-2-13b", "llama-4-scout"])
def test_all_ways_of_asking_agree(name):
    """From a model's parameters, from its budget and from its tokens follow the same sizes."""
    config = preset(name)
    found = compute_optimal(config)
    for given in ("flops", "tokens", "parameters"):
        again = compute_optimal(config, **{given: getattr(found, given)})
        for field in ("flops", "tokens", "parameters", "active_parameters"):
            assert getattr(again, field) == pytest.approx(getattr(found, field), rel=1e-5)


def test_a_mixture_of_a_multimodal_model_is_its_text_model():
    config = preset("llama-4-scout")
    found = compute_optimal(config)
    assert found == compute_optimal(config.text_config)
    # Without the tower: 17 of 108 billion parameters.
    assert found.parameters == pytest.approx(107.77e9, rel=1e-4)
    assert found.active_parameters == pytest.approx(17.17e9, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "one of flops, tokens and parameters, not none"),
        ({"flops": 1e20, "tokens": 1e9}, "not flops and tokens"),
        ({"flops": 0}, "flops is a number above zero, not 0"),
        ({"tokens": -1.0}, "tokens is a number above zero"),
        ({"parameters": math.nan}, "parameters is a number above zero"),
        ({"flops": math.inf}, "flops is a number above zero"),
        ({"flops": True}, "flops is a number above zero"),
        ({"flops": "1e20"}, "flops is a number above zero"),
        ({"flops": 1e40}, r"outside of 1e\+12 to 1e\+32 FLOPs"),
        ({"parameters": 2}, r"outside of 1e\+12"),
        ({"tokens": 1e300}, r"outside of 1e\+12"),
        ({"config": preset("metaclip-b32"), "flops": 1e20}, "a decoder's or None, not LlamoeVisionConfig"),
        ({"config": "llama-7b"}, "a decoder's or None, not str"),
    ],
)
def test_what_cannot_be_answered(given, says):
    with pytest.raises(ConfigurationError, match=says):
        compute_optimal(**given)
