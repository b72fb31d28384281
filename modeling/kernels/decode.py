"""The one door to faster decoding on a CPU: half a decoder layer of few rows by compiled kernels.

A decode step is bound by reading weights, which torch reads at half to three quarters of the memory's speed, and in
small models by the calls between products. `begin_few_rows` decides once a pass whether the fast way serves. What it
gives computes half a layer each time, or says None: then the modules are called. The numbers are the modules', with
their roundings.

What the kernels need to know of a module is worked out once (`_recall`), and again whenever its class, its hooks, its
`forward`, or the address, dtype or shape of its tensors have changed. So hooks, adapters, casts and moves between two
passes are seen. A layer that is adapted or watched is called as a module, and those beside it are not. Where nothing
watches any layer, nothing can change during a pass: then all of them are looked at once, when it begins (`_state_of`).

A `forward` whose formula is known here says which one it is, by `computes`. One that took its place, in the class or in
a subclass, is called.

Shapes: B batch, T tokens, H hidden size, K experts a token, N = B * T * K rows of experts.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache_room import append
from .cpp_kernels import BITS, Matrix, Products, library, multiply, plain_matrix, prepare
from .cpp_layer import (
    FirstHalf,
    Mixture,
    Routing,
    SecondHalf,
    Swiglu,
    finish,
    normalized_mixture,
    normalized_swiglu,
    prepare_first_half,
    prepare_mixture,
    prepare_routing,
    prepare_second_half,
    prepare_swiglu,
    project,
    rms_norm,
    route,
    swiglu,
)
from .cpu import (
    apply_linear,
    can_use_shortcut,
    has_hooks,
    is_plain,
    is_silu,
    linear_by_torch,
    plain_weight,
)
from .float32_blocks import plain_max_rows
from .limits import CPP_PACKED_MAX_ROWS
from .single_queries import attend_to_single_queries


class _Linears(NamedTuple):
    """The products of up to three layers that are given the same rows."""

    together: Products | None
    each: list[Products | None]


class _Half(NamedTuple):
    """What is known of half a layer."""

    norm: int | None
    """Address of the weight of the norm before; None where its module must be called."""
    inputs: _Linears
    """Of attention queries, keys and values, of a feed-forward gate and up, of a mixture the router."""
    output: _Linears
    one_token: FirstHalf | None = None
    """Of attention, where one token takes two calls."""
    whole: Swiglu | None = None
    """The matrices of a feed-forward, where it is one call."""


class _MixtureHalf(NamedTuple):
    """What is known of a mixture and the norm before."""

    norm: int | None
    """As in `_Half`."""
    routing: Routing | None
    """What chooses experts; None where the router must be called."""
    whole: Mixture | None
    """Router and experts, where the whole is one call."""


class _Layer(NamedTuple):
    """What is known of a whole layer."""

    first: FirstHalf
    second: SecondHalf | None
    """None where its modules must be asked."""
    has_experts: bool


class _State:
    """All modules of a decoder as they were in one pass, and in those that followed without a change."""

    def __init__(self, signature: list[Any]):
        self.signature = signature
        # For each kind of pass what is known of each layer.
        self.layers: dict[Any, dict[int, _Layer | None]] = {}


# What is known of a module, the signature that it was known for, and its decoder's state at that time, if it had one.
# No tensor is kept: weights that were replaced are freed.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], Any, _State | None]] = (
    weakref.WeakKeyDictionary()
)
# By the first module.
_STATES: weakref.WeakKeyDictionary[nn.Module, _State] = weakref.WeakKeyDictionary()


def computes(formula: str, *reads: str) -> Callable[[Callable], Callable]:
    """A decorator of a `forward`, which says what it computes, and by which attributes beside modules and tensors."""

    def mark(forward: Callable) -> Callable:
        vars(forward).update(formula=formula, reads=reads)
        return forward

    return mark


def begin_few_rows(
    x: torch.Tensor, options: Mapping[str, Any], modules: Sequence[nn.Module] = ()
) -> "FewRows | None":
    """What computes a pass of few rows; None where the modules do.

    Args:
        x: `[B, T, H]`, what the first layer is given.
        options: arguments of the attention implementation.
        modules: with all that they contain, what the pass computes with, so that it need not be looked at one by one.
    """
    if can_use_shortcut(x) and 0 < x.numel() <= CPP_PACKED_MAX_ROWS * x.shape[-1]:
        return FewRows(x, options, _state_of(modules))
    return None


def _state_of(modules: Sequence[nn.Module]) -> _State | None:
    """The state of modules and their children; None where something watches one of them."""
    signature: list[Any] = []
    remaining, classes = list(modules), dict[type, tuple[Any, tuple[str, ...]]]()
    for module in remaining:
        own, kind = module.__dict__, type(module)
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return None
        if kind not in classes:
            forward = kind.__dict__.get("forward")
            classes[kind] = forward, _reads(forward)
        reads = classes[kind][1]
        signature.append(kind)
        if reads:
            signature += map(own.get, reads)
        if own["_parameters"]:
            _sign_tensors(own["_parameters"], signature)
        if own["_buffers"]:
            _sign_tensors(own["_buffers"], signature)
        remaining += filter(None, own["_modules"].values())
    signature += classes.values()
    state = _STATES.get(modules[0]) if modules else None
    if modules and (state is None or state.signature != signature):
        state = _STATES[modules[0]] = _State(signature)
    return state


def _sign_tensors(tensors: Mapping[str, torch.Tensor | None], signature: list[Any]) -> None:
    for tensor in tensors.values():
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            signature += (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous())
        else:
            signature.append(type(tensor))


def apply_head(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`linear(x)` of a language model's head, whose rows are often fewer than those of its decoder."""
    few = begin_few_rows(x, {})
    return apply_linear(linear, x) if few is None else few.head(linear, x)


