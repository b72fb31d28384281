"""Reports on routers in training, and balancing by a bias for each expert, without a loss.

A load-balancing loss changes all weights. `router_balancing="bias"` gives every expert a bias instead, which affects
only the choice of experts. After each step of the optimizer, biases of experts with more tokens than the average are
lowered, the others raised (Wang et al. 2024, arXiv 2408.15664). The paper's steps have a fixed size. Here a step is
proportional to how far the load is from the average, so that biases do not oscillate, and to the standard deviation of
the logits, so that routers with large logits take no more steps.

Shapes: L mixture layers, N tokens, E experts, C = E + 3 sums: each expert's load, the router's entropy, the standard
deviation of its logits, and the number of forward passes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .losses import RouterLossMixin, expert_load, moves, stacked, token_weights


class RouterWatch:
    """Counts the tokens of every expert in training, updates the biases, and reports.

    Only biases of routers that are trained are updated. Padding and forward passes without gradients are not counted.
    Counts are summed over all processes. Gradient checkpointing may count every token twice, which does not change
    shares. A new watch of a model replaces an earlier one.
    """

    head: RouterLossMixin

    def __init__(self, model: nn.Module, rate: float = 0.05):
        """Begin to watch a model.

        Args:
            model: a llamoe mixture with a head, possibly wrapped by peft or accelerate.
            rate: how much a step lowers the bias of an expert with twice the average load, in standard deviations of a
                token's logits. No step changes a bias by more than twice as much.

        Raises:
            ValueError: a model without routers.
        """
        self.rate = rate
        self.open(model)

    def open(self, model: nn.Module) -> None:
        """Begin to watch a model, with all counts zero; raise as for a new watch."""
        self.head = _head_of(model)
        self.head.router_observer = self._count
        num_counts = self.head.config.num_local_experts + 3
        self._of_step_LC = self._of_report_LC = torch.zeros(len(self.head.routers()), num_counts)

    def close(self) -> None:
        """Stop watching."""
        if self.head.router_observer == self._count:
            self.head.router_observer = None

    def _count(self, router_logits: Sequence[torch.Tensor], attention_mask: torch.Tensor | None) -> None:
        """Count the tokens of one forward pass."""
        load_LE = expert_load(router_logits, self.head.routers(), attention_mask).float()
        logits_LNE = stacked(router_logits).float()
        weights_N = token_weights(logits_LNE, attention_mask)
        log_LNE = logits_LNE.log_softmax(-1)
        entropy_L = -(log_LNE.exp() * log_LNE).sum(-1) @ weights_N
        spread_L = logits_LNE.std(-1, correction=0) @ weights_N
        sums_L3 = torch.stack([entropy_L, spread_L, torch.ones_like(spread_L)], -1)
        self._of_step_LC = self._of_step_LC.to(load_LE.device) + torch.cat([load_LE, sums_L3], -1)

    @torch.no_grad()
    def step(self) -> torch.Tensor | None:
        """Update the biases by the counts since the last step.

        Call it in every process after each step of the optimizer; with `watch_routers` the Trainer does.

        Returns:
            each expert's share of its layer's tokens, `[L, E]` float32; None if no forward pass was counted.
        """
        counts_LC = self._of_step_LC.to(next(self.head.parameters()).device)
        if dist.is_available() and dist.is_initialized():
            # Also a process without forward passes must call this: the other processes wait for it.
            dist.all_reduce(counts_LC)
        load_LE, (_, spread_L, passes_L) = counts_LC[:, :-3], counts_LC[:, -3:].unbind(-1)
        if not passes_L[0]:
            return None
        self._of_report_LC = self._of_report_LC.to(counts_LC.device) + counts_LC
        self._of_step_LC = torch.zeros_like(counts_LC)
        # Logits may be NaN in a step that a gradient scaler skips: then biases do not change.
        spread_L = (spread_L / passes_L).nan_to_num(0.0, 0.0, 0.0)
        for router, load_E, spread in zip(self.head.routers(), load_LE, spread_L, strict=True):
            if moves(router):
                error_E = (load_E / load_E.mean().clamp(min=1e-9) - 1).clamp(-1, 1)
                # Keep the mean of the biases: only their differences affect the choice.
                step_E = self.rate * spread * (error_E - error_E.mean())
                router.balancing_bias -= step_E.to(router.balancing_bias.device)
        return _shares(load_LE)

    def report(self) -> dict[str, float]:
        """Return figures of each router since the last report, and begin the next report.

        Returns:
            for each mixture layer, under names with its index in the model, such as `router/layer_1/max_load`: the
            largest and the smallest share of tokens that an expert had (`max_load`, `min_load`); `max_violation`, the
            largest share divided by an equal share, minus 1; `dead_experts`, the number of experts without a token; and
            the mean `entropy` of the router in nats.
        """
        counts_LC, report = self._of_report_LC, {}
        self._of_report_LC = torch.zeros_like(counts_LC)
        # `moe_layers` may name layers that do not exist, if `num_hidden_layers` was reduced.
        for index, counts_C in zip(sorted(self.head.config.moe_layers), counts_LC, strict=False):
            load_E, (entropy, _, passes) = counts_C[:-3], counts_C[-3:].tolist()
            if passes:
                shares_E, name = _shares(load_E), f"router/layer_{index}"
                report[f"{name}/max_load"] = shares_E.max().item()
                report[f"{name}/min_load"] = shares_E.min().item()
                report[f"{name}/max_violation"] = shares_E.max().item() * len(shares_E) - 1
                report[f"{name}/dead_experts"] = int((load_E == 0).sum())
                report[f"{name}/entropy"] = entropy / passes
        return report


def watch_routers(trainer: Any, rate: float = 0.05) -> RouterWatch:
    """Have a `transformers.Trainer` report on its model's routers and, with `router_balancing="bias"`, balance them.

    The figures of `RouterWatch.report` go where the Trainer's own do (`report_to`, `trainer.state.log_history`).

    Args:
        trainer: whose `train()` has not been called yet.
        rate: as for `RouterWatch`.

    Raises:
        ValueError: a model without routers.
    """
    # Imported here: the import takes half a second, and a custom training loop does not need it.
    from transformers import TrainerCallback

    watch = RouterWatch(trainer.model, rate)

    class Watching(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            # With `model_init` the Trainer makes a new model here.
            watch.open(model)

        def on_optimizer_step(self, args, state, control, **kwargs):
            watch.step()

        def on_step_end(self, args, state, control, **kwargs):
            report = watch.report() if control.should_log else {}
            if report:
                trainer.log(report)
                # `log` resets this flag, without which the Trainer would not log its own figures.
                control.should_log = True

        on_epoch_end = on_step_end

        def on_train_end(self, args, state, control, **kwargs):
            watch.close()

    trainer.add_callback(Watching())
    return watch


def _head_of(model: nn.Module) -> RouterLossMixin:
    for module in model.modules():
        if isinstance(module, RouterLossMixin) and module.routers():
            return module
    raise ValueError(
        f"{type(model).__name__} has no routers to watch: give a llamoe mixture with a head, such as "
        "LlamoeForCausalLM."
    )


def _shares(load: torch.Tensor) -> torch.Tensor:
    """Return each expert's share of the tokens, `[..., E]`; zeros if all tokens were padding."""
    return load / load.sum(-1, keepdim=True).clamp(min=1)
