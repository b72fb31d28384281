"""The mixture of experts of Llama 4: only the chosen experts are computed.

Per token x: logits = x Wr; keep the `num_experts_per_tok` highest; score = sigmoid(logit) in float32; the
expert's *input* (not its output) is x * score; the result is the sum of the routed experts plus a shared expert
that sees the unscaled x (Meta's llama-models reference, models/llama4/moe.py). SwiGLU is not homogeneous, so
scaling the output instead would be another function.

transformers' `Llama4TextMoe` multiplies every token by every expert. Here only the products of chosen experts are
formed, through transformers' experts interface. The default implementation is `llamoe` (see `dispatch`);
`set_experts_implementation` selects `eager`, `grouped_mm`, `batched_mm` or another registered one. The rows passed
to it are scaled already, so its routing weights are one.

Shapes: T tokens, H hidden_size, E experts, K experts a token, N = T * K rows, I intermediate_size.
"""

import math
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.integrations.moe import (
    ExpertsInterface,
    grouped_mm_experts_forward,
    use_experts_implementation,
)
from transformers.utils import is_torchdynamo_compiling
from transformers.utils.import_utils import is_fake_tensor

from ..kernels import is_recorded
from ..layers import FeedForward, activation, apply_gate
from .dispatch import compute_dtype, compute_experts, register_paths
from .grouped_mm_limits import grouped_mm_exists, grouped_mm_takes, grouped_mm_waits


class Router(nn.Module):
    """Chooses experts for each token.

    Not an `nn.Linear`, although it holds the same weight: quantizers and LoRA's `all-linear` must skip it.
    The choice is `topk` on logits in the model's dtype, as in transformers: ties are frequent in bfloat16, and
    another order of operations would send some tokens to other experts.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.num_experts = config.num_local_experts
        self.top_k = config.num_experts_per_tok
        self.jitter_noise = config.router_jitter_noise
        self.dropout = config.router_dropout
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))

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
        top_logits_TK, indices_TK = logits_TE.topk(self.top_k, dim=-1)
        return logits_TE, top_logits_TK.float().sigmoid().to(logits_TE.dtype), indices_TK

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        return f"hidden_size={self.weight.shape[1]}, num_experts={self.num_experts}, top_k={self.top_k}"


def _grouped_or_eager(
    experts: "Experts", hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run `grouped_mm` where it supports these sizes and dtypes, else the loop over experts."""
    dtype = compute_dtype(experts.down_proj)
    seen = experts if dtype == experts.down_proj.dtype else cast("Experts", _ExpertsInDtype(experts, dtype))
    if Experts.fits_grouped_mm(seen):
        return grouped_mm_experts_forward(seen, hidden_states, top_k_index, top_k_weights)
    return experts.loop_over_experts(hidden_states, top_k_index, top_k_weights)


class _ExpertsInDtype:
    """Experts with their weights cast to another dtype: autocast does not cast the weights of `grouped_mm`."""

    def __init__(self, experts: "Experts", dtype: torch.dtype):
        self.experts = experts
        self.gate_up_proj = experts.gate_up_proj.to(dtype)
        self.down_proj = experts.down_proj.to(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)


register_paths()
EXPERTS_INTERFACE = ExpertsInterface()
"""transformers' registry of experts implementations, with `grouped_mm` guarded against unsupported sizes."""
EXPERTS_INTERFACE["grouped_mm"] = _grouped_or_eager


