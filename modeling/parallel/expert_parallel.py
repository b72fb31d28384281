"""Expert parallelism for transformers before 5.19: whole experts on each device, every device with the same tokens.

Later releases reach the experts through a style called `ep_dispatch_experts`, which is what our configurations ask
for. The earlier ones edit what the router returns (`ep_router`): scores of other devices' experts become zero. That
suits routing that scales an expert's output. Here the score scales the expert's input, and the zeros would also cut
off the token's own gradient, so the rows are sorted out where they enter the experts instead.

Each device runs its experts on the rows that chose them and passes over the others; one sum over the devices joins
the outputs, and in backward one joins the gradients of the rows, which each device knows in part.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _SumForward(torch.autograd.Function):
    """Sum over the group; the gradient, the same everywhere, passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    """Pass; sum the gradient over the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class DispatchExperts:
    """The parallel style, with the methods that transformers' `apply_tensor_parallelism` calls.

    The expert parameters are split by their own style, `grouped_gemm`, before; it also sets the module's
    `num_experts` to the number of experts on this device.
    """

    def validate_param(self, *args: Any, **kwargs: Any) -> None:
        """Accept every parameter."""

    def shard_param(self, *args: Any, **kwargs: Any) -> None:
        """Leave the parameters alone."""

    def install_forward(self, module: nn.Module, mesh: "DeviceMesh") -> nn.Module:
        """Put the exchange around the forward of an experts module.

        Args:
            module: takes rows `[N, H]`, expert ids `[N, k]` and weights `[N, k]`; passes over ids of `num_experts`
                and above.
            mesh: the devices that share the experts, one-dimensional.
        """
        group, rank = mesh.get_group(), mesh.get_local_rank()
        run_experts = module.forward
        module._is_expert_parallel = True  # 5.18's backends look for ids to pass over only then

        def forward(
            hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            num_here = module.num_experts
            is_elsewhere = top_k_index // num_here != rank
            ids_here = torch.where(is_elsewhere, num_here, top_k_index % num_here)
            weights_here = _SumBackward.apply(top_k_weights, group).masked_fill(is_elsewhere, 0)
            stacks: dict[str, Any] = dict(module.named_parameters(recurse=False))
            try:
                module._parameters.update({name: stack.to_local() for name, stack in stacks.items()})
                output = run_experts(_SumBackward.apply(hidden_states, group), ids_here, weights_here)
            finally:
                module._parameters.update(stacks)
            return _SumForward.apply(output, group)

        module.forward = forward
        return module