class FewRows:
    """A pass of few rows."""

    def __init__(self, x: torch.Tensor, options: Mapping[str, Any], state: _State | None = None):
        self.state = state
        # Asked of a configuration once a pass: its attributes are slow.
        self.config: Any = None
        self.is_sdpa = self.is_llamoe = False
        self.dtype, self.shape, self.size, self.options = x.dtype, x.shape, x.shape[-1], options
        num_rows = x.numel() // self.size
        self.takes_plain, self.takes_packed = (
            num_rows <= plain_max_rows(x.dtype),
            num_rows <= CPP_PACKED_MAX_ROWS,
        )
        self.has_kernels = x.dtype in BITS and library() is not None
        self.key = self.dtype, self.size, self.takes_plain, self.takes_packed, self.has_kernels
        self.layers = {} if state is None else state.layers.setdefault(self.key, {})
        asks = any(option is not None and option is not False for option in options.values())
        # Whether attention of one token may be two calls, which take angles instead of rotary tables.
        self.is_one_token = num_rows == 1 and self.has_kernels and not asks

    def normalize(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        """`norm(x)`."""
        fits = self.takes_plain and self._takes(x)
        address = self._recall([norm], lambda: self._norm(norm)) if fits else None
        return self._normalize(norm, address, x)

    def head(self, linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """`linear(x)`."""
        known = self._recall([linear], lambda: self._linears(linear))
        return linear(x) if known is None else self._multiply((linear,), known, x)[0]

    def layer(
        self,
        index: int,
        layer: Any,
        x: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, ...],
        attention_mask: Any,
        position_ids: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor | None:
        """`layer(x)` of one token by two kernel calls; None where the layer must be called as a module.

        Args:
            index: the layer's position in the decoder.
            layer: the layer.
            x: its input.
            position_embeddings: as in `Attention.forward`, like the others.
            attention_mask: likewise.
            position_ids: likewise.
            cache: likewise.
        """
        if self.state is None or not self._sees_all_keys(x, attention_mask, cache) or not self._takes(x):
            return None
        if index not in self.layers:
            self.layers[index] = self._whole_layer(layer)
        known, attention = self.layers[index], layer._modules["self_attn"]
        if known is None or not self._ask(attention.config).is_sdpa:
            return None
        second = known.second if self.is_llamoe or not known.has_experts else None
        context = position_embeddings, position_ids, cache
        found = self._attend_one_token(known.first, second, attention, x, *context)
        if found is None:
            return None
        y, is_whole = found
        if is_whole:
            return y
        norm, module = layer.post_attention_layernorm, layer._modules[layer.feed_forward_name]
        fast = self.feed_forward(norm, module, y)
        return y + module(norm(y)) if fast is None else fast

    def _whole_layer(self, layer: Any) -> _Layer | None:
        """What is known of a layer that nothing watches; None where it must be called."""
        norm, attention = layer.input_layernorm, layer.self_attn
        is_plain = _formula(layer) == "layer" and not layer.training and layer._compiled_call_impl is None
        half = self._attention(norm, attention) if is_plain and _formula(attention) == "attention" else None
        if half is None or half.one_token is None:
            return None
        norm, module = layer.post_attention_layernorm, getattr(layer, layer.feed_forward_name)
        known, formula = None, _formula(module)
        if formula == "feed_forward":
            known = self._feed_forward_half(module, norm)
        elif formula == "mixture" and not _is_trained(module) and self._is_plain_way(module.experts):
            known = self._mixture_half(norm, module)
        is_whole = known is not None and known.whole is not None and known.norm is not None
        second = prepare_second_half(known.norm, norm.eps, known.whole) if is_whole else None
        return _Layer(half.one_token, second, formula == "mixture")

    def attend(
        self,
        norm: Any,
        attention: Any,
        x: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, ...],
        attention_mask: Any,
        position_ids: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor | None:
        """`x + attention(norm(x))`, arguments as in `Attention.forward`; None where the modules must be called."""
        if _formula(attention) != "attention" or not self._takes(x):
            return None
        known = self._attention(norm, attention)
        context = position_embeddings, attention_mask, position_ids, cache
        if known is None:
            return x + attention(self.normalize(norm, x), *context, **self.options)[0]
        if (
            known.one_token is not None
            and self._sees_all_keys(x, attention_mask, cache)
            and self._ask(attention.config).is_sdpa
        ):
            found = self._attend_one_token(
                known.one_token, None, attention, x, position_embeddings, position_ids, cache
            )
            if found is not None:
                return found[0]
        rows = self._normalize(norm, known.norm, x)
        linears = [attention._modules[f"{name}_proj"] for name in "qkvo"]
        projected = self._multiply(linears[:3], known.inputs, rows)
        attended, _ = attention.attend(projected, *context, **self.options)
        return x + self._multiply(linears[3:], known.output, attended)[0]

    def _attention(self, norm: Any, attention: Any) -> _Half | None:
        """What is known of attention and the norm before."""
        linears, qk_norm = [attention._modules[f"{name}_proj"] for name in "qkvo"], attention.qk_norm

        def work_out() -> _Half:
            inputs, output = self._linears(*linears[:3]), self._linears(linears[3])
            address, together = self._norm(norm, inputs), (inputs.together, output.together)
            one_token = None
            if (
                address is not None
                and None not in together
                and together[0].inputs == self.size
                and not attention.training
                and (qk_norm is None or _formula_of(qk_norm) == "l2_norm")
            ):
                qk_eps = -1.0 if qk_norm is None else qk_norm.eps
                how = attention.head_dim, attention.scaling, attention.rope_interleave, qk_eps
                one_token = prepare_first_half(self.dtype, address, norm.eps, *together, *how)
            return _Half(address, inputs, output, one_token)

        return self._recall([attention, norm, *linears, *([] if qk_norm is None else [qk_norm])], work_out)

    def _sees_all_keys(self, x: torch.Tensor, attention_mask: Any, cache: Any) -> bool:
        """Whether `x` is one token that attends to all cached keys, without a mask."""
        return self.is_one_token and attention_mask is None and cache is not None and x.is_contiguous()

    def _attend_one_token(
        self,
        first: FirstHalf,
        second: SecondHalf | None,
        attention: Any,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, ...],
        position_ids: torch.Tensor,
        cache: Any,
    ) -> tuple[torch.Tensor, bool] | None:
        """`x + attention(norm(x))` of one token, and False; or the output of the whole layer, and True.

        None, before the cache was updated, if `angles` are not what the kernel takes.
        """
        if attention.use_rope and not _are_angles(*angles, head_dim=first.head_dim):
            return None
        tuned = attention.use_temperature_tuning
        scale = _temperature(attention.config, position_ids) if tuned else 1.0
        projected = project(x, first, angles if attention.use_rope else (), scale)
        query, key, value = projected.split_with_sizes(first.sizes)
        shape = 1, -1, 1, first.head_dim
        key, value = append(cache, attention.layer_idx, key.view(shape), value.view(shape))
        if key.shape == value.shape and _fits(key, x, first) and _fits(value, x, first):
            return finish(x, first, second, query, key, value), second is not None
        attended = attend_to_single_queries(query.view(shape), key, value, None, attention.scaling)
        return x + self.head(attention.o_proj, attended.reshape(1, 1, -1)), False

    def feed_forward(self, norm: Any, module: Any, x: torch.Tensor) -> torch.Tensor | None:
        """`x + module(norm(x))` of a feed-forward or a mixture; None where the modules must be called."""
        formula = _formula(module)
        if not self._takes(x):
            return None
        if formula == "feed_forward":
            return self._feed_forward(module, x, norm)
        return self._mixture(norm, module, x) if formula == "mixture" else None

    def _mixture(self, norm: Any, module: Any, x: torch.Tensor) -> torch.Tensor | None:
        """`x + module(norm(x))` of a mixture; None where both must be called."""
        known = self._mixture_half(norm, module)
        if known is None:
            return None
        router, shared, experts = getattr(module, module.router_name), module.shared_expert, module.experts
        is_trained, is_whole = _is_trained(module), known.whole is not None and known.norm is not None
        if is_whole and not is_trained and self._is_plain_way(experts):
            return normalized_mixture(x, known.norm, norm.eps, known.whole)
        if shared is not None and _formula(shared) == "feed_forward":
            shared = partial(self._feed_forward, shared)
        compute = partial(self._compute_experts, experts)
        if known.routing is None or is_trained:
            return x + module.mix(self._normalize(norm, known.norm, x), router, compute, shared)
        rows = x if known.norm is not None else norm(x)
        if not self._is_readable(rows) or rows.shape != x.shape:
            return x + module.mix(rows, router, compute, shared)
        rows, *chosen = route(rows, known.norm, 0.0 if known.norm is None else norm.eps, known.routing)
        return x + module.mix(rows, lambda _: (None, *chosen), compute, shared)

    def _mixture_half(self, norm: Any, module: Any) -> _MixtureHalf | None:
        """What is known of a mixture and the norm before."""
        router, shared, experts = getattr(module, module.router_name), module.shared_expert, module.experts
        watched = [module, norm, router, experts, *experts._modules.values()]
        if shared is not None:
            watched += [shared, *shared._modules.values()]

        def work_out() -> _MixtureHalf:
            matrix = self._router(router)
            inputs = _NONE if matrix is None else _Linears(prepare([matrix]), [])
            routing = None if matrix is None else _routing(router, matrix)
            whole = None if routing is None else self._whole_mixture(routing, matrix, experts, shared)
            return _MixtureHalf(self._norm(norm, inputs), routing, whole)

        return self._recall(watched, work_out)

    def _whole_mixture(self, routing: Routing, router: Matrix, experts: Any, shared: Any) -> Mixture | None:
        """The experts of a mixture, where one call computes it."""
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
        matrices = None
        if shared is not None:
            if _formula_of(shared) != "feed_forward" or not is_silu(shared.act_fn):
                return None
            matrices = [self._matrix(shared._modules[name]) for name in ("gate_proj", "up_proj", "down_proj")]
            if None in matrices:
                return None
        return prepare_mixture(routing, router, stacks, matrices)

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

    def _feed_forward_half(self, module: Any, norm: Any) -> _Half | None:
        """What is known of a feed-forward, and of the norm before, if it is given."""
        *linears, act_fn = _parts_of_feed_forward(module)

        def work_out() -> _Half:
            matrices = [self._matrix(linear) for linear in linears]
            is_known = self.has_kernels and is_silu(act_fn) and None not in matrices
            whole = prepare_swiglu(*matrices) if is_known else None
            fits = whole is not None and whole.inputs == whole.outputs == self.size
            inputs = self._linears(*linears[:2])
            address = None if norm is None else self._norm(norm, inputs)
            return _Half(address, inputs, self._linears(linears[2]), whole=whole if fits else None)

        return self._recall([module, *linears, act_fn, *([] if norm is None else [norm])], work_out)

    def _ask(self, config: Any) -> "FewRows":
        """This pass, which then knows the implementations of attention and experts that a configuration names."""
        if config is not self.config:
            attend = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
            self.config, self.is_sdpa = config, attend is sdpa_attention_forward
            self.is_llamoe = getattr(config, "_experts_implementation", None) in (None, "llamoe")
        return self

    def _is_plain_way(self, experts: Any) -> bool:
        """Whether llamoe computes experts, and nothing adds to them or watches them."""
        return not experts.updates and self._ask(experts.config).is_llamoe and not has_hooks(experts)

    def _takes(self, x: torch.Tensor) -> bool:
        """Whether `x` is what the pass began with, as it is unless a module of another kind has returned it."""
        return x.shape == self.shape and self._is_readable(x)

    def _is_readable(self, x: torch.Tensor) -> bool:
        """Whether kernels may read a tensor."""
        return type(x) is torch.Tensor and x.dtype == self.dtype and x.is_cpu

    def _multiply(
        self, linears: Sequence[nn.Module], known: _Linears, x: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """`[linear(x) for linear in linears]`; those of one format by one call."""
        together, fits = known.together, self._is_readable(x)
        if fits and together is not None and together.inputs == x.shape[-1]:
            y = multiply(x, together).view(*x.shape[:-1], -1)
            return (y,) if len(linears) == 1 else y.split_with_sizes(together.sizes, -1)
        return [
            multiply(x, products).view(*x.shape[:-1], -1)
            if fits and products is not None and products.inputs == x.shape[-1]
            else linear_by_torch(linear, x)
            for linear, products in zip(linears, known.each or [None] * len(linears), strict=True)
        ]

    def _normalize(self, norm: Any, address: int | None, x: torch.Tensor) -> torch.Tensor:
        return norm(x) if address is None else rms_norm(x, address, norm.eps)

    def _recall(self, watched: Sequence[Any], work_out: Callable[[], Any]) -> Any:
        """What `work_out` returns of the first module; worked out again if anything of the watched ones has changed.

        None where the first one must be called, because something watches it.
        """
        known = _KNOWN.get(watched[0])
        if (
            self.state is not None
            and known is not None
            and known[2] is self.state
            and known[0][0] == self.key
        ):
            return known[1]
        signature: list[Any] = [self.key]
        for each in watched:
            own, forward = each.__dict__, type(each).__dict__.get("forward")
            signature += (type(each), forward, "forward" in own, not each._forward_hooks)
            signature += (not each._forward_pre_hooks, *map(own.get, _reads(forward)))
            _sign_tensors(each._parameters, signature)
            _sign_tensors(each._buffers, signature)
        if known is not None and known[0] == signature:
            found = known[1]
        else:
            found = None if has_hooks(watched[0]) else work_out()
        _KNOWN[watched[0]] = signature, found, self.state
        return found

    def _linears(self, *linears: nn.Module) -> _Linears:
        matrices = [self._matrix(linear) for linear in linears]
        together = prepare(matrices)
        each = [prepare([matrix]) for matrix in matrices] if together is None else []
        return _Linears(together, each)

    def _matrix(self, linear: Any) -> Matrix | None:
        """A layer's matrix, where a compiled kernel takes these rows; otherwise None."""
        if type(linear) is nn.Linear:
            weight = plain_weight(linear, self.dtype) if self.takes_plain and linear.bias is None else None
            return None if weight is None else plain_matrix(weight)
        # Asked of the class: adapters' and other libraries' layers have no such attribute.
        is_packed = self.takes_packed and getattr(type(linear), "is_packed", False)
        is_known = is_packed and self.dtype == torch.bfloat16 and not has_hooks(linear)
        return linear.for_kernel() if is_known else None

    def _norm(self, norm: Any, inputs: _Linears | None = None) -> int | None:
        """The address of an RMSNorm's weight; None where the module must be called.

        With more rows than kernels take of plain matrices, and before `inputs` that torch multiplies, it must be: a
        layer has the same bits then whoever computes it, as those that accelerate brings from elsewhere.
        """
        serves = self.takes_plain or inputs is None or inputs.together is not None or any(inputs.each)
        weight = norm._parameters["weight"] if serves and _formula_of(norm) == "rms_norm" else None
        is_known = self.has_kernels and is_plain(weight, self.dtype) and weight.shape == (self.size,)
        return weight.data_ptr() if is_known else None

    def _router(self, router: Any) -> Matrix | None:
        """A router's matrix, where a compiled kernel takes these rows; otherwise None."""
        weight = router._parameters["weight"] if _formula_of(router) == "router" else None
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


_NONE = _Linears(None, [])
_SWITCHES = ("takes_softmax", "chooses_by_softmax", "normalizes", "scales_input")
_PLAIN = (torch.Tensor, nn.Parameter)


def _formula_of(module: nn.Module) -> str | None:
    """The formula that a module computes; None if it is of another class, or something watches it."""
    return None if has_hooks(module) else _formula(module)


def _formula(module: nn.Module) -> str | None:
    return getattr(type(module).__dict__.get("forward"), "formula", None)


def _routing(router: Any, matrix: Matrix) -> Routing | None:
    """What chooses experts as a router does."""
    bias_E = router.balancing_bias
    if bias_E is not None and not (
        bias_E.is_cpu and bias_E.dtype == torch.float32 and bias_E.is_contiguous()
    ):
        return None
    switches = {name: bool(getattr(router, name)) for name in _SWITCHES}
    return prepare_routing(matrix, router.top_k, bias_E, **switches)


def _reads(forward: Any) -> tuple[str, ...]:
    """The attributes by which a `forward` computes its formula: they can be set between two passes."""
    return getattr(forward, "reads", ())


def _is_trained(mixture: Any) -> bool:
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
    order_N = torch.tensor(order)
    y_NH = experts.products_by_kernel(x_TH[order_N // top_k], groups)
    return None if y_NH is None else torch.empty_like(y_NH).index_copy_(0, order_N, y_NH)


def _are_angles(cosines: torch.Tensor, *others: torch.Tensor, head_dim: int) -> bool:
    """Whether these are the cosines and sines of one position, and not what `rotary_tables` makes of them."""
    return len(others) == 1 and all(
        table.is_cpu
        and table.dtype == torch.float32
        and table.numel() * 2 == head_dim
        and table.is_contiguous()
        for table in (cosines, *others)
    )


def _fits(keys: torch.Tensor, x: torch.Tensor, half: FirstHalf) -> bool:
    """Whether a cache gave an ordinary tensor of one row and these heads."""
    return (
        type(keys) is torch.Tensor
        and keys.dtype == x.dtype
        and keys.is_cpu
        and keys.stride(3) == 1
        and keys.shape[:2] == (1, half.sizes[1] // half.head_dim)
        and keys.shape[3] == half.head_dim
    )


def _temperature(config: Any, position_ids: torch.Tensor) -> float:
    """The factor of the queries, as in `Attention`."""
    steps = max(math.floor((position_ids.item() + 1) / config.floor_scale), 0)
    return math.log1p(steps) * config.attn_scale + 1.0
