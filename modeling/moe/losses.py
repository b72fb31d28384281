"""Router losses, and how many tokens chose each expert.

Every function takes the router logits that the model returns (`output_router_logits=True`): one tensor
`[B * T, E]` a mixture layer. Losses are computed for each layer and averaged: pooling the layers first would let
the overload of one layer hide that of another.

Shapes: B batch, T tokens, N = B * T, E experts, K experts a token.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .layer import Router


def load_balancing_loss(
    router_logits: Sequence[torch.Tensor],
    num_experts_per_tok: int,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Switch Transformer's balancing loss (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6).

    For each layer `E * sum_e f_e * P_e`: f_e is how many times a token chose expert e, P_e the mean router
    probability (softmax) of e, both over the tokens that are not padding. A perfectly even router gives
    `num_experts_per_tok`, a collapsed one up to E times that.

    Args:
        router_logits: one `[B * T, E]` a layer.
        num_experts_per_tok: experts a token is sent to.
        attention_mask: `[B, T]`, zeros on padding.

    Returns:
        scalar float32: the mean over the layers.
    """
    losses = []
    for logits_NE in router_logits:
        weights_N = _token_weights(logits_NE, attention_mask)
        probabilities_NE = logits_NE.float().softmax(-1)
        choices_NE = _choices(logits_NE, num_experts_per_tok)
        fractions_E = weights_N @ choices_NE
        mean_probabilities_E = weights_N @ probabilities_NE
        losses.append(logits_NE.shape[-1] * (fractions_E * mean_probabilities_E).sum())
    return _mean_over_layers(losses)


def router_z_loss(
    router_logits: Sequence[torch.Tensor], attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean squared log-sum-exp of the logits (Zoph et al. 2022, ST-MoE, arXiv 2202.08906, equation 5).

    Args:
        router_logits: one `[B * T, E]` a layer.
        attention_mask: `[B, T]`, zeros on padding.

    Returns:
        scalar float32: the mean over tokens and layers.
    """
    return _mean_over_layers(
        [
            _token_weights(logits, attention_mask) @ logits.float().logsumexp(-1).square()
            for logits in router_logits
        ]
    )


def expert_load(
    router_logits: Sequence[torch.Tensor],
    num_experts_per_tok: int,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count how many tokens chose each expert, before any capacity limit.

    Args:
        router_logits: one `[B * T, E]` a layer.
        num_experts_per_tok: experts a token is sent to.
        attention_mask: `[B, T]`, zeros on padding, which is not counted.

    Returns:
        `[layers, E]` int64.
    """
    counts = []
    for logits_NE in router_logits:
        real_N = _token_weights(logits_NE, attention_mask) > 0
        counts.append((_choices(logits_NE, num_experts_per_tok) * real_N[:, None]).sum(0).long())
    return torch.stack(counts)


def _choices(logits_NE: torch.Tensor, num_experts_per_tok: int) -> torch.Tensor:
    chosen_NK = logits_NE.topk(num_experts_per_tok, dim=-1).indices
    return torch.zeros_like(logits_NE, dtype=torch.float32).scatter_(1, chosen_NK, 1.0)


def _token_weights(logits_NE: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """`[N]` float32: one over the number of real tokens on real tokens, zero on padding."""
    num_tokens = logits_NE.shape[0]
    if attention_mask is None:
        return logits_NE.new_full((num_tokens,), 1.0 / max(num_tokens, 1), dtype=torch.float32)
    weights_N = attention_mask.reshape(-1).to(device=logits_NE.device, dtype=torch.float32)
    return weights_N / weights_N.sum().clamp(min=1.0)


def _mean_over_layers(losses: list[torch.Tensor]) -> torch.Tensor:
    # Layers may be on different devices.
    device = losses[0].device
    return torch.stack([loss.to(device) for loss in losses]).mean()


class TrainsRouters(PreTrainedModel):
    """Mixin of heads that add router losses to their own, as the config asks."""

    def _option(self, name: str, given: bool | None) -> bool:
        return bool(getattr(self.config, name, False) if given is None else given)

    def _has_router_losses(self, balance: bool) -> bool:
        aux_coef, z_coef = (getattr(self.config, f"router_{name}_loss_coef", 0.0) for name in ("aux", "z"))
        return bool(z_coef or (balance and aux_coef))

    def _add_router_losses(
        self,
        loss: torch.Tensor,
        aux_loss: torch.Tensor | None,
        router_logits: tuple[torch.Tensor, ...],
        token_mask: torch.Tensor | None,
        share: torch.Tensor | float = 1.0,
    ) -> torch.Tensor:
        """The loss plus z-loss and, if given, load-balancing loss, each times its coefficient.

        Args:
            loss: the head's own.
            aux_loss: the load-balancing loss; None: not added.
            router_logits: one `[B * T, E]` a mixture layer.
            token_mask: `[B, T]`, zeros on padding.
            share: further factor of both router losses.
        """
        if self._has_router_losses(aux_loss is not None):
            self._check_router_gradient(router_logits)
        if aux_loss is not None:
            loss = loss + share * self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        if self.config.router_z_loss_coef:
            z_loss = router_z_loss(router_logits, token_mask).to(loss.device)
            loss = loss + share * self.config.router_z_loss_coef * z_loss
        return loss

    def _check_router_gradient(self, router_logits: tuple[torch.Tensor, ...]) -> None:
        """Refuse to train on router losses whose gradient would reach no router.

        Reentrant checkpointing first runs the layers without a graph, so these logits have no gradient.
        """
        if not (self.training and torch.is_grad_enabled()) or router_logits[0].requires_grad:
            return
        if any(router.weight.requires_grad for router in self.modules() if isinstance(router, Router)):
            raise ValueError(
                "The router losses (output_router_logits, router_z_loss_coef) have no gradient under reentrant "
                "gradient checkpointing: model.gradient_checkpointing_enable({'use_reentrant': False})."
            )
