"""Watching routers while they train, and balancing them without a loss, by a bias of each expert that moves.

A loss that asks for balance also pulls at everything else. Instead `router_balancing="bias"` gives every expert a bias
that counts where experts are chosen and nowhere else; after each step of the optimizer experts with too many tokens
get a lower one (Wang et al. 2024, arXiv 2408.15664). The paper's step has one size; here a bias moves in proportion to
the error and to the spread of the logits, so that it neither swings around balance nor takes longer where a router is
surer.

Shapes: L mixture layers, E experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .losses import RouterLossMixin, expert_load, moves, router_entropy, stacked, token_weights


class RouterWatch:
    """Counts the tokens of every expert in training, moves biases, and reports.

    A bias moves where a router learns and has one. Padding is not counted, nor are passes without gradients. Counts are
    those of all processes. With `torch.compile` or gradient checkpointing nothing changes but that checkpointing may
    count every token twice, which leaves all shares alike.
    """

    def __init__(self, model: nn.Module, rate: float = 0.05):
        """Begin to watch a model.

        Args:
            model: one of ours with a mixture and a head, or what peft or accelerate made of it.
            rate: how far a bias moves in a step for an expert that has twice its share, in standard deviations of a
                token's logits; no bias moves more than twice as far.

        Raises:
            ValueError: a model without routers or with another watch, or a rate that is not positive.
        """
        if not rate > 0:
            raise ValueError(
                f"rate = {rate}: a bias must be able to move; give a number above 0, such as 0.05."
            )
        self.rate = rate
        self._of_step: _Counts | None = None
        self._of_report: _Counts | None = None
        self.head = _head_of(model)
        self.open(model)

    def open(self, model: nn.Module) -> None:
        """Begin to watch a model, in place of the one before; raises as for a new watch."""
        head = _head_of(model)
        if head.router_observer not in (None, self._count):
            raise ValueError(f"{type(model).__name__} has a watch already: close() that one first.")
        self.close()
        self.head, head.router_observer = head, self._count

    def close(self) -> None:
        """Stop watching."""
        if self.head.router_observer == self._count:
            self.head.router_observer = None

    def _count(
        self,
        router_logits: Sequence[torch.Tensor],
        attention_mask: torch.Tensor | None,
    ) -> None:
        """Count one pass."""
        load = expert_load(router_logits, self.head.routers(), attention_mask).float()
        entropy_L = router_entropy(router_logits, attention_mask)
        spread_L = stacked(
            [
                token_weights(logits, attention_mask) @ logits.float().std(-1, correction=0)
                for logits in router_logits
            ]
        )
        self._of_step = _add(self._of_step, (load, torch.stack([entropy_L, spread_L]), 1))

    def step(self) -> torch.Tensor | None:
        """Move the biases by what was counted since the last step, in every process.

        Call it after each step of the optimizer; `watch_routers` has the Trainer do so.

        Returns:
            each expert's share of its layer's tokens, `[L, E]` float32; None where no pass was counted.
        """
        # A process whose passes were none takes part all the same: the others wait for it.
        counts = _sum_of_processes(self._of_step or self._nothing())
        if not counts[2]:
            return None
        self._of_step, self._of_report = None, _add(self._of_report, counts)
        load, (_, spread_L), passes = counts
        with torch.no_grad():
            # Logits that are not numbers, as of a step that a scaler of gradients skips, move nothing.
            spreads = (spread_L / passes).nan_to_num(0.0, 0.0, 0.0)
            for router, load_E, spread in zip(self.head.routers(), load, spreads, strict=True):
                if moves(router):
                    error_E = (load_E / load_E.mean().clamp(min=1e-9) - 1).clamp(-1, 1)
                    # The mean stays: only differences choose.
                    step_E = self.rate * spread * (error_E - error_E.mean())
                    router.balancing_bias -= step_E.to(router.balancing_bias.device)
        return _shares(load)

    def _nothing(self) -> "_Counts":
        config, device = self.head.config, next(self.head.parameters()).device
        num_layers = len(self.head.routers())
        return (
            torch.zeros(num_layers, config.num_local_experts, device=device),
            torch.zeros(2, num_layers, device=device),
            0,
        )

    def report(self) -> dict[str, float]:
        """What happened since the last report, and begin the next.

        Returns:
            for each mixture layer, by its index in the model: the largest and the smallest share of tokens that an
            expert had (`max_load`, `min_load`), `max_violation` (how far the largest is above an equal share, in equal
            shares), `dead_experts` (without any token) and the router's mean `entropy` in nats.
        """
        if self._of_report is None:
            return {}
        load, (entropy, _), passes = self._of_report
        self._of_report = None
        shares = _shares(load)
        found = {}
        # The list may name layers past the last, where their number was made smaller.
        layers = sorted(self.head.config.moe_layers)
        for index, shares_E, load_E, entropy_sum in zip(layers, shares, load, entropy, strict=False):
            name = f"router/layer_{index}"
            found[f"{name}/max_load"] = shares_E.max().item()
            found[f"{name}/min_load"] = shares_E.min().item()
            found[f"{name}/max_violation"] = shares_E.max().item() * len(shares_E) - 1
            found[f"{name}/dead_experts"] = int((load_E == 0).sum())
            found[f"{name}/entropy"] = entropy_sum.item() / passes
        return found


def watch_routers(trainer: Any, rate: float = 0.05) -> RouterWatch:
    """Have a `transformers.Trainer` report on its model's routers and, with `router_balancing="bias"`, balance them.

    Its reports go where the Trainer's own do (`report_to`, `trainer.state.log_history`), under names like
    `router/layer_1/max_violation`: see `RouterWatch.report`.

    Args:
        trainer: before its `train()`.
        rate: as for `RouterWatch`.

    Raises:
        ValueError: a model without routers or with another watch, or a rate that is not positive.
    """
    # The import takes half a second, and who trains with a loop of their own does not need it.
    from transformers import TrainerCallback

    watch = RouterWatch(trainer.model, rate)

    class Watching(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            # With `model_init` it is a new one.
            watch.open(model)

        def on_optimizer_step(self, args, state, control, **kwargs):
            watch.step()

        def on_step_end(self, args, state, control, **kwargs):
            report = watch.report() if control.should_log else {}
            if report:
                trainer.log(report)
                # Logging takes the Trainer's own turn for done.
                control.should_log = True

        on_epoch_end = on_step_end

        def on_train_end(self, args, state, control, **kwargs):
            watch.close()

    trainer.add_callback(Watching())
    return watch


_Counts = tuple[torch.Tensor, torch.Tensor, int]
"""Load `[L, E]`, sums of the routers' entropies and of their logits' standard deviations `[2, L]`, number of passes."""


def _head_of(model: nn.Module) -> RouterLossMixin:
    for module in model.modules():
        if isinstance(module, RouterLossMixin) and module.routers():
            return module
    raise ValueError(
        f"{type(model).__name__} has no routers to watch: it is not a mixture of ours with a head."
    )


def _shares(load: torch.Tensor) -> torch.Tensor:
    """Shares of the tokens, `[L, E]`; zeros where there were none but padding."""
    return load / load.sum(-1, keepdim=True).clamp(min=1)


def _add(counts: _Counts | None, more: _Counts) -> _Counts:
    if counts is None:
        return more
    return counts[0] + more[0], counts[1] + more[1], counts[2] + more[2]


def _sum_of_processes(counts: _Counts) -> _Counts:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return counts
    load, sums, passes = counts
    flat = torch.cat([load.flatten(), sums.flatten(), sums.new_tensor([passes])])
    dist.all_reduce(flat)
    flat_load, flat_sums, flat_passes = flat.split((load.numel(), sums.numel(), 1))
    return flat_load.view_as(load), flat_sums.view_as(sums), int(flat_passes)
