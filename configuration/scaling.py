"""Compute-optimal model size and number of training tokens (scaling laws).

Dense models by the parametric fit of Hoffmann et al. 2022 (arXiv 2203.15556, approach 3), mixtures by the fit of Abnar
et al. 2025 (arXiv 2501.12370, equation 6 and table 3), which knows total parameters, tokens and sparsity. Training
costs 6 FLOPs for each active parameter and token.
"""

import math
from dataclasses import dataclass

from .decoder import DecoderConfig
from .errors import ConfigurationError
from .mixture import MixtureConfig
from .multimodal import LlamoeConfig
from .parameter_count import count_parameters

FLOPS_PER_TOKEN = 6
# Budgets that are searched, FLOPs: from seconds of a laptop to far beyond anything that was ever trained.
_SMALLEST, _LARGEST = 1e12, 1e32


@dataclass(frozen=True)
class ComputeOptimal:
    """The best use of a budget, as a fit predicts it.

    Attributes:
        flops: of the training.
        parameters: of the whole model.
        active_parameters: that work on one token.
        tokens: seen in training, each once.
        loss: cross entropy in nats a token, on the data and with the tokenizer of the paper.
    """

    flops: float
    parameters: float
    active_parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class _Fit:
    """A fitted loss: a constant, and terms `factor / number**exponent` of the parameters and of the tokens."""

    constant: float
    of_parameters: tuple[tuple[float, float], ...]
    of_tokens: tuple[float, float]

    def loss(self, parameters: float, tokens: float) -> float:
        terms = [factor / parameters**exponent for factor, exponent in self.of_parameters]
        factor, exponent = self.of_tokens
        return self.constant + sum(terms) + factor / tokens**exponent

    def tokens_for(self, parameters: float) -> float:
        """Return the tokens for which these parameters are the best use of a budget.

        The budget is a product: there, both derivatives by the logarithm are equal.
        """
        slope = sum(exponent * factor / parameters**exponent for factor, exponent in self.of_parameters)
        factor, exponent = self.of_tokens
        return (exponent * factor / slope) ** (1 / exponent)


# The exponents that the paper prints, 0.34 and 0.28, are rounded, and with them optima double.
_DENSE = _Fit(1.69, ((406.4, 0.3392),), (410.7, 0.2849))


def _mixture_fit(used: float) -> _Fit:
    """Return the fit for a share of used experts."""
    of_parameters = ((16612.5, 0.5962), (17.26 / used**0.1603, 0.1595))
    return _Fit(0.94 + 0.4598 * used**0.1666, of_parameters, (5455.67, 0.3954))


def compute_optimal(
    config: DecoderConfig | LlamoeConfig | None = None,
    *,
    flops: float | None = None,
    tokens: float | None = None,
    parameters: float | None = None,
) -> ComputeOptimal:
    """Compute the model size and the number of tokens with the least loss for a compute budget.

    Exactly one of `flops`, `tokens` and `parameters` says what is given; with a config alone its own parameters are.
    Sizes of the papers' experiments, up to 16 billion parameters (Hoffmann) and 5 billion (Abnar), are interpolated
    and all others extrapolated. Abnar's fit explains 68 % of the variance at a sparsity that it was not fitted to.
    Models for many users are trained on more tokens than this: a smaller model costs less at each answer.

    Args:
        config: gives the shape; of a multimodal one the text model's. None is a dense model. For a mixture the share of
            active parameters and of used experts counts: a model of another size is thought to have the same shares.
        flops: budget of the training.
        tokens: of the data, each seen once.
        parameters: of the whole model, embeddings included.

    Raises:
        ConfigurationError: none or several are given, or a number that is not above zero or beyond all budgets.
    """
    text = config.text_config if isinstance(config, LlamoeConfig) else config
    if text is not None and not isinstance(text, DecoderConfig):
        raise ConfigurationError(
            f"compute_optimal: config is a decoder's or None, not {type(text).__name__}."
        )
    given = {"flops": flops, "tokens": tokens, "parameters": parameters}
    given = {name: value for name, value in given.items() if value is not None}
    fit, active = _DENSE, 1.0
    if text is not None:
        count = count_parameters(text)
        if not given:
            given = {"parameters": count.total}
        if isinstance(text, MixtureConfig) and text.moe_layers:
            fit = _mixture_fit(text.num_experts_per_tok / text.num_local_experts)
            active = count.active / count.total
    if len(given) != 1:
        names = " and ".join(given) or "none"
        raise ConfigurationError(f"compute_optimal: give one of flops, tokens and parameters, not {names}.")
    ((name, value),) = given.items()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigurationError(f"compute_optimal: {name} is a number above zero, not {value!r}.")

    def optimum(parameters: float) -> ComputeOptimal:
        tokens = fit.tokens_for(parameters)
        cost = FLOPS_PER_TOKEN * active * parameters * tokens
        return ComputeOptimal(cost, parameters, active * parameters, tokens, fit.loss(parameters, tokens))

    # Tokens and budget grow with the parameters.
    low, high = 0.0, math.log(_LARGEST)
    for _ in range(100):
        middle = (low + high) / 2
        is_less = getattr(optimum(math.exp(middle)), name) < value
        low, high = (middle, high) if is_less else (low, middle)
    best = optimum(math.exp(low))
    if not _SMALLEST <= best.flops <= _LARGEST:
        raise ConfigurationError(
            f"compute_optimal: {name} = {value} is not a size of a training: its budget lies outside of "
            f"{_SMALLEST:.0e} to {_LARGEST:.0e} FLOPs, of which the fits say nothing."
        )
    return best
