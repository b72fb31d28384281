"""Compare a model's outputs with float64, allowing for rounding in the model's dtype.

If two router logits are almost equal, rounding may change a token's experts. So the reference takes the experts that
the model chose, and each choice is judged by itself: rounding must explain a choice that float64 would not make.
"""

from collections.abc import Callable

import torch

from .reference import Blur, Decoder, Result


class Wrong(AssertionError):
    """A fault that a case found: numbers that differ, something lost, an unexpected error."""


class JudgeIsWrong(AssertionError):
    """Stock and the reference differ although both should be right: a fault of the fuzzer itself."""


class TooClose(Exception):
    """Two experts' logits are too close for float64 to predict the model's choice, which was not recorded."""


# Errors up to these pass, as parts of the largest logit: a few roundings. A larger error passes if it is at most MARGIN
# times the largest change that random roundings cause in RUNS runs of the reference.
PASSES = {torch.float64: 2e-6, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
# Width of the interval around 0 from which relative roundings are drawn. float64's entry covers rotary angles, cosines
# and sines, which are float32 in every model; float32's also covers other orders of sums.
ROUNDING = {
    torch.float64: 2.0**-24,
    torch.float32: 2.0**-22,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}
MARGIN = 10
RUNS = 3


def largest(x: torch.Tensor) -> float:
    """Return the largest absolute value; 0 if there is none."""
    return x.abs().max().item() if x.numel() else 0.0


class Judge:
    """Compares the outputs of a model in `dtype` with the reference."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, seed: int):
        self.decoder, self.dtype = decoder, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def blur(self) -> Blur:
        """Return random roundings of the model's dtype."""
        return Blur(ROUNDING[self.dtype], self.generator)

    def check(
        self,
        given: torch.Tensor,
        run: Callable[..., Result],
        choices: list[torch.Tensor],
        what: str,
        error: type[Exception] = Wrong,
    ) -> Result:
        """Compare one sequence's logits.

        Args:
            given: the model's logits.
            run: computes the reference, from choices and optionally a blur.
            choices: experts that the model chose, for each mixture layer.
            what: subject of the error's message.
            error: class of the error to raise.

        Returns:
            the reference's result.
        """
        exact = run(choices)
        self.check_choices(exact, choices, run, what)
        self.check_values(given, exact.logits, lambda blur: run(choices, blur).logits, what, error)
        return exact

    def check_values(
        self,
        given: torch.Tensor,
        expected: torch.Tensor,
        blurred: Callable[[Blur], torch.Tensor],
        what: str,
        error: type[Exception] = Wrong,
        size: float | None = None,
    ) -> None:
        """Compare tensors.

        Args:
            given, expected: the tensors.
            blurred: computes the expected tensor with a blur.
            what, error: as in `check`.
            size: the number of which `PASSES` is a part; by default the largest expected one, and at least 1.
        """
        if given.shape != expected.shape:
            raise error(f"{what}: shape {list(given.shape)} instead of {list(expected.shape)}")
        given = given.detach().double()
        if not given.isfinite().all():
            raise error(f"{what}: {int((~given.isfinite()).sum())} of {given.numel()} numbers are not finite")
        difference, size = largest(given - expected), size or max(1.0, largest(expected))
        if difference <= PASSES[self.dtype] * size:
            return
        allowed = max(largest(blurred(self.blur()) - expected) for _ in range(RUNS))
        if not difference <= MARGIN * allowed:
            raise error(
                f"{what}: off by {difference:.2e} of {size:.2g}, where roundings change {allowed:.2e} ({self.dtype})"
            )

    def check_choices(self, exact: Result, choices: list[torch.Tensor], run: Callable, what: str) -> None:
        """Raise if a token went to an expert that rounding cannot explain."""
        runs: list[Result] = []
        for layer, (logits, chosen) in enumerate(zip(exact.router_logits, choices, strict=True)):
            logits = logits.detach()
            mask = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True)
            if not bool((mask.sum(1) == chosen.shape[1]).all()):
                raise Wrong(f"{what}: mixture {layer} chose an expert twice")
            if mask.all():
                continue
            lowest = logits.masked_fill(~mask, torch.inf).min(1).values
            highest = logits.masked_fill(mask, -torch.inf).max(1).values
            gap = (highest - lowest).max().item() if len(logits) else 0.0
            if gap <= PASSES[self.dtype]:
                continue
            runs = runs or [run(choices, self.blur()) for _ in range(RUNS)]
            noise = max(largest(blurred.router_logits[layer] - logits) for blurred in runs)
            if gap > MARGIN * noise:
                raise Wrong(
                    f"{what}: mixture {layer} chose an expert whose logit is {gap:.2e} below the best's"
                )

    def check_no_tie(self, exact: Result) -> None:
        """Raise `TooClose` where float64 cannot predict the choice of experts."""
        k = self.decoder.config.get("num_experts_per_tok")
        for logits in exact.router_logits:
            if logits.shape[1] > k and len(logits):
                best = logits.topk(k + 1).values
                if (best[:, k - 1] - best[:, k]).min().item() < 20 * PASSES[self.dtype]:
                    raise TooClose
