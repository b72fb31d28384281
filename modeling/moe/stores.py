"""Where the numbers of the experts are, and the loop over experts that defines their result.

A store answers one thing: the products of these rows with these experts, and what adapters add to them
(`Experts.products`). It has no part in the choice of rows and experts, nor in how rows are sorted and multiplied
(`dispatch`). Here is the resident stack: expert e is slice e of two parameters. `quantization` has packed ones.

`loop_over_experts` is the definition: the formula of an expert for each expert in turn. Every other way to compute
experts is compared with it.

Shapes: T tokens, k experts a token, N rows, E experts, H hidden_size, I intermediate_size, F = 2 * I.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation
from transformers.utils import is_torchdynamo_compiling

from ..kernels import (
    PLAIN_MAX_ROWS,
    Matrix,
    apply_gate,
    can_use_shortcut,
    cpp_feed_forward,
    is_silu,
    plain_matrix,
)
from ..layers import activation
from .grouped_mm_limits import grouped_mm_takes, grouped_mm_takes_dtype, grouped_mm_waits
from .grouped_product import Group
from .low_rank import Updates
from .state_dicts import TakesSingleExperts

IMPLEMENTATION = "llamoe"
"""The default name in transformers' registry of experts implementations."""


class Implementations(ExpertsInterface):
    """transformers' registry of experts implementations, with a default for experts outside of a model."""

    def get_interface(self, experts_implementation: str | None, default: Callable) -> Callable:
        """The function of this name; of `llamoe` where no model has chosen a name."""
        return super().get_interface(experts_implementation or IMPLEMENTATION, default)


IMPLEMENTATIONS = Implementations()


