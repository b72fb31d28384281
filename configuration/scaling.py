"""Compute the best model size and number of training tokens for a budget, by published scaling laws.

Dense models follow the parametric fit of Hoffmann et al. 2022 (arXiv 2203.15556, approach 3). Mixtures follow the fit
of Abnar et al. 2025 (arXiv 2501.12370, equation 6 and table 3), a function of total parameters, tokens and sparsity.
Training costs 6 FLOPs for each active parameter and token.
"""

import math
from dataclasses import dataclass

from .decoder import DecoderConfig
from .errors import ConfigurationError
from .mixture import MixtureConfig
from .multimodal import LlamoeConfig
from .parameter_count import count_parameters

FLOPS_PER_TOKEN = 6
# Smallest and largest budget in FLOPs: from seconds on a laptop to far beyond any published training.
_SMALLEST, _LARGEST = 1e12, 1e32


@dataclass(frozen=True)
class ComputeOptimal:
    """The best use of a budget, as a scaling law predicts it.

    Attributes:
        flops: FLOPs of the training.
        parameters: number of parameters of the whole model.
        active_parameters: number of parameters that compute one token.
        tokens: number of training tokens, each seen once.
        loss: cross entropy in nats for each token, with the data and the tokenizer of the paper.
    """

    flops: float
    parameters: float
    active_parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class _Fit:
    """A fitted loss: a constant plus terms `factor / number**exponent`, given as pairs `(factor, exponent)`."""

    constant: float
    of_parameters: tuple[tuple[float, float], ...]
    of_tokens: tuple[float, float]

    def loss(self, parameters: float, tokens: float) -> float:
        terms = [factor / parameters**exponent for factor, exponent in self.of_parameters]
        factor, exponent = self.of_tokens
        return self.constant + sum(terms) + factor / tokens**exponent

    def tokens_for(self, parameters: float) -> float:
        """Return the number of tokens for which this number of parameters is the best use of a budget.

        A budget fixes their product, so at the best use the loss has equal derivatives by their logarithms.
        """
        slope = sum(exponent * factor / parameters**exponent for factor, exponent in self.of_parameters)
        factor, exponent = self.of_tokens
        return (exponent * factor / slope) ** (1 / exponent)


# The paper prints the exponents as 0.34 and 0.28. With these rounded numbers the best sizes would double.
_DENSE = _Fit(1.69, ((406.4, 0.3392),), (410.7, 0.2849))


def _mixture_fit(used: float) -> _Fit:
    """Return the fit for mixtures in which a token uses this share of the experts."""
    of_parameters = ((16612.5, 0.5962), (17.26 / used**0.1603, 0.1595))
    return _Fit(0.94 + 0.4598 * used**0.1666, of_parameters, (5455.67, 0.3954))


def compute_optimal(
    config: DecoderConfig | LlamoeConfig | None = None,
    *,
    flops: float | None = None,
    tokens: float | None = None,
    parameters: float | None = None,
) -> ComputeOptimal:
    """Compute the model size and the number of training tokens with the least loss for a compute budget.

    Give one of `flops`, `tokens` and `parameters`, or only a configuration, whose own parameters then count. The
    experiments had up to 16 billion parameters (Hoffmann) and 5 billion (Abnar); larger sizes are extrapolated. Models
    for many users are usually smaller and trained on more tokens, because a smaller model costs less for each answer.

    Args:
        config: a decoder's configuration, or a multimodal one, whose decoder counts; None for a dense model. The
            shares of active parameters and of used experts in a mixture are assumed to be the same at other sizes.
        flops: budget of the training.
        tokens: number of tokens of the data, each seen once.
        parameters: number of parameters of the whole model, embeddings included.

    Raises:
        ConfigurationError: not exactly one number is given, or its budget is not between 1e12 and 1e32 FLOPs.
    """
    text = config.text_config if isinstance(config, LlamoeConfig) else config
    if text is not None and not isinstance(text, DecoderConfig):
        raise ConfigurationError(
            f"compute_optimal: config = {type(text).__name__}: give a decoder's configuration, or None."
        )
    budgets: dict[str, float | None] = {"flops": flops, "tokens": tokens, "parameters": parameters}
    budgets = {name: value for name, value in budgets.items() if value is not None}
    fit, active = _DENSE, 1.0
    if text is not None:
        count = count_parameters(text)
        if not budgets:
            budgets = {"parameters": count.total}
        if isinstance(text, MixtureConfig) and text.moe_layers:
            fit = _mixture_fit(text.num_experts_per_tok / text.num_local_experts)
            active = count.active / count.total
    if len(budgets) != 1:
        names = " and ".join(budgets) or "none"
        raise ConfigurationError(f"compute_optimal: give one of flops, tokens and parameters, not {names}.")
    ((name, value),) = budgets.items()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigurationError(f"compute_optimal: {name} = {value!r}: give a number above zero.")

    def optimum(parameters: float) -> ComputeOptimal:
        tokens = fit.tokens_for(parameters)
        cost = FLOPS_PER_TOKEN * active * parameters * tokens
        return ComputeOptimal(cost, parameters, active * parameters, tokens, fit.loss(parameters, tokens))

    # A bisection by parameters finds the optimum, because tokens and budget grow with the parameters.
    low, high = 0.0, math.log(_LARGEST)
    for _ in range(100):
        middle = (low + high) / 2
        is_less = getattr(optimum(math.exp(middle)), name) < value
        low, high = (middle, high) if is_less else (low, middle)
    best = optimum(math.exp(low))
    if not _SMALLEST <= best.flops <= _LARGEST:
        raise ConfigurationError(
            f"compute_optimal: {name} = {value}: give a number whose budget is between {_SMALLEST:.0e} and "
            f"{_LARGEST:.0e} FLOPs."
        )
    return best
