"""The second half of a decoder layer for few rows: a norm, and a feed-forward or a mixture of experts.

Shapes: T tokens, H hidden size, E experts, K experts a token, N = T * K rows of experts.
"""

from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from .cpp_kernels import Matrix, adapted, plain_matrix, prepare
from .cpp_layer import (
    Mixture,
    Routing,
    Swiglu,
    normalized_mixture,
    normalized_swiglu,
    prepare_mixture,
    prepare_routing,
    prepare_swiglu,
    route,
    swiglu,
)
from .cpu import has_hooks, is_plain, is_silu
from .few_rows_pass import Linears, Pass
from .known_modules import base_of, formula_of, unadapted, unwatched_formula

_SWITCHES = ("takes_softmax", "chooses_by_softmax", "normalizes", "scales_input")


class FeedForward(NamedTuple):
    """What is known of a feed-forward and the norm before, if there is one."""

    norm: int | None
    """Address of the norm's weight; None where its module must be called."""
    inputs: Linears
    """Gate and up."""
    output: Linears
    whole: Swiglu | None
    """All three matrices, where the feed-forward is one call."""


class MixtureHalf(NamedTuple):
    """What is known of a mixture and the norm before."""

    norm: int | None
    """As in `FeedForward`."""
    routing: Routing | None
    """What chooses experts; None where the router must be called."""
    whole: Mixture | None
    """Router and experts, where the whole is one call."""