@use_experts_implementation(experts_interface=IMPLEMENTATIONS, is_transposed=True)
class Experts(TakesSingleExperts):
    """The routed experts' weights, stacked and input-first (`x @ W`), as stock has them for Llama 4."""

    # Quantizers, peft and transformers' backends rely on these names, shapes and their order.
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    # `dispatch` accepts only experts with this mark.
    takes_llamoe_paths = True
    # What adapters add, where a call cannot carry it: processes that share experts pass on rows alone.
    updates: Updates | None = None
    # Whether the stacks hold codes of few bits, which nothing here can multiply.
    is_packed = False
    # Whether files have packed experts one by one, as linear layers.
    is_packed_one_by_one = False
    # Whether the stacks are on disk or in RAM, from where one matrix at a time is brought.
    is_elsewhere = False
    is_transposed: bool

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.num_experts = config.num_local_experts
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        # Gate in the first I outputs, up in the last I.
        self.gate_up_proj = self._empty_stack(hidden_size, 2 * intermediate_size)
        self.down_proj = self._empty_stack(intermediate_size, hidden_size)
        self.hidden_act = config.hidden_act
        self.act_fn = activation(config.hidden_act)

    def _empty_stack(self, size_in: int, size_out: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.num_experts, size_in, size_out))

    def input_first(self, name: str) -> torch.Tensor:
        """A stack as `[E, in, out]`: itself, or a view."""
        stack = getattr(self, name)
        return stack if self.is_transposed else stack.transpose(1, 2)

    def matrices(self, name: str) -> Sequence[torch.Tensor]:
        """The experts' matrices of a stack, each `[in, out]`."""
        return self.input_first(name).unbind(0)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.down_proj.dtype

    @property
    def device(self) -> torch.device:
        """Device of the products."""
        return self.down_proj.device

    def stack_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stack in the family's own order."""
        return tuple(getattr(self, name).shape)

    @property
    def hidden_and_intermediate_size(self) -> tuple[int, int]:
        """H and I."""
        _, first, second = self.stack_shape("down_proj")
        return (second, first) if self.is_transposed else (first, second)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Send each token to its experts, in the way that `config._experts_implementation` names.

        Args:
            hidden_states: `[T, H]`.
            top_k_index: `[T, k]` experts of each token; ids of `num_experts` and above are skipped.
            top_k_weights: `[T, k]` factors of the experts' outputs.

        Returns:
            `[T, H]`, summed over the k experts.
        """
        return self.loop_over_experts(hidden_states, top_k_index, top_k_weights)

    def loop_over_experts(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The definition: each chosen expert in turn computes the tokens that chose it."""
        result = torch.zeros_like(hidden_states)
        # `unbind` once: indexing the stack per expert would write a full-size gradient for each of them.
        gate_up, down = (self.matrices(name) for name in ("gate_up_proj", "down_proj"))
        chosen = [expert for expert in top_k_index.unique().tolist() if expert < self.num_experts]
        # Where no expert is chosen, one multiplies no rows, which keeps the weights in the autograd graph.
        for expert in chosen or [0]:
            tokens, choices = torch.where(top_k_index == expert)
            gate, up = (hidden_states[tokens] @ gate_up[expert]).chunk(2, dim=-1)
            output = (self.act_fn(gate) * up) @ down[expert]
            weighted = output * top_k_weights[tokens, choices, None]
            result.index_add_(0, tokens, weighted.to(result.dtype))
        return result

    def multiply_stack(self, x_NI: torch.Tensor, name: str, groups: Any, multiply: Callable) -> torch.Tensor:
        """`[N, O]`: the products of rows with their experts' matrices of one stack; arguments as in `products`."""
        return multiply(x_NI, self.input_first(name), groups)

    def products(
        self,
        x_NH: torch.Tensor,
        groups: Any,
        multiply: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor],
        updates: Updates,
    ) -> torch.Tensor:
        """The outputs of these rows' experts, `[N, H]`: `down(act(gate(x)) * up(x))`.

        Args:
            x_NH: rows, grouped by expert.
            groups: which rows belong to which expert, in the form that `multiply` takes.
            multiply: the product of rows, a stack of one matrix for each expert, and `groups`.
            updates: what adapters add to a stack's products.
        """
        if isinstance(groups, list) and not updates and is_silu(self.act_fn) and can_use_shortcut(x_NH):
            y_NH = self._products_by_kernel(x_NH, groups)
            if y_NH is not None:
                return y_NH

        def product(x: torch.Tensor, name: str) -> torch.Tensor:
            y = self.multiply_stack(x, name, groups, multiply)
            for update in updates.get(name, ()):
                y = update.add(y, x, groups, multiply)
            return y

        gate_NI, up_NI = product(x_NH, "gate_up_proj").chunk(2, dim=-1)
        return product(apply_gate(self.act_fn, gate_NI, up_NI), "down_proj")

    def _products_by_kernel(self, x_NH: torch.Tensor, groups: list[Group]) -> torch.Tensor | None:
        """The outputs of few rows, each expert by one call; None where there is no such kernel."""
        if not self._kernel_takes(x_NH, groups):
            return None
        out_NH = None
        for expert, start, end in groups:
            if expert >= self.num_experts:
                return None
            gate_up, down = (self.matrix_for_kernel(name, expert) for name in ("gate_up_proj", "down_proj"))
            if gate_up is None or down is None:
                return None
            y = cpp_feed_forward(x_NH[start:end], gate_up, None, down)
            if y is None or len(groups) == 1:
                return y
            out_NH = x_NH.new_empty(x_NH.shape) if out_NH is None else out_NH
            out_NH[start:end] = y
        return out_NH

    def _kernel_takes(self, x_NH: torch.Tensor, groups: list[Group]) -> bool:
        """Whether a compiled kernel is faster for these rows, and takes their dtype."""
        return len(x_NH) <= PLAIN_MAX_ROWS and all(
            type(stack) is nn.Parameter and stack.dtype == x_NH.dtype
            for stack in (self.gate_up_proj, self.down_proj)
        )

    def matrix_for_kernel(self, name: str, expert: int) -> Matrix | None:
        """An expert's matrix of a stack; None if there is no kernel for it."""
        return plain_matrix(getattr(self, name)[expert], self.is_transposed)

    def fits_grouped_mm(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> bool:
        """Whether torch's grouped product exists on a device and takes weights of these sizes and dtype.

        Args:
            device: default: the weights' device.
            dtype: dtype of the product; default: that of the weights.
        """
        weight = self.down_proj
        device = weight.device if device is None else device
        dtype = weight.dtype if dtype is None else dtype
        if not grouped_mm_takes_dtype(dtype, weight, device):
            return False
        if is_torchdynamo_compiling() and grouped_mm_waits(device):
            # A compiler may put the product into a CUDA graph, which cannot wait for the host.
            return False
        # Rows and their strides must be multiples of 16 bytes; a cast makes new, contiguous rows.
        if any(size * dtype.itemsize % 16 for size in weight.shape[1:]):
            return False
        stacks = (self.gate_up_proj, weight) if dtype == weight.dtype else ()
        return all(grouped_mm_takes(stack, device) for stack in stacks)

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        hidden_size, intermediate_size = self.hidden_and_intermediate_size
        return f"num_experts={self.num_experts}, {hidden_size=}, {intermediate_size=}"


class OutputFirstExperts(Experts):
    """The same, stacked output-first (`x @ W.T`), as stock has them for Mixtral: `[E, 2I, H]` and `[E, H, I]`."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        # Read by transformers' backends and by peft.
        self.is_transposed = False

    def _empty_stack(self, size_in: int, size_out: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.num_experts, size_out, size_in))
