"""The experts, whatever the format of their numbers, and the loop over experts that defines their result.

They answer one thing: the products of these rows with these experts, and what adapters add to them
(`Experts.products`). They have no part in the choice of rows and experts, nor in how rows are sorted and multiplied
(`dispatch`). Here expert e is slice e of two stacks in memory, whose numbers `formats` knows. `quantization` has
experts whose stacks are codes, `offload` those whose stacks are not in memory: they say where tensors are.

`loop_over_experts` is the definition: the formula of an expert for each expert in turn. Every other way to compute
experts is compared with it.

Shapes: T tokens, k experts a token, N rows, E experts, H hidden_size, I intermediate_size, F = 2 * I.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation

from ..formats import Format, Sizes, plain_format
from ..kernels import has_gpu
from ..layers import activation
from .grouped_mm_limits import grouped_mm_fits
from .grouped_product import Stack
from .low_rank import Updates
from .state_dicts import TakesSingleExperts

IMPLEMENTATION = "llamoe"
"""The default name in transformers' registry of experts implementations."""
STACKS = ("gate_up_proj", "down_proj")
"""Names of the stacks, in the order in which they multiply."""

_ABILITIES = {
    "llamoe": ("packed", "offloaded", "adapted"),
    "llamoe_loop": ("packed", "offloaded", "adapted"),
    "llamoe_grouped": ("offloaded", "adapted"),
    "llamoe_kernel": ("adapted",),
    "eager": ("packed", "offloaded"),
}


def implementation_can(name: str | None, ability: str) -> bool:
    """Whether an experts implementation computes more than plain stacks in memory.

    Args:
        name: transformers' own, which are in no table here, compute nothing else; None is the default.
        ability: "packed" stacks, stacks "offloaded", or what adapters add to rows, "adapted".
    """
    return ability in _ABILITIES.get(name or IMPLEMENTATION, ())


class Implementations(ExpertsInterface):
    """transformers' registry of experts implementations, with a default for experts outside of a model."""

    def get_interface(self, experts_implementation: str | None, default: Callable) -> Callable:
        """The function of this name; of `llamoe` where no model has chosen a name."""
        name = experts_implementation or IMPLEMENTATION
        function = super().get_interface(name, default)
        return function if name in _ABILITIES else partial(_checked, function)


