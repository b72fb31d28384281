"""The experts: rows sorted by expert, a product, the gate, a product; and the loop that defines their result.

`Experts.forward` sends each token to its chosen experts. On a CPU in inference the host counts the rows of each expert
and multiplies expert by expert. On a GPU, few rows and packed experts use kernels that read on the device which rows
are whose, so that a CUDA graph can capture a step. All other cases use operators that support autograd and compilers
(`products`).

Here expert e is slice e of two stacks in memory. Subclasses in `quantization` have packed stacks, subclasses in
`offload` stacks that are not in memory.

`loop_over_experts` defines the result: for each expert in turn it computes the formula of an expert.

`set_experts_implementation` chooses `llamoe`, this `forward`; `eager`, the loop; or transformers' own functions, which
compute plain stacks in memory without adapters. `generate` keeps `llamoe`, but replaces `grouped_mm` by `batched_mm`,
which copies an expert for each token.

Shapes: T tokens, k experts a token, N = T * k rows, E experts, H hidden_size, I intermediate_size.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import (
    ExpertsInterface,
    batched_mm_experts_forward,
    use_experts_implementation,
)

from .._private_api import is_under_vmap
from ..formats import Format, Plain, Sizes, has_gpu_kernel, may_have_gpu_kernel
from ..kernels import (
    TRITON_UNSORTED_MAX_ROWS,
    few_rows_limit,
    is_exported,
    is_recorded,
    is_transformed,
    max_rows_of_matrix,
)
from ..layers import activation
from .low_rank import NO_LORA, ExpertsLora
from .products import Stack, groups_between, multiply_groups, multiply_on_device, multiply_sorted

Way = Literal["host", "kernels", "operators"]
"""Who finds the rows of each expert in a product: the host, a kernel on the device, or an operator for autograd."""
IMPLEMENTATION = "llamoe"
"""The default name in transformers' registry of experts implementations."""
STACKS = ("gate_up_proj", "down_proj")
"""Names of the stacks, in the order in which they multiply."""
_PRODUCTS: Mapping[Way, Callable[..., torch.Tensor]] = {
    "host": multiply_groups,
    "kernels": multiply_on_device,
    "operators": multiply_sorted,
}


class Implementations(ExpertsInterface):
    """transformers' registry of experts implementations, in which `llamoe` means `Experts.forward` itself."""

    def get_interface(self, experts_implementation: str | None, default: Callable) -> Callable:
        """Return the function of this name; for `llamoe` or no name, `Experts.forward` itself."""
        name = experts_implementation or IMPLEMENTATION
        return default if name == IMPLEMENTATION else partial(_compute, super().get_interface(name, default))


IMPLEMENTATIONS = Implementations()


def _compute(
    function: Callable, experts: Any, *args: torch.Tensor, lora: ExpertsLora | None = None
) -> torch.Tensor:
    """Compute experts by one of transformers' functions, or by the loop for `eager`; without adapters."""
    name = experts.config._experts_implementation
    experts.check_implementation(name)
    if (experts.lora if lora is None else lora).updates():
        raise ValueError(
            f'experts_implementation="{name}" cannot compute LoRA on experts: choose "{IMPLEMENTATION}", or merge '
            "the adapters."
        )
    # Compilers and tracers cannot follow the loop: for them `function` is `Experts.forward`.
    is_loop = name == "eager" and (is_transformed() or not is_recorded(args[0]))
    return experts.loop_over_experts(*args) if is_loop else function(experts, *args)


