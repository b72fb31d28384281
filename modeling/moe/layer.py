"""The mixture of experts of Llama 4: which experts compute a token, and with what weight.

Per token x: logits = x Wr; keep the `num_experts_per_tok` highest; score = sigmoid(logit) in float32; the
expert's *input* (not its output) is x * score; the result is the sum of the routed experts plus a shared expert
that sees the unscaled x (Meta's llama-models reference, models/llama4/moe.py). SwiGLU is not homogeneous, so
scaling the output instead would be another function.

Only the chosen experts are computed; transformers' `Llama4TextMoe` multiplies every token by every expert. The
mixture does not know how: `Experts` stand in transformers' experts interface, where `set_experts_implementation`
selects `llamoe` (the default, see `dispatch`), `eager`, `grouped_mm`, `batched_mm` or another registered one.

Shapes: T tokens, H hidden_size, E experts, K experts a token, N = T * K rows.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from ..layers import FeedForward
from .stores import Experts


class Router(nn.Module):
    """Chooses experts for each token.

    Not an `nn.Linear`, although it holds the same weight: quantizers and LoRA's `all-linear` must skip it.
    The choice is `topk` on logits in the model's dtype, as in transformers: ties are frequent in bfloat16, and
    another order of operations would send some tokens to other experts.

    Attributes:
        balancing_bias: `[E]` float32, added to the logits where experts are chosen, or None. Scores do not know it.
    """

    balancing_bias: torch.Tensor | None

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.num_experts = config.num_local_experts
        self.top_k = config.num_experts_per_tok
        self.jitter_noise = config.router_jitter_noise
        self.dropout = config.router_dropout
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))
        bias_E = None
        if config.router_balancing == "bias":
            bias_E = torch.zeros(config.num_local_experts, dtype=torch.float32)
        self.register_buffer("balancing_bias", bias_E)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, scores and indices of the chosen experts.

        Args:
            hidden_states: `[T, H]`.

        Returns:
            the logits `[T, E]`, then for the chosen experts the scores `[T, K]` (in the dtype of the logits) and the
            indices `[T, K]` (int64), best first.
        """
        if self.training and self.jitter_noise > 0:
            noise = torch.empty_like(hidden_states).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
            hidden_states = hidden_states * noise
        logits_TE = F.linear(hidden_states, self.weight)
        if self.training and self.dropout > 0:
            logits_TE = F.dropout(logits_TE, p=self.dropout)
        top_logits_TK, indices_TK = choose_experts(logits_TE, self.top_k, self.balancing_bias)
        return logits_TE, top_logits_TK.float().sigmoid().to(logits_TE.dtype), indices_TK

    def _apply(self, fn, recurse=True):
        bias_E = self.balancing_bias
        super()._apply(fn, recurse)
        if bias_E is not None and self.balancing_bias.dtype != torch.float32:
            # A cast would round away what one step of training adds.
            self.balancing_bias = bias_E.to(self.balancing_bias.device)
        return self

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        return f"hidden_size={self.weight.shape[1]}, num_experts={self.num_experts}, top_k={self.top_k}"


def choose_experts(
    logits_TE: torch.Tensor, top_k: int, balancing_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits `[T, K]` of the chosen experts and their indices `[T, K]`, best first."""
    if balancing_bias is None:
        return logits_TE.topk(top_k, dim=-1)
    indices_TK = (logits_TE.float() + balancing_bias.to(logits_TE.device)).topk(top_k, dim=-1).indices
    return logits_TE.gather(1, indices_TK), indices_TK


class MixtureOfExperts(nn.Module):
    """Router, routed experts and shared expert: the feed-forward of a mixture layer."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        factor = config.expert_capacity_factor
        # At E an expert may take every token. A larger factor would change nothing, and might overflow.
        self.capacity_factor = None if factor is None else min(factor, config.num_local_experts)
        self.experts = Experts(config)
        self.router = Router(config)
        self.shared_expert = FeedForward(
            config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `[..., H]` to the same shape."""
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, scores_TK, indices_TK = self.router(x_TH)
        if self.training and self.capacity_factor is not None:
            scores_TK = self._drop_over_capacity(scores_TK, indices_TK)
        scaled_NH = (x_TH[:, None] * scores_TK[..., None]).flatten(0, 1)
        indices_N1 = indices_TK.reshape(-1, 1)
        # The experts' outputs are not scaled any more.
        weights_N1 = torch.ones_like(indices_N1, dtype=scaled_NH.dtype)
        routed_NH = self.experts(scaled_NH, indices_N1, weights_N1)
        routed_TH = routed_NH.unflatten(0, indices_TK.shape).sum(1)
        # The shared expert gets the rows of the batch: adapters may differ from row to row.
        return self.shared_expert(hidden_states) + routed_TH.view(hidden_states.shape)

    def _drop_over_capacity(self, scores_TK: torch.Tensor, indices_TK: torch.Tensor) -> torch.Tensor:
        """Zero the scores of tokens beyond their expert's capacity; the best scores are kept first.

        An expert's input of zero gives an output, and gradients, of exactly zero, without a data-dependent shape.
        """
        num_experts = self.router.num_experts
        capacity = math.ceil(self.capacity_factor * indices_TK.numel() / num_experts)
        scores_N, indices_N = scores_TK.reshape(-1), indices_TK.reshape(-1)
        by_score = scores_N.argsort(descending=True, stable=True)
        # Sorted by expert, and by score within an expert.
        order = by_score[indices_N[by_score].argsort(stable=True)]
        counts_E = F.one_hot(indices_N, num_experts).sum(0)
        starts_E = counts_E.cumsum(0) - counts_E
        ranks = torch.arange(len(order), device=order.device) - starts_E[indices_N[order]]
        kept_N = torch.empty_like(scores_N).scatter_(0, order, (ranks < capacity).to(scores_N.dtype))
        return scores_TK * kept_N.view_as(scores_TK)
