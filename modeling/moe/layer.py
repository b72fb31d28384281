"""The mixture of experts: which experts compute a token, and with what weight.

The config selects the rule. Two rules are published:

* Llama 4 (Meta's llama-models reference, models/llama4/moe.py). For a token x: logits = x Wr; keep the
  `num_experts_per_tok` highest; score = sigmoid(logit) in float32; the expert's *input* is x * score; the result is the
  sum of the routed experts' outputs plus the output of a shared expert, whose input is the unscaled x.
* Mixtral (arXiv 2401.04088; transformers' `MixtralSparseMoeBlock`): p = softmax(x Wr) in float32; keep the highest;
  score = p / sum of the kept; the result is the sum of the experts' *outputs* times their scores.

SwiGLU is not homogeneous: an expert of `s * x` is not s times the expert of x.

Only the chosen experts are computed; transformers' `Llama4TextMoe` multiplies every token by every expert. `Experts`
computes the products. `set_experts_implementation` selects how, in transformers' experts interface: `llamoe` (the
default), `eager`, `grouped_mm`, `batched_mm` or another registered name.

Shapes: T tokens, H hidden_size, E experts, K experts a token, N = T * K rows.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from ..kernels import linear
from ..layers import FeedForward
from .experts import Experts, OutputFirstExperts


class Router(nn.Module):
    """Chooses experts for each token.

    Not an `nn.Linear`, although it has the same weight: quantizers and LoRA's `all-linear` must skip it. `topk` gets
    the same tensor as in transformers: ties are frequent in bfloat16, and another order of operations would send some
    tokens to other experts.

    Attributes:
        balancing_bias: `[E]` float32, added to the logits for the choice of experts, not for the scores; or None.
    """

    balancing_bias: torch.Tensor | None

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.num_experts = config.num_local_experts
        self.top_k = config.num_experts_per_tok
        # If jitter shall reach the experts, too, the mixture has already multiplied the common input by it.
        self.jitter_noise = 0.0 if config.router_jitter_reaches_experts else config.router_jitter_noise
        self.takes_softmax = config.router_score_function == "softmax"
        self.chooses_by_softmax = self.takes_softmax and config.router_pre_softmax
        self.normalizes = config.norm_topk_prob
        self.scales_input = config.apply_router_weight_on_input
        self.dropout = config.router_dropout
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))
        bias_E = None
        if config.router_balancing == "bias":
            bias_E = torch.zeros(config.num_local_experts, dtype=torch.float32)
        self.register_buffer("balancing_bias", bias_E)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose experts for tokens.

        Args:
            hidden_states: `[T, H]`.

        Returns:
            the logits `[T, E]`; then, of the chosen experts, best first, the scores `[T, K]` (in float32 if they
            multiply outputs, else in the dtype of the logits) and the indices `[T, K]` (int64).
        """
        x_TH = jitter(hidden_states, self.jitter_noise, self.training)
        logits_TE = linear(x_TH, self.weight)
        if self.training and self.dropout > 0:
            logits_TE = F.dropout(logits_TE, p=self.dropout)
        scores_TK, indices_TK = self.choose(logits_TE)
        # transformers multiplies outputs in float32, inputs in their dtype.
        return logits_TE, scores_TK.to(logits_TE.dtype) if self.scales_input else scores_TK, indices_TK

    def choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float32 scores `[T, K]` of the chosen experts, and their indices `[T, K]`, best first."""
        values_TE = logits_TE.float().softmax(-1) if self.chooses_by_softmax else logits_TE
        if self.balancing_bias is None:
            kept_TK, indices_TK = values_TE.topk(self.top_k, dim=-1)
        else:
            biased_TE = logits_TE.float() + self.balancing_bias.to(logits_TE.device)
            indices_TK = biased_TE.topk(self.top_k, dim=-1).indices
            kept_TK = values_TE.gather(1, indices_TK)
        scores_TK = kept_TK.float()
        if not self.chooses_by_softmax:
            scores_TK = scores_TK.softmax(-1) if self.takes_softmax else scores_TK.sigmoid()
        if self.normalizes:
            scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
        return scores_TK, indices_TK

    def _apply(self, fn, recurse=True):
        bias_E = self.balancing_bias
        super()._apply(fn, recurse)
        if bias_E is not None and self.balancing_bias.dtype != torch.float32:
            # Restore float32: in 16 bits the small updates of training would be rounded away.
            self.balancing_bias = bias_E.to(self.balancing_bias.device)
        return self

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        return f"hidden_size={self.weight.shape[1]}, num_experts={self.num_experts}, top_k={self.top_k}"


def jitter(x: torch.Tensor, half_width: float, is_training: bool) -> torch.Tensor:
    """In training, multiply `x` by uniform noise from `1 - half_width` to `1 + half_width`."""
    if not is_training or half_width == 0:
        return x
    return x * torch.empty_like(x).uniform_(1 - half_width, 1 + half_width)


class MixtureOfExperts(nn.Module):
    """A router, routed experts and maybe a shared expert, in place of a layer's feed-forward."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        factor = config.expert_capacity_factor
        # With a capacity factor of E an expert may take every token. A larger factor is the same, but may overflow.
        self.capacity_factor = None if factor is None else min(factor, config.num_local_experts)
        self.jitter_noise = config.router_jitter_noise if config.router_jitter_reaches_experts else 0.0
        self.scales_input = config.apply_router_weight_on_input
        self.experts = OutputFirstExperts(config) if config.experts_are_output_first else Experts(config)
        self.router_name = config.router_name
        self.add_module(self.router_name, Router(config))
        self.shared_expert = None
        if config.use_shared_expert:
            self.shared_expert = FeedForward(
                config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias
            )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `[..., H]` to the same shape."""
        hidden_states = jitter(hidden_states, self.jitter_noise, self.training)
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, scores_TK, indices_TK = getattr(self, self.router_name)(x_TH)
        if self.training and self.capacity_factor is not None:
            scores_TK = self._drop_over_capacity(scores_TK, indices_TK)
        if self.scales_input:
            scaled_NH = (x_TH[:, None] * scores_TK[..., None]).flatten(0, 1)
            # The inputs are scaled, so the outputs are not. `len` would be a constant of a traced program.
            ones_N1 = scaled_NH.new_ones(scaled_NH.shape[0], 1)
            routed_NH = self.experts(scaled_NH, indices_TK.reshape(-1, 1), ones_N1)
            shape = indices_TK.shape
            routed_TH = routed_NH if shape[1] == 1 else routed_NH.unflatten(0, shape).sum(1)
        else:
            routed_TH = self.experts(x_TH, indices_TK, scores_TK)
        routed = routed_TH.view(hidden_states.shape)
        # The shared expert gets `[B, T, H]`, not `[B * T, H]`: adapters may differ from row to row of the batch.
        return routed if self.shared_expert is None else self.shared_expert(hidden_states) + routed

    def _drop_over_capacity(self, scores_TK: torch.Tensor, indices_TK: torch.Tensor) -> torch.Tensor:
        """Set the scores of tokens above their expert's capacity to zero; an expert keeps its highest scores.

        If the scaled input or the output of an expert is zero, so is the result, and so are its gradients. Tokens need
        not be removed, so shapes do not depend on data.
        """
        num_experts = self.experts.num_experts
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