def _refuse_other_experts(experts: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    raise ValueError(
        f'experts_implementation="{IMPLEMENTATION}" computes llamoe\'s own experts, not {type(experts).__name__}: '
        'choose "grouped_mm" or another of transformers\'.'
    )


# transformers accepts only names that are registered. llamoe's own experts never use this function.
ExpertsInterface.register(IMPLEMENTATION, _refuse_other_experts)


@use_experts_implementation(experts_interface=IMPLEMENTATIONS, is_transposed=True)
class Experts(nn.Module):
    """The routed experts' weights, stacked and input-first (`x @ W`), as stock has them for Llama 4."""

    # Quantizers, peft and transformers' functions rely on these names, shapes and this order.
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    # LoRA factors for calls without `lora`: transformers' expert parallelism does not pass that argument on.
    lora: ExpertsLora = NO_LORA
    # True if the stacks are on disk or in RAM, from where single matrices are loaded.
    is_offloaded = False
    # Formats of the stacks by name; None: plain, in the dtypes of the parameters.
    _formats: Mapping[str, Any] | None = None
    is_transposed: bool

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.num_experts = config.num_local_experts
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        # Gate in the first I outputs, up in the last I.
        self.gate_up_proj = self._empty_stack(hidden_size, 2 * intermediate_size)
        self.down_proj = self._empty_stack(intermediate_size, hidden_size)
        self.act_fn = activation(config.hidden_act)

    def _empty_stack(self, size_in: int, size_out: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.num_experts, size_in, size_out))

    def copy_attributes_from(self, other: "Experts") -> None:
        """Copy the sizes, configuration and attributes of other experts, but not their tensors."""
        nn.Module.__init__(self)
        self.__dict__.update({k: v for k, v in other.__dict__.items() if k not in nn.Module().__dict__})
        self.act_fn = other.act_fn

    @property
    def formats(self) -> Mapping[str, Any]:
        """The formats of the stacks, by name."""
        if self._formats is None:
            return dict.fromkeys(STACKS, Plain(self.down_proj.dtype, self.is_transposed))
        return self._formats

    @property
    def format(self) -> Format:
        """The format of `down_proj`; its parts and dtype are those of `gate_up_proj`, too."""
        return self.formats["down_proj"]

    @property
    def is_packed(self) -> bool:
        """True if the stacks are packed codes."""
        return self._formats is not None and self.format.is_packed

    @property
    def storage(self) -> str | None:
        """How the weights are stored, for error messages; None for plain stacks in memory, which can be trained."""
        return None

    def check_implementation(self, name: str | None) -> None:
        """Raise a `ValueError` if an experts implementation needs plain stacks in memory and these are not plain."""
        if self.storage is not None and name not in (None, IMPLEMENTATION, "eager"):
            raise ValueError(
                f'experts_implementation="{name}" needs stacks of 16 or 32 bits in memory, but these experts are '
                f'{self.storage}. Choose "{IMPLEMENTATION}".'
            )

    def stack(self, name: str) -> Stack:
        """Return the matrices of a stack, for products."""
        return Stack(self.formats[name], self.parts(name), self.sizes_of(name))

    def parts(self, name: str) -> list[torch.Tensor]:
        """Return the tensors of a stack, such as codes and scales, in the order of its format."""
        return [getattr(self, name + suffix) for suffix in self.format.suffixes]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the products, outside of autocast."""
        return self.format.compute_dtype

    @property
    def device(self) -> torch.device:
        """The device on which the experts are multiplied."""
        return self.down_proj.device

    def stack_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a plain stack, in the model family's order of axes."""
        return tuple(getattr(self, name).shape)

    def sizes_of(self, name: str) -> Sizes:
        """Return the sizes (O, I) of a stack's matrices."""
        _, first, second = self.stack_shape(name)
        return (second, first) if self.is_transposed else (first, second)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        lora: ExpertsLora | None = None,
    ) -> torch.Tensor:
        """Send each token to its experts, and sum the weighted outputs.

        Args:
            hidden_states: `[T, H]`.
            top_k_index: `[T, k]` experts of each token; ids of `num_experts` and above are skipped.
            top_k_weights: `[T, k]` factors of the experts' outputs.
            lora: what adapters add to the products of the stacks; None: the attribute `lora`.

        Returns:
            `[T, H]` in the dtype of `hidden_states`.

        Raises:
            ValueError: under a transform of torch.func, if stacks are packed or offloaded or have adapters.
        """
        lora = self.lora if lora is None else lora
        if is_transformed():
            return self._follow_transform(hidden_states, top_k_index, top_k_weights, lora)
        x_TH = hidden_states.to(self.product_dtype())
        needs_gradient = torch.is_grad_enabled() and any(
            tensor.requires_grad
            for tensor in (hidden_states, top_k_weights, self.gate_up_proj, self.down_proj, *lora.factors())
        )
        num_tokens, top_k = top_k_index.shape
        ids_N = top_k_index.reshape(-1)
        way = self.way(ids_N.shape[0], needs_gradient, lora, is_recorded(hidden_states))
        if way == "kernels" and not needs_gradient and ids_N.shape[0] <= TRITON_UNSORTED_MAX_ROWS:
            # int64, as in the check of the kernels: they are compiled for the dtype of the ids.
            groups, multiply = ids_N.long().contiguous(), partial(multiply_on_device, by_id=True)
            y_NH = self.products(x_TH.repeat_interleave(top_k, 0), groups, multiply, lora)
        else:
            y_NH = self._products_of_sorted(x_TH, ids_N, top_k, way, lora)
        y_TH = (y_NH * top_k_weights.reshape(-1, 1)).unflatten(0, (num_tokens, top_k)).sum(1)
        return y_TH.to(hidden_states.dtype)

    def _products_of_sorted(
        self, x_TH: torch.Tensor, ids_N: torch.Tensor, top_k: int, way: Way, lora: ExpertsLora
    ) -> torch.Tensor:
        """Sort rows by expert, multiply them, and return the outputs in the original order, `[N, H]`.

        Under expert parallelism, ids of `num_experts` and above are experts of other processes: their rows sort last.
        """
        ids_N, order_N = ids_N.sort(stable=True)
        expert_E = torch.arange(self.num_experts, device=ids_N.device)
        groups: Any = torch.searchsorted(ids_N, expert_E, right=True, out_int32=True)
        if way == "host":
            groups = groups_between(groups, len(ids_N))
        x_NH = x_TH.index_select(0, order_N // top_k)
        if way == "operators" and self._is_expert_parallel:
            # torch's grouped product leaves the results and gradients of rows after the last end undefined.
            is_past_N1 = (ids_N >= self.num_experts)[:, None]
            y_NH = self.products(x_NH.masked_fill(is_past_N1, 0), groups, multiply_sorted, lora)
            y_NH = y_NH.masked_fill(is_past_N1, 0)
        else:
            y_NH = self.products(x_NH, groups, _PRODUCTS[way], lora)
        out_NH = torch.empty_like(y_NH)
        # Not `index_copy_`: it would keep `y_NH` for the backward pass.
        out_NH[order_N] = y_NH
        return out_NH

    def products(
        self, x_NH: torch.Tensor, groups: Any, multiply: Callable[..., torch.Tensor], lora: ExpertsLora
    ) -> torch.Tensor:
        """Return the outputs of these rows' experts, `[N, H]`: `down(act(gate(x)) * up(x))`.

        Args:
            x_NH: rows, grouped by expert.
            groups: which rows belong to which expert, in the form that `multiply` takes.
            multiply: the product of rows, a stack, and `groups`.
            lora: what adapters add to the products.
        """

        def product(x: torch.Tensor, name: str) -> torch.Tensor:
            y = multiply(x, self.stack(name), groups)
            for update in lora.of(name):
                y = update.add(y, x, groups, multiply)
            return y

        gate_NI, up_NI = product(x_NH, "gate_up_proj").chunk(2, dim=-1)
        return product(self.act_fn(gate_NI) * up_NI, "down_proj")

    def product_dtype(self) -> torch.dtype:
        """Return the dtype in which experts are computed: autocast's, or the dtype of the weights."""
        device_type = self.device.type
        is_cast = device_type != "meta" and torch.is_autocast_enabled(device_type)
        # Packed weights are multiplied in their format's dtype, and autocast does not cast float64.
        if not is_cast or self.is_packed or self.dtype == torch.float64:
            return self.dtype
        return torch.get_autocast_dtype(device_type)

    def way(
        self, num_rows: int, needs_gradient: bool, lora: ExpertsLora = NO_LORA, is_traced: bool = False
    ) -> Way:
        """Return who finds the rows of each expert in a product of this many rows.

        The answer depends only on sizes, dtypes, the device and the need for gradients, so that compiled code is valid
        for all values.
        """
        if self.has_kernels(num_rows, needs_gradient, lora, may_check=not is_traced):
            return "kernels"
        is_counted = self.device.type == "cpu" or self.storage is not None
        return "host" if is_counted and not (needs_gradient or is_traced) else "operators"

    def has_kernels(
        self, num_rows: int, needs_gradient: bool, lora: ExpertsLora = NO_LORA, may_check: bool = True
    ) -> bool:
        """Return True if Triton kernels multiply this many rows correctly, and faster than operators.

        The host does not wait for kernels, so a CUDA graph can capture them.
        """
        # An exported program must work for any number of rows.
        if self.is_offloaded or not may_have_gpu_kernel(self.device) or is_exported():
            return False
        if self.is_packed:
            max_rows = self.num_experts * max_rows_of_matrix(self.device)
        else:
            # Plain experts have no kernel for the gradient of their weights.
            max_rows = 0 if needs_gradient else few_rows_limit(self.device)
        dtype = self.product_dtype()
        # Under autocast the kernels would have to cast the weights.
        if num_rows > max_rows or self.dtype != dtype:
            return False
        stacks = [self.stack(name) for name in STACKS]
        stacks += [stack for update in lora.updates() for stack in update.stacks(dtype)]
        return all(
            has_gpu_kernel(it.form, it.parts, it.sizes, None, it.num_experts, transposed, may_check)
            for it in stacks
            for transposed in {False, needs_gradient}
        )

    def _follow_transform(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        lora: ExpertsLora,
    ) -> torch.Tensor:
        """Compute by torch's own operators: transforms of torch.func do not support custom ones."""
        if self.storage is not None or lora.updates():
            raise ValueError(
                "Experts that are packed or offloaded, or have adapters, do not follow transforms of torch.func. "
                'experts_implementation="eager" follows grad and jvp without adapters.'
            )
        follow = batched_mm_experts_forward if is_under_vmap() else type(self).loop_over_experts
        return follow(self, hidden_states, top_k_index, top_k_weights)

    def loop_over_experts(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the result that defines all others: each expert in turn computes the tokens that chose it."""
        result = torch.zeros_like(hidden_states)
        gate_up, down = (self.stack(name).matrices() for name in STACKS)
        chosen = [expert for expert in top_k_index.unique().tolist() if expert < self.num_experts]
        # If no expert is chosen, multiply zero rows by the first: this keeps the weights in the autograd graph.
        for expert in chosen or [0]:
            tokens, choices = torch.where(top_k_index == expert)
            gate, up = (hidden_states[tokens] @ gate_up[expert]).chunk(2, dim=-1)
            output = (self.act_fn(gate) * up) @ down[expert]
            weighted = output * top_k_weights[tokens, choices, None]
            result.index_add_(0, tokens, weighted.to(result.dtype))
        return result

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        hidden_size, intermediate_size = self.sizes_of("down_proj")
        return f"num_experts={self.num_experts}, {hidden_size=}, {intermediate_size=}"


class OutputFirstExperts(Experts):
    """The routed experts' weights, stacked output-first (`x @ W.T`) as in Mixtral: `[E, 2I, H]` and `[E, H, I]`."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        # transformers' functions and peft read this attribute.
        self.is_transposed = False

    def _empty_stack(self, size_in: int, size_out: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.num_experts, size_out, size_in))


def check_kernels(model: nn.Module) -> None:
    """Check the GPU kernels for all experts and packed layers of a model, before a compiler or CUDA graph starts.

    Kernels are checked once in a process, so later calls only visit each module.
    """
    loras: dict[int, ExpertsLora] = {}
    for module in model.modules():
        if (active := getattr(module, "active_lora", None)) is not None:
            key = id(module.get_base_layer())
            loras[key] = active(loras.get(key, NO_LORA))
    for module in model.modules():
        if isinstance(module, Experts):
            experts: Any = module
            is_chosen = experts.config._experts_implementation in (None, IMPLEMENTATION)
            # Sharded or offloaded parameters are checked in the first forward, when their data is on the device.
            if is_chosen and type(experts.down_proj) is nn.Parameter:
                experts.has_kernels(1, needs_gradient=False, lora=loras.get(id(experts), NO_LORA))
        elif isinstance(module, nn.Linear) and hasattr(module, "format"):
            if may_have_gpu_kernel(module.weight.device):
                has_gpu_kernel(module.format, module.parts(), (module.out_features, module.in_features))