@use_experts_implementation(experts_interface=EXPERTS_INTERFACE, is_transposed=True)
class Experts(nn.Module):
    """The routed experts' weights, stacked and input-first (`x @ W`), as in stock checkpoints."""

    # Quantizers, peft and transformers' backends rely on these names, shapes and their order.
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    # `dispatch` accepts only experts with this mark.
    takes_llamoe_paths = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.num_experts = config.num_local_experts
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        # Gate in the first I columns, up in the last I.
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, hidden_size, 2 * intermediate_size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, intermediate_size, hidden_size))
        self.hidden_act = config.hidden_act
        self.act_fn = activation(config.hidden_act)

    def fits_grouped_mm(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> bool:
        """Whether torch's grouped product exists on a device and takes weights of these sizes and dtype.

        Args:
            device: default: the weights' device.
            dtype: dtype of the product; default: that of the weights.
        """
        weight = self.down_proj
        device = weight.device if device is None else device
        dtype = weight.dtype if dtype is None else dtype
        if not grouped_mm_exists(device) or dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return False
        if device.type == "cpu" and dtype == torch.float16:
            # The CPU multiplies input-first float16 weights in a scalar loop.
            return False
        has_shapes_only = is_torchdynamo_compiling() or device.type == "meta" or is_fake_tensor(weight)
        if has_shapes_only and dtype != torch.bfloat16:
            # torch 2.11 does not know the result's shape for other dtypes.
            return False
        if is_torchdynamo_compiling() and grouped_mm_waits(device):
            # A compiler may put the product into a CUDA graph, which cannot wait for the host.
            return False
        # Rows and their strides must be multiples of 16 bytes; a cast makes new, contiguous rows.
        if any(size * dtype.itemsize % 16 for size in weight.shape[1:]):
            return False
        stacks = (self.gate_up_proj, weight) if dtype == weight.dtype else ()
        return all(grouped_mm_takes(stack, device) for stack in stacks)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Send each row to its experts.

        Args:
            hidden_states: `[N, H]`.
            top_k_index: `[N, k]` experts of each row; ids of `num_experts` and above are skipped.
            top_k_weights: `[N, k]` factors of the experts' outputs.

        Returns:
            `[N, H]`, summed over the k experts.
        """
        # The decorator has set `config`.
        config = cast(PreTrainedConfig, self.config)
        # Outside of a model nothing has chosen an implementation.
        if config._experts_implementation is None:
            return compute_experts(self, hidden_states, top_k_index, top_k_weights)
        return self.loop_over_experts(hidden_states, top_k_index, top_k_weights)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return apply_gate(self.act_fn, *gate_up.chunk(2, dim=-1))

    def loop_over_experts(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sort the rows by expert, then one product for each hit expert: the `eager` implementation."""
        # The same, with shapes that do not depend on the routing.
        if is_recorded(hidden_states):
            return compute_experts(self, hidden_states, top_k_index, top_k_weights, path="loop")
        num_rows, top_k = top_k_index.shape
        expert_ids = top_k_index.reshape(-1)
        order = expert_ids.argsort(stable=True)
        counts = torch.bincount(
            expert_ids.clamp(max=self.num_experts), minlength=self.num_experts + 1
        ).tolist()
        order = order[: num_rows * top_k - counts.pop()]
        rows = order // top_k
        # `unbind` once: indexing the stack per expert would write a full-size gradient for each of them.
        weights = zip(self.gate_up_proj.unbind(0), self.down_proj.unbind(0), strict=True)
        pieces = list(zip(hidden_states[rows].split(counts), weights, strict=True))
        # Without any row the first expert runs on zero rows, which keeps the weights in the autograd graph.
        hit = [piece for piece in pieces if len(piece[0])] or pieces[:1]
        outputs = [self._apply_gate(x @ gate_up) @ down for x, (gate_up, down) in hit]
        weighted = torch.cat(outputs) * top_k_weights.reshape(-1)[order, None]
        result = torch.zeros_like(hidden_states)
        return result.index_add(0, rows, weighted.to(result.dtype))

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        _, intermediate_size, hidden_size = self.down_proj.shape
        return f"num_experts={self.num_experts}, {hidden_size=}, {intermediate_size=}"


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
        if self.router.top_k == 1:
            scaled_NH, indices_N1 = x_TH * scores_TK, indices_TK
        else:
            scaled_NH = (x_TH[:, None] * scores_TK[..., None]).flatten(0, 1)
            indices_N1 = indices_TK.reshape(-1, 1)
        routed_NH = self.experts(scaled_NH, indices_N1, torch.ones_like(indices_N1, dtype=scaled_NH.dtype))
        if self.router.top_k > 1:
            routed_NH = routed_NH.view(*indices_TK.shape, x_TH.shape[-1]).sum(1)
        return (self.shared_expert(x_TH) + routed_NH).view(hidden_states.shape)

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