def _checked(function: Callable, experts: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    experts.check_implementation(experts.config._experts_implementation)
    return function(experts, *args, **kwargs)


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
    # Whether files have packed experts one by one, as linear layers.
    is_packed_one_by_one = False
    # Whether the stacks are on disk or in RAM, from where one matrix at a time is brought.
    is_offloaded = False
    # Of each stack, where it is not that of its tensor.
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

    def take_after(self, other: "Experts") -> None:
        """Become a module without tensors that has the sizes, configuration and marks of other experts."""
        nn.Module.__init__(self)
        self.__dict__.update({k: v for k, v in other.__dict__.items() if k not in nn.Module().__dict__})
        self.act_fn = other.act_fn

    @property
    def formats(self) -> Mapping[str, Any]:
        """The format of each stack."""
        return dict.fromkeys(STACKS, self.format) if self._formats is None else self._formats

    @property
    def format(self) -> Format:
        """What the numbers of an expert's matrix are."""
        if self._formats is None:
            return plain_format(self.down_proj.dtype, self.is_transposed)
        return self._formats["down_proj"]

    @property
    def is_packed(self) -> bool:
        """Whether the stacks are packed codes."""
        return self._formats is not None and self.format.is_packed

    @property
    def storage(self) -> str | None:
        """How the weights are kept, for errors; None for plain stacks in memory, which alone can be changed."""
        return None

    def refusal(self, name: str | None) -> str | None:
        """What an experts implementation of this name needs and these experts are not; None if it can compute them."""
        needs = {"packed": self.is_packed, "offloaded": self.is_offloaded}
        if name == "llamoe_kernel" and self.is_packed and not self.is_offloaded:
            if has_gpu():
                return None
            return (
                f"takes packed experts on a CUDA device alone; these are {self.storage}, and there is none."
            )
        if all(implementation_can(name, need) for need, is_real in needs.items() if is_real):
            return None
        return f"needs stacks of 16 or 32 bits in memory, but these experts are {self.storage}."

    def check_implementation(self, name: str | None) -> None:
        """Refuse an experts implementation that wants whole stacks of numbers where there are none.

        Raises:
            ValueError: one that does not know packed stacks, or offloaded stacks.
        """
        if reason := self.refusal(name):
            raise ValueError(f'experts_implementation="{name}" {reason} Choose "{IMPLEMENTATION}".')

    def stack(self, name: str) -> Stack:
        """The matrices of a stack, for products."""
        form = self.format if self._formats is None else self._formats[name]
        return Stack(form, self.parts(name), self.sizes_of(name))

    def parts(self, name: str) -> list[torch.Tensor]:
        """The parts of a stack, of which its format says what they mean."""
        if self._formats is None:
            return [getattr(self, name)]
        return [getattr(self, name + suffix) for suffix in self.format.suffixes]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the products."""
        return self.format.compute_dtype

    @property
    def device(self) -> torch.device:
        """Device of the products."""
        return self.down_proj.device

    def stack_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stack of numbers in the family's own order."""
        return tuple(getattr(self, name).shape)

    def sizes_of(self, name: str) -> Sizes:
        """O and I of a stack's matrices."""
        _, first, second = self.stack_shape(name)
        return (second, first) if self.is_transposed else (first, second)

    def unpacked_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stacks of numbers, by their names."""
        return {name: self.stack_shape(name) for name in STACKS}

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
        gate_up, down = (self.stack(name).matrices() for name in STACKS)
        chosen = [expert for expert in top_k_index.unique().tolist() if expert < self.num_experts]
        # Where no expert is chosen, one multiplies no rows, which keeps the weights in the autograd graph.
        for expert in chosen or [0]:
            tokens, choices = torch.where(top_k_index == expert)
            gate, up = (hidden_states[tokens] @ gate_up[expert]).chunk(2, dim=-1)
            output = (self.act_fn(gate) * up) @ down[expert]
            weighted = output * top_k_weights[tokens, choices, None]
            result.index_add_(0, tokens, weighted.to(result.dtype))
        return result

    def products(
        self,
        x_NH: torch.Tensor,
        groups: Any,
        multiply: Callable[[torch.Tensor, Stack, Any], torch.Tensor],
        updates: Updates,
    ) -> torch.Tensor:
        """The outputs of these rows' experts, `[N, H]`: `down(act(gate(x)) * up(x))`.

        Args:
            x_NH: rows, grouped by expert.
            groups: which rows belong to which expert, in the form that `multiply` takes.
            multiply: the product of rows, a stack, and `groups`.
            updates: what adapters add to a stack's products.
        """

        def product(x: torch.Tensor, name: str) -> torch.Tensor:
            stack = self.stack(name)
            y = multiply(stack.form.cast(x), stack, groups)
            for update in updates.get(name, ()):
                y = update.add(y, x, groups, multiply)
            return y

        gate_NI, up_NI = product(x_NH, "gate_up_proj").chunk(2, dim=-1)
        return product(self.act_fn(gate_NI) * up_NI, "down_proj")

    def fits_grouped_mm(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> bool:
        """Whether torch's grouped product exists on a device and takes weights of these sizes and dtype.

        Args:
            device: default: the weights' device.
            dtype: dtype of the product; default: that of the weights.
        """
        if self.storage is not None:
            return False
        weight = self.down_proj
        return grouped_mm_fits((self.gate_up_proj, weight), device or weight.device, dtype or weight.dtype)

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        hidden_size, intermediate_size = self.sizes_of("down_proj")
        return f"num_experts={self.num_experts}, {hidden_size=}, {intermediate_size=}"


class OutputFirstExperts(Experts):
    """The same, stacked output-first (`x @ W.T`), as stock has them for Mixtral: `[E, 2I, H]` and `[E, H, I]`."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        # Read by transformers' backends and by peft.
        self.is_transposed = False

    def _empty_stack(self, size_in: int, size_out: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.num_experts, size_out, size_in))
