"""Expert parallelism for transformers before 5.19: whole experts on each device, all tokens on every device.

Later releases reach the experts through a style called `ep_dispatch_experts`, which our configurations ask for. The
earlier ones edit what the router returns (`ep_router`): scores of other devices' experts become zero. That suits
routing that scales an expert's output. Here the score scales the expert's input, and the zeros would also remove the
token's own gradient. So the rows are selected at the entry of the experts instead.

Each device runs its experts on the rows that chose them and skips the others. One sum over the devices joins the
outputs; in backward one sum joins the gradients of the rows, of which each device has a part.

Shapes: N rows, H hidden_size, k experts a row.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _SumForward(torch.autograd.Function):
    """Sum over the group; the gradient, the same on every device, passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    """Pass unchanged; sum the gradient over the group."""

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

    The style `grouped_gemm` splits the expert parameters first; it also sets the module's `num_experts` to the number
    of experts on this device.
    """

    def validate_param(self, *args: Any, **kwargs: Any) -> None:
        """Accept every parameter."""

    def shard_param(self, *args: Any, **kwargs: Any) -> None:
        """Leave the parameters as they are."""

    def install_forward(self, module: nn.Module, mesh: "DeviceMesh") -> nn.Module:
        """Add dispatch and sum around the forward of an experts module.

        Args:
            module: takes rows `[N, H]`, expert ids `[N, k]` and weights `[N, k]`; skips ids of `num_experts` and above.
            mesh: the devices that share the experts, one-dimensional.
        """
        group, rank = mesh.get_group(), mesh.get_local_rank()
        run_experts = module.forward
        # The backends of transformers 5.18 skip ids only with this mark.
        module._is_expert_parallel = True

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
