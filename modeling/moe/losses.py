"""Router losses, and how many tokens chose each expert.

Every function takes the router logits that the model returns (`output_router_logits=True`): one tensor `[B * T, E]`
for each mixture layer. Losses are computed for each layer and averaged. transformers pools the layers first for
Mixtral: then an expert's overload in one layer and its lack of tokens in another cancel.

Shapes: L mixture layers, B batch, T tokens, N = B * T, E experts.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from transformers import PreTrainedModel
from transformers.utils import is_torchdynamo_compiling, logging

from .layer import MixtureOfExperts, Router

logger = logging.get_logger("llamoe")


def moves(router: Router) -> bool:
    """Return True if training updates a router's bias: not of frozen routers, since adapters' files have no biases."""
    return router.balancing_bias is not None and router.weight.requires_grad


def stacked(router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the logits of all layers, which may be on different devices, as one tensor `[L, N, E]`."""
    return torch.stack([logits_NE.to(router_logits[0].device) for logits_NE in router_logits])


def load_balancing_loss(
    router_logits: Sequence[torch.Tensor],
    routers: Sequence[Router],
    attention_mask: torch.Tensor | None = None,
    is_pooled: bool = False,
) -> torch.Tensor:
    """Compute the Switch Transformer's balancing loss (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6).

    For each layer it is `E * sum_e f_e * P_e`: f_e is the share of tokens that chose expert e, P_e the mean router
    probability (softmax) of e, both over the tokens that are not padding. The loss is `num_experts_per_tok` if all
    experts are chosen equally often, and up to E if all tokens choose the same ones.

    Args:
        router_logits: one `[B * T, E]` for each layer.
        routers: the router of each layer.
        attention_mask: `[B, T]`, zeros on padding.
        is_pooled: average f_e and P_e over the layers before they are multiplied, as transformers does for Mixtral.

    Returns:
        scalar float32: the mean over the layers.
    """
    logits_LNE = stacked(router_logits)
    weights_N = token_weights(logits_LNE, attention_mask)
    fractions_LE = weights_N @ _choices(logits_LNE, routers)
    probabilities_LE = weights_N @ logits_LNE.float().softmax(-1)
    if is_pooled:
        fractions_LE, probabilities_LE = fractions_LE.mean(0), probabilities_LE.mean(0)
    return fractions_LE.shape[-1] * (fractions_LE * probabilities_LE).sum(-1).mean()


def router_z_loss(
    router_logits: Sequence[torch.Tensor], attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the mean squared log-sum-exp of the logits (Zoph et al. 2022, arXiv 2202.08906, equation 5).

    Args:
        router_logits: one `[B * T, E]` for each layer.
        attention_mask: `[B, T]`, zeros on padding.

    Returns:
        scalar float32: the mean over tokens and layers.
    """
    logits_LNE = stacked(router_logits)
    squares_LN = logits_LNE.float().logsumexp(-1).square()
    return (squares_LN @ token_weights(logits_LNE, attention_mask)).mean()


def expert_load(
    router_logits: Sequence[torch.Tensor],
    routers: Sequence[Router],
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count how many tokens chose each expert, before any capacity limit: `[L, E]` int64.

    Arguments are as for `load_balancing_loss`.
    """
    logits_LNE = stacked(router_logits)
    is_real_N = token_weights(logits_LNE, attention_mask) > 0
    return (_choices(logits_LNE, routers) * is_real_N[:, None]).sum(1).long()


def _choices(logits_LNE: torch.Tensor, routers: Sequence[Router]) -> torch.Tensor:
    """Return `[L, N, E]` float32: 1 where a token chose an expert, else 0."""
    indices = [router.choose(logits_NE)[1] for logits_NE, router in zip(logits_LNE, routers, strict=True)]
    return torch.zeros_like(logits_LNE, dtype=torch.float32).scatter_(-1, torch.stack(indices), 1.0)


def token_weights(logits_LNE: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return each token's weight in a mean over the tokens that are not padding, `[N]` float32; zero for padding."""
    num_tokens = logits_LNE.shape[1]
    if attention_mask is None:
        return logits_LNE.new_full((num_tokens,), 1.0 / max(num_tokens, 1), dtype=torch.float32)
    weights_N = attention_mask.reshape(-1).to(device=logits_LNE.device, dtype=torch.float32)
    return weights_N / weights_N.sum().clamp(min=1.0)


class RouterLossMixin(PreTrainedModel):
    """A mixin for heads that adds the router losses of the config to the head's own loss.

    Attributes:
        router_observer: a function that is called in every forward pass of training with the router logits and the
            attention mask, as `expert_load` takes them; or None.
    """

    router_observer: Callable[..., None] | None = None
    _has_experts: ClassVar[bool]

    def _is_observed(self) -> bool:
        """Return True if the router logits of this forward pass are for `router_observer`: only in training."""
        if not (self.training and self._has_experts and torch.is_grad_enabled()):
            return False
        is_idle = self.router_observer is None and self.config.router_balancing is not None
        if is_idle and not is_torchdynamo_compiling() and any(moves(router) for router in self.routers()):
            logger.warning_once(
                f"router_balancing = {self.config.router_balancing!r}, but nothing updates the routers' biases: call "
                "llamoe.watch_routers(trainer) before training, or step() of llamoe.RouterWatch(model) after each "
                "step of the optimizer."
            )
        return self.router_observer is not None

    def routers(self) -> list[Router]:
        """Return the router of each mixture layer; of routers that peft wraps, the copy that peft trains."""
        mixtures = [module for module in self.modules() if isinstance(module, MixtureOfExperts)]
        routers = [getattr(mixture, mixture.router_name) for mixture in mixtures]
        return [
            router.get_base_layer() if hasattr(router, "get_base_layer") else router for router in routers
        ]

    def _option(self, name: str, value: bool | None) -> bool:
        """Return an option of a forward pass, or its default in the config if it is None."""
        return bool(getattr(self.config, name, False) if value is None else value)

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
        """Return the loss plus the router losses times their coefficients, and the load-balancing loss.

        Args:
            loss: the head's own loss; None without labels, and then None is returned.
            router_logits: one `[B * T, E]` for each mixture layer.
            token_mask: `[B, T]`, zeros on padding.
            balance: compute the load-balancing loss.
            share: further factor of both router losses.

        Raises:
            ValueError: the router losses would have no gradient.
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
        """Raise a `ValueError` if routers are trained on router losses without a gradient.

        Reentrant checkpointing runs the layers without a graph, so the logits that it returns have no gradient.
        """
        if not (self.training and torch.is_grad_enabled()) or router_logits[0].requires_grad:
            return
        if any(router.weight.requires_grad for router in self.modules() if isinstance(router, Router)):
            raise ValueError(
                "The router losses (output_router_logits, router_z_loss_coef) have no gradient under reentrant "
                "gradient checkpointing: model.gradient_checkpointing_enable({'use_reentrant': False})."
            )
