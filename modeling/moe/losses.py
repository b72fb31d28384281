"""Router losses, and how many tokens chose each expert.

Every function takes the router logits that the model returns (`output_router_logits=True`): one tensor
`[B * T, E]` a mixture layer. Losses are computed for each layer and averaged: pooling the layers first, as transformers
does for Mixtral, lets the overload of one layer hide that of another.

Shapes: B batch, T tokens, N = B * T, E experts, K experts a token.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from transformers import PreTrainedModel
from transformers.utils import is_torchdynamo_compiling, logging

from .layer import MixtureOfExperts, Router

logger = logging.get_logger("llamoe")


def moves(router: Router) -> bool:
    """Whether training moves a router's bias. A frozen router keeps its choices: an adapter's file has no bias."""
    return router.balancing_bias is not None and router.weight.requires_grad


def stacked(of_layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of each layer as one, `[layers, ...]`; layers may be on different devices."""
    return torch.stack([each.to(of_layers[0].device) for each in of_layers])


def load_balancing_loss(
    router_logits: Sequence[torch.Tensor],
    routers: Sequence[Router],
    attention_mask: torch.Tensor | None = None,
    is_pooled: bool = False,
) -> torch.Tensor:
    """Switch Transformer's balancing loss (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6).

    For each layer `E * sum_e f_e * P_e`: f_e is how many times a token chose expert e, P_e the mean router
    probability (softmax) of e, both over the tokens that are not padding. A perfectly even router gives
    `num_experts_per_tok`, a collapsed one up to E times that.

    Args:
        router_logits: one `[B * T, E]` a layer.
        routers: each layer's, which know how experts are chosen.
        attention_mask: `[B, T]`, zeros on padding.
        is_pooled: whether f_e and P_e are means over the tokens of all layers, as transformers has it for Mixtral.

    Returns:
        scalar float32: the mean over the layers.
    """
    fractions, probabilities = [], []
    for logits_NE, router in zip(router_logits, routers, strict=True):
        weights_N = token_weights(logits_NE, attention_mask)
        fractions.append(weights_N @ _choices(logits_NE, router))
        probabilities.append(weights_N @ logits_NE.float().softmax(-1))
    fractions_LE, probabilities_LE = stacked(fractions), stacked(probabilities)
    if is_pooled:
        fractions_LE, probabilities_LE = fractions_LE.mean(0), probabilities_LE.mean(0)
    return fractions_LE.shape[-1] * (fractions_LE * probabilities_LE).sum(-1).mean()


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
    losses = [
        token_weights(logits, attention_mask) @ logits.float().logsumexp(-1).square()
        for logits in router_logits
    ]
    return stacked(losses).mean()


def expert_load(
    router_logits: Sequence[torch.Tensor],
    routers: Sequence[Router],
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count how many tokens chose each expert, before any capacity limit.

    Args:
        router_logits: one `[B * T, E]` a layer.
        routers: each layer's, which know how experts are chosen.
        attention_mask: `[B, T]`, zeros on padding, which is not counted.

    Returns:
        `[layers, E]` int64.
    """
    counts = []
    for logits_NE, router in zip(router_logits, routers, strict=True):
        real_N = token_weights(logits_NE, attention_mask) > 0
        counts.append((_choices(logits_NE, router) * real_N[:, None]).sum(0).long())
    return stacked(counts)


def router_entropy(
    router_logits: Sequence[torch.Tensor], attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean entropy of the router's probabilities (softmax), in nats: `[layers]` float32.

    Zero for a router that is always sure, `log E` for one that never prefers an expert.
    """
    entropies = []
    for logits_NE in router_logits:
        log_NE = logits_NE.float().log_softmax(-1)
        entropies.append(token_weights(logits_NE, attention_mask) @ -(log_NE.exp() * log_NE).sum(-1))
    return stacked(entropies)


def _choices(logits_NE: torch.Tensor, router: Router) -> torch.Tensor:
    return torch.zeros_like(logits_NE, dtype=torch.float32).scatter_(1, router.choose(logits_NE)[1], 1.0)


def token_weights(logits_NE: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """`[N]` float32: one over the number of real tokens on real tokens, zero on padding."""
    num_tokens = logits_NE.shape[0]
    if attention_mask is None:
        return logits_NE.new_full((num_tokens,), 1.0 / max(num_tokens, 1), dtype=torch.float32)
    weights_N = attention_mask.reshape(-1).to(device=logits_NE.device, dtype=torch.float32)
    return weights_N / weights_N.sum().clamp(min=1.0)


class RouterLossMixin(PreTrainedModel):
    """Mixin of heads that add router losses to their own, as the config asks.

    Attributes:
        router_observer: called in every pass of training, if there is one, with the router logits and the attention
            mask that `expert_load` takes.
    """

    router_observer: Callable[..., None] | None = None
    _has_experts: ClassVar[bool]

    def _is_observed(self) -> bool:
        """Whether an observer wants this pass' router logits. Passes without gradients train nothing."""
        if not (self.training and self._has_experts and torch.is_grad_enabled()):
            return False
        is_idle = self.router_observer is None and self.config.router_balancing is not None
        if is_idle and not is_torchdynamo_compiling() and any(moves(router) for router in self.routers()):
            logger.warning_once(
                f"router_balancing = {self.config.router_balancing!r}, but nothing moves the routers' biases: call "
                "llamoe.watch_routers(trainer) before training, or step() of llamoe.RouterWatch(model) after each "
                "step of the optimizer."
            )
        return self.router_observer is not None

    def routers(self) -> list[Router]:
        """The router of each mixture layer; where peft trains a copy of it, that copy."""
        found = [
            getattr(module, module.router_name)
            for module in self.modules()
            if isinstance(module, MixtureOfExperts)
        ]
        return [router.get_base_layer() if hasattr(router, "get_base_layer") else router for router in found]

    def _option(self, name: str, given: bool | None) -> bool:
        return bool(getattr(self.config, name, False) if given is None else given)

    def _has_router_losses(self, balance: bool) -> bool:
        aux_coef, z_coef = (getattr(self.config, f"router_{name}_loss_coef", 0.0) for name in ("aux", "z"))
        return bool(z_coef or (balance and aux_coef))

    def _with_router_losses(
        self,
        loss: torch.Tensor | None,
        router_logits: tuple[torch.Tensor, ...],
        token_mask: torch.Tensor | None,
        balance: bool,
        share: torch.Tensor | float = 1.0,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The loss with the router losses added, each times its coefficient; and the load-balancing loss itself.

        Args:
            loss: the head's own; None without labels, and then returned as it is.
            router_logits: one `[B * T, E]` a mixture layer.
            token_mask: `[B, T]`, zeros on padding.
            balance: whether the load-balancing loss is asked for.
            share: further factor of both router losses.

        Raises:
            ValueError: the router losses would reach no router.
        """
        aux_loss = None
        if self.router_observer is not None and self._is_observed():
            self.router_observer([logits.detach() for logits in router_logits], token_mask)
        if balance:
            is_pooled = self.config.pools_router_losses
            aux_loss = load_balancing_loss(router_logits, self.routers(), token_mask, is_pooled)
        if loss is not None and self._has_router_losses(balance):
            self._check_router_gradient(router_logits)
            if aux_loss is not None:
                loss = loss + share * self.config.router_aux_loss_coef * aux_loss.to(loss.device)
            if self.config.router_z_loss_coef:
                z_loss = router_z_loss(router_logits, token_mask).to(loss.device)
                loss = loss + share * self.config.router_z_loss_coef * z_loss
        return loss, aux_loss

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