class SecondHalves(Pass):
    """A pass that computes second halves."""

    def feed_forward(self, norm: Any, module: Any, x: torch.Tensor) -> torch.Tensor | None:
        """`x + module(norm(x))` of a feed-forward or a mixture; None where the modules must be called."""
        formula = formula_of(module)
        if not self._takes(x):
            return None
        if formula == "feed_forward":
            return self._feed_forward(module, x, norm)
        return self._mixture(norm, module, x) if formula == "mixture" else None

    def _feed_forward(self, module: Any, x: torch.Tensor, norm: Any = None) -> torch.Tensor | None:
        """`module(x)`, or `x + module(norm(x))`; None where both must be called."""
        known = self._feed_forward_half(module, norm)
        if known is None:
            return module(x) if norm is None else None
        if known.whole is not None and known.norm is not None:
            return normalized_swiglu(x, known.norm, norm.eps, known.whole)
        rows = x if norm is None else self._normalize(norm, known.norm, x)
        if known.whole is not None and self._is_readable(rows) and rows.shape == x.shape:
            y = swiglu(rows, known.whole).view(x.shape)
        else:
            gate, up, down, act_fn = _parts_of_feed_forward(module)
            gated, upped = self._multiply((gate, up), known.inputs, rows)
            y = self._multiply((down,), known.output, act_fn(gated) * upped)[0]
        return y if norm is None else x + y

    def _feed_forward_half(self, module: Any, norm: Any) -> FeedForward | None:
        """What is known of a feed-forward, and of the norm before, if it is given."""
        *linears, act_fn = _parts_of_feed_forward(module)

        def work_out() -> FeedForward:
            matrices = [self._matrix(linear) for linear in linears]
            is_known = self.has_kernels and is_silu(act_fn) and None not in matrices
            whole = prepare_swiglu(*matrices) if is_known else None
            fits = whole is not None and whole.inputs == whole.outputs == self.size
            inputs = self._linears(*linears[:2])
            address = None if norm is None else self._norm(norm, inputs)
            return FeedForward(address, inputs, self._linears(linears[2]), whole if fits else None)

        return self._recall([module, *linears, act_fn, *([] if norm is None else [norm])], work_out)

    def _mixture(self, norm: Any, module: Any, x: torch.Tensor) -> torch.Tensor | None:
        """`x + module(norm(x))` of a mixture; None where both must be called."""
        known = self._mixture_half(norm, module)
        if known is None:
            return None
        router, shared, experts = getattr(module, module.router_name), module.shared_expert, module.experts
        is_trained, is_whole = may_have_noise(module), known.whole is not None and known.norm is not None
        if is_whole and not is_trained and self._is_plain_way(base_of(experts)):
            return normalized_mixture(x, known.norm, norm.eps, known.whole)
        if shared is not None and formula_of(shared) == "feed_forward":
            shared = partial(self._feed_forward, shared)
        compute = partial(self._compute_experts, experts)
        if known.routing is None or is_trained:
            return x + module.mix(self._normalize(norm, known.norm, x), router, compute, shared)
        rows = x if known.norm is not None else norm(x)
        if not self._is_readable(rows) or rows.shape != x.shape:
            return x + module.mix(rows, router, compute, shared)
        rows, *chosen = route(rows, known.norm, 0.0 if known.norm is None else norm.eps, known.routing)
        return x + module.mix(rows, lambda _: (None, *chosen), compute, shared)

    def _mixture_half(self, norm: Any, module: Any) -> MixtureHalf | None:
        """What is known of a mixture and the norm before."""
        router, shared, experts = getattr(module, module.router_name), module.shared_expert, module.experts
        watched = [module, norm, router, experts, *experts._modules.values()]
        if shared is not None:
            watched += [shared, *shared._modules.values()]

        def work_out() -> MixtureHalf:
            matrix = self._router(router)
            inputs = Linears(None, []) if matrix is None else Linears(prepare([matrix]), [])
            routing = None if matrix is None else _routing(router, matrix)
            whole = None if routing is None else self._whole_mixture(routing, matrix, experts, shared)
            return MixtureHalf(self._norm(norm, inputs), routing, whole)

        return self._recall(watched, work_out)

    def _whole_mixture(self, routing: Routing, router: Matrix, experts: Any, shared: Any) -> Mixture | None:
        """The experts of a mixture, where one call computes it."""
        experts, adapters = unadapted(experts)
        if (
            not getattr(experts, "takes_llamoe_paths", False)
            or has_hooks(experts)
            or not is_silu(experts.act_fn)
        ):
            return None
        fits = self.takes_packed if experts.is_packed else self.takes_plain
        stacks = experts.for_kernel() if fits and experts.dtype == self.dtype else None
        if stacks is None or experts.num_experts != router.outputs:
            return None
        if adapters:
            stacks = stacks._replace(first=[*map(adapted, stacks.first, adapters)])
            if None in stacks.first:
                return None
        matrices = None
        if shared is not None:
            if unwatched_formula(shared) != "feed_forward" or not is_silu(shared.act_fn):
                return None
            matrices = [self._matrix(shared._modules[name]) for name in ("gate_proj", "up_proj", "down_proj")]
            if None in matrices:
                return None
        return prepare_mixture(routing, router, stacks, matrices)

    def _is_plain_way(self, experts: Any) -> bool:
        """Whether llamoe computes experts, and nothing adds to them or watches them."""
        return not experts.updates and self._ask(experts.config).is_llamoe and not has_hooks(experts)

    def _router(self, router: Any) -> Matrix | None:
        """A router's matrix, where a compiled kernel takes these rows; otherwise None."""
        weight = router._parameters["weight"] if unwatched_formula(router) == "router" else None
        is_known = self.has_kernels and self.takes_plain and is_plain(weight, self.dtype)
        is_known = is_known and weight.shape[1] == self.size
        return plain_matrix(weight) if is_known else None

    def _compute_experts(
        self, experts: Any, x_TH: torch.Tensor, indices_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """`experts(x_TH, indices_TK, weights_TK)`."""
        y_NH = None
        takes_llamoe_paths = getattr(type(experts), "takes_llamoe_paths", False)
        if takes_llamoe_paths and self._is_plain_way(experts) and (self.takes_plain or experts.is_packed):
            y_NH = _multiply_by_experts(experts, x_TH, indices_TK)
        if y_NH is None:
            return experts(x_TH, indices_TK, weights_TK)
        y_NH = y_NH * weights_TK.reshape(-1, 1)
        num_tokens, top_k = indices_TK.shape
        return (y_NH if top_k == 1 else y_NH.unflatten(0, (num_tokens, top_k)).sum(1)).to(x_TH.dtype)


def _routing(router: Any, matrix: Matrix) -> Routing | None:
    """What chooses experts as a router does."""
    bias_E = router.balancing_bias
    if bias_E is not None and not (
        bias_E.is_cpu and bias_E.dtype == torch.float32 and bias_E.is_contiguous()
    ):
        return None
    switches = {name: bool(getattr(router, name)) for name in _SWITCHES}
    return prepare_routing(matrix, router.top_k, bias_E, **switches)


def may_have_noise(mixture: Any) -> bool:
    """Whether the choice of experts may have noise."""
    return mixture.training or getattr(mixture, mixture.router_name).training


def _parts_of_feed_forward(module: nn.Module) -> list[Any]:
    return [module._modules[name] for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]


def _multiply_by_experts(experts: Any, x_TH: torch.Tensor, indices_TK: torch.Tensor) -> torch.Tensor | None:
    """`[N, H]`: the outputs of all choices; None where there is no kernel."""
    top_k, ids = indices_TK.shape[1], indices_TK.reshape(-1).tolist()
    if len(ids) == 1:
        return experts.products_by_kernel(x_TH, [(ids[0], 0, 1)])
    order = sorted(range(len(ids)), key=ids.__getitem__)
    groups: list[tuple[int, int, int]] = []
    for expert, rows in groupby(order, key=ids.__getitem__):
        start = groups[-1][2] if groups else 0
        groups.append((expert, start, start + len(list(rows))))
    order_N = indices_TK.new_tensor(order)
    y_NH = experts.products_by_kernel(x_TH[order_N // top_k], groups)
    return None if y_NH is None else torch.empty_like(y_NH).index_copy_(0, order_N, y_NH)
