"""How rows reach their experts: sorted or not, and which product multiplies them.

Three paths have the same result as the loop that defines it (`experts`):

* `loop`: sort the rows by expert, then one product for each hit expert. The host counts the rows, which costs nothing
  on the CPU. The CPU takes it without gradients (a few rows go to their experts unsorted), and with gradients for large
  stacks of experts that see few rows each.
* `kernel`: few rows on a GPU, without gradients. A kernel finds the hit experts on the device and reads each once:
  nothing waits for the host, and a step fits into a CUDA graph. Before its first use its results are checked on
  this device (`kernels.packed_rows`). Packed experts on a GPU take it for more rows, with gradients and adapters, too
  (`kernels.packed_rows`).
* `grouped`: many rows on a GPU, output-first experts of 16 bits on the CPU, and all other training. Sort once, then
  torch's grouped product.

Only the number of rows, sizes, dtype, device and need for gradients decide: the choice is the same for every routing,
and a compiler makes it once. `llamoe_loop`, `llamoe_kernel` and `llamoe_grouped` force a path. The names stand in
transformers' registry of experts implementations. `generate` keeps them; `grouped_mm` it replaces by `batched_mm`,
which copies an expert for each token. Two of transformers' own names get a guard here: `eager`, which compilers cannot
follow, and `grouped_mm`, which does not take all sizes.

Shapes: T tokens, k experts a token, N = T * k rows, E experts, H hidden_size, I intermediate_size, F = 2 * I.
Of a single grouped product I columns in, O columns out.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from transformers.integrations.moe import (
    ExpertsInterface,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from .._private_api import is_forward_ad
from ..formats import has_gpu_kernel, may_have_gpu_kernel, why_no_kernel
from ..kernels import (
    CPU_LOOP_MAX_ROWS_PER_EXPERT,
    CPU_UNSORTED_MAX_ROWS,
    SHORTCUTS_ARE_ON,
    TRITON_MAX_ROWS,
    TRITON_UNSORTED_MAX_ROWS,
    few_rows_limit,
    is_exported,
    is_recorded,
    is_transformed,
    max_rows_of_matrix,
    rows_of_torch,
)
from .experts import IMPLEMENTATION, IMPLEMENTATIONS, STACKS
from .grouped_mm_limits import grouped_mm_fits, grouped_mm_takes_dtype, grouped_mm_waits
from .grouped_product import (
    LARGE_GRADIENT_BYTES,
    Stack,
    groups_between,
    multiply_groups,
    multiply_on_device,
    multiply_sorted,
)
from .low_rank import Updates, factors, have_own_scales, in_dtype, of_rows

Path = Literal["loop", "kernel", "grouped"]
PATHS: tuple[Path, ...] = ("loop", "kernel", "grouped")


def compute_experts(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    path: Path | None = None,
    updates: Updates | None = None,
) -> torch.Tensor:
    """Send each token to its experts: `Experts.forward` under the name `llamoe`.

    Args:
        experts: llamoe's `Experts`.
        hidden_states: `[T, H]`.
        top_k_index: `[T, k]` experts of each token; ids of `num_experts` and above are skipped.
        top_k_weights: `[T, k]` factors of the experts' outputs.
        path: one of `PATHS` to force it; None: `choose_path` decides.
        updates: what adapters add to the products of a stack (`low_rank`).

    Returns:
        `[T, H]` in the dtype of `hidden_states`, summed over the k experts.

    Raises:
        ValueError: experts of another library, or a forced path that does not support these inputs.
        RuntimeError: a CUDA graph is being captured, and the path asks the host for the number of rows.
    """
    if not getattr(experts, "takes_llamoe_paths", False):
        raise ValueError(
            f'experts_implementation="{_name(path)}" computes llamoe\'s own experts, not {type(experts).__name__}: '
            'choose "grouped_mm" or another of transformers\'.'
        )
    updates = experts.updates or {} if updates is None else updates
    if is_transformed():
        if path is None and experts.storage is None and not updates:
            # Both are operators of torch alone; of these the grouped product is no function of jvp.
            may_group = not is_forward_ad() and experts.fits_grouped_mm(dtype=compute_dtype(experts))
            follow = _grouped_or_eager if may_group else batched_mm_experts_forward
            return follow(experts, hidden_states, top_k_index, top_k_weights)
        raise ValueError(
            f'experts_implementation="{_name(path)}" does not follow transforms of torch.func. Choose "eager", which '
            'knows grad and jvp, or "batched_mm".'
        )
    is_adapted = len(updates) > 0  # torch 2.11's compiler knows a dict's length, and not its truth.
    stacks = experts.gate_up_proj, experts.down_proj
    dtype = compute_dtype(experts)
    num_rows = top_k_index.numel()
    needs_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (hidden_states, *stacks, top_k_weights, *factors(updates))
    )
    is_traced = is_recorded(hidden_states)
    if path is None:
        path = choose_path(experts, num_rows, dtype, needs_gradient, is_adapted)
        if path == "kernel" and not _kernel_serves(experts, updates, needs_gradient, not is_traced):
            path = choose_path(experts, num_rows, dtype, needs_gradient, is_adapted, has_kernel=False)
    elif reason := why_not(path, experts, num_rows, dtype, needs_gradient, is_adapted):
        raise ValueError(f'experts_implementation="{_name(path)}": {reason} Choose "{IMPLEMENTATION}".')

    if path != "kernel" and hidden_states.is_cuda and not is_traced:
        _refuse_capture(path, dtype, hidden_states.device)
    x_TH = hidden_states.to(dtype)
    host_counts = path == "loop" and not (needs_gradient or is_traced)
    if path == "kernel":
        y_NH = _products_by_kernel(experts, x_TH, top_k_index, updates, needs_gradient)
    elif host_counts and SHORTCUTS_ARE_ON and num_rows <= CPU_UNSORTED_MAX_ROWS:
        ids = top_k_index.reshape(-1).tolist()
        groups = [(expert, row, row + 1) for row, expert in enumerate(ids)]
        if is_adapted:
            tokens_N = torch.arange(num_rows, device=x_TH.device) // top_k_index.shape[1]
            updates = of_rows(updates, tokens_N)
        y_NH = experts.products(_rows_of_choices(x_TH, top_k_index), groups, multiply_groups, updates)
    else:
        product = multiply_groups if host_counts else _grouped_mm if path == "grouped" else multiply_sorted
        y_NH = _products_of_sorted(experts, x_TH, top_k_index, product, updates)
    y_NH = y_NH * top_k_weights.reshape(-1, 1)
    num_tokens, top_k = top_k_index.shape
    y_TH = y_NH if top_k == 1 else y_NH.unflatten(0, (num_tokens, top_k)).sum(1)
    return y_TH.to(hidden_states.dtype)


def _refuse_capture(path: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Say it in a sentence where CUDA would end the capture of a graph with an error of its own."""
    if not torch.cuda.is_current_stream_capturing():
        return
    if path == "loop" or dtype != torch.bfloat16 or grouped_mm_waits(device):
        raise RuntimeError(
            f"a CUDA graph is being captured, and on {device} these experts in {dtype} ask the host how many rows each "
            "has, which a graph cannot hold. One pass of few tokens without gradients before the capture has a kernel "
            "checked that asks nothing; or capture nothing."
        )


def _kernel_serves(experts: Any, updates: Updates, needs_gradient: bool, may_check: bool) -> bool:
    """Whether the kernels are right for these experts, and for the adapters that they are multiplied with."""
    stacks = [experts.stack(name) for name in STACKS]
    updates = in_dtype(updates, compute_dtype(experts))
    stacks += [stack for each in updates.values() for update in each for stack in update.stacks()]
    directions = (False, True) if needs_gradient else (False,)
    return all(
        has_gpu_kernel(stack.form, stack.parts, stack.sizes, None, stack.num_experts, transposed, may_check)
        for stack in stacks
        for transposed in directions
    )


def _products_by_kernel(
    experts: Any, x_TH: torch.Tensor, top_k_index: torch.Tensor, updates: Updates, needs_gradient: bool
) -> torch.Tensor:
    """`[N, H]`: the outputs of all choices, by kernels that find the experts' rows on the device."""
    # Products in float32 have no instructions of their own; gradients are in the factors' dtype all the same.
    updates = in_dtype(updates, x_TH.dtype)
    if top_k_index.numel() > TRITON_UNSORTED_MAX_ROWS or needs_gradient:
        return _products_of_sorted(experts, x_TH, top_k_index, multiply_on_device, updates)
    # Same layout as in the check: kernels are compiled for the dtype of the ids.
    ids_N = top_k_index.reshape(-1).long().contiguous()
    x_NH = _rows_of_choices(x_TH, top_k_index)
    if have_own_scales(updates):
        tokens_N = torch.arange(len(ids_N), device=x_TH.device) // top_k_index.shape[1]
        updates = of_rows(updates, tokens_N)
    return experts.products(x_NH, ids_N, partial(multiply_on_device, by_id=True), updates)


def _rows_of_choices(x_TH: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
    """`[N, H]`: each token once for each of its experts."""
    top_k = top_k_index.shape[1]
    return x_TH.contiguous() if top_k == 1 else x_TH.repeat_interleave(top_k, 0)


def _products_of_sorted(
    experts: Any, x_TH: torch.Tensor, top_k_index: torch.Tensor, product: Callable, updates: Updates
) -> torch.Tensor:
    """`[N, H]`: the outputs of all choices; the rows are sorted by expert in between."""
    top_k = top_k_index.shape[1]
    # Ids of `num_experts` and above sort last, past every expert's end.
    ids_N, order_N = top_k_index.reshape(-1).sort(stable=True)
    expert_E = torch.arange(experts.num_experts, device=ids_N.device)
    ends_E = torch.searchsorted(ids_N, expert_E, right=True, out_int32=True)
    tokens_N = order_N // top_k
    x_NH = x_TH.index_select(0, tokens_N)
    passed_over_N1 = None
    if product is _grouped_mm and experts._is_expert_parallel:
        # The grouped product leaves rows past the last end undefined, in forward and in backward.
        passed_over_N1 = (ids_N >= experts.num_experts)[:, None]
        x_NH = x_NH.masked_fill(passed_over_N1, 0)
    if product is _grouped_mm and _asks_of_float32_alone(x_TH):
        updates = in_dtype(updates, x_TH.dtype)
    groups = groups_between(ends_E, len(ids_N)) if product is multiply_groups else ends_E
    y_NH = experts.products(x_NH, groups, product, of_rows(updates, tokens_N))
    if passed_over_N1 is not None:
        y_NH = y_NH.masked_fill(passed_over_N1, 0)
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    return y_NH.index_select(0, place_N)


def _asks_of_float32_alone(x: torch.Tensor) -> bool:
    """Whether torch's grouped product asks the host for the groups in float32, as adapters' factors are, only."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not grouped_mm_waits(x.device)


def _grouped_mm(x_NI: torch.Tensor, stack: Stack, ends_E: torch.Tensor) -> torch.Tensor:
    # The factors of an adapter may be thinner than the product takes, or of a dtype that it does not.
    is_thin = any(size * x_NI.element_size() % 16 for size in stack.sizes)
    if is_thin or not grouped_mm_takes_dtype(x_NI.dtype, x_NI, x_NI.device):
        return multiply_sorted(x_NI, stack, ends_E)
    return stack.multiply_by_grouped_mm(x_NI, ends_E)


def choose_path(
    experts: Any,
    num_rows: int,
    dtype: torch.dtype,
    needs_gradient: bool,
    is_adapted: bool = False,
    has_kernel: bool = True,
) -> Path:
    """The path that computes experts.

    Args:
        experts: llamoe's `Experts`; sizes, dtype and device are read.
        num_rows: N.
        dtype: dtype of the products.
        needs_gradient: whether there will be a backward pass.
        is_adapted: whether adapters add to the products.
        has_kernel: whether the kernel for few rows may be taken.
    """
    if _is_on_host(experts.down_proj):
        if not needs_gradient and not _groups_are_faster(experts, num_rows, dtype):
            return "loop"
        if needs_gradient and (_is_cast(dtype) or _has_few_rows_each(experts, num_rows, dtype)):
            return "loop"
    # An exported or traced program serves all numbers of rows.
    if has_kernel and not is_exported() and num_rows <= _kernel_max_rows(experts):
        if not why_not("kernel", experts, num_rows, dtype, needs_gradient, is_adapted):
            return "kernel"
    return "loop" if why_not("grouped", experts, num_rows, dtype, needs_gradient) else "grouped"


def _kernel_max_rows(experts: Any) -> int:
    if getattr(experts, "is_packed", False):
        return experts.num_experts * max_rows_of_matrix(experts.device)
    return few_rows_limit(experts.down_proj.device)


def _is_on_host(weight: torch.Tensor) -> bool:
    return weight.device.type in ("cpu", "meta")


def check_kernels(model: torch.nn.Module) -> None:
    """Check the kernels for all experts and packed layers of a model, before a compiler or CUDA graph starts.

    Where nothing is left to check, this only visits each module.
    """
    updates: dict[int, dict[str, Any]] = {}
    for module in model.modules():
        if (active := getattr(module, "active_updates", None)) is not None:
            updates.setdefault(id(module.get_base_layer()), {}).update(active())
    for module in model.modules():
        if getattr(module, "takes_llamoe_paths", False) and _chosen_by_rows(module):
            weight: Any = module.down_proj
            # Sharded or offloaded parameters are checked in the first pass, when their data is here.
            if (
                type(weight) is torch.nn.Parameter
                and choose_path(module, 1, compute_dtype(module), False) == "kernel"
            ):
                of_module = updates.get(id(module), {})
                _kernel_serves(module, of_module, needs_gradient=False, may_check=True)
        elif isinstance(module, torch.nn.Linear) and hasattr(module, "format"):
            if may_have_gpu_kernel(module.weight.device):
                has_gpu_kernel(module.format, module.parts(), (module.out_features, module.in_features))


def _chosen_by_rows(experts: Any) -> bool:
    return experts.config._experts_implementation in (None, IMPLEMENTATION)


def _groups_are_faster(experts: Any, num_rows: int, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product beats the host's loop: in 16 bits the steps of Python between products count."""
    return (
        not experts.is_transposed
        and dtype.itemsize == 2
        and num_rows > CPU_UNSORTED_MAX_ROWS
        and not _is_cast(dtype)
        and experts.fits_grouped_mm(dtype=dtype)
    )


def _is_cast(dtype: torch.dtype) -> bool:
    """Whether a CPU multiplies this dtype in float32: torch's grouped product has no instructions for it either."""
    return SHORTCUTS_ARE_ON and rows_of_torch(dtype) is not None


def _has_few_rows_each(experts: Any, num_rows: int, dtype: torch.dtype) -> bool:
    """Whether experts are large and see so few rows that mapping memory and reading weights dominate the cost."""
    num_experts, *sizes = experts.stack_shape("down_proj")
    is_large = num_experts * math.prod(sizes) * dtype.itemsize >= LARGE_GRADIENT_BYTES
    return is_large and not is_exported() and num_rows <= CPU_LOOP_MAX_ROWS_PER_EXPERT * num_experts


def why_not(
    path: Path,
    experts: Any,
    num_rows: int,
    dtype: torch.dtype,
    needs_gradient: bool,
    is_adapted: bool = False,
) -> str | None:
    """Reason why a path cannot be taken; None if it can. Arguments as in `choose_path`."""
    weight = experts.down_proj
    hidden_size, intermediate_size = experts.sizes_of("down_proj")
    if reason := experts.refusal(_name(path)):
        return reason
    if path == "kernel":
        is_packed = getattr(experts, "is_packed", False)
        is_plain = not (is_packed or is_adapted)
        if needs_gradient and not is_packed:
            return "the kernel has no gradient."
        if not (is_plain or may_have_gpu_kernel(experts.device)):
            kind = "packed experts is" if is_packed else "experts knows no adapter: those with adapters are"
            return f"the kernel for {kind} for CUDA devices ({experts.device} here)."
        for name in STACKS:
            reason = why_no_kernel(experts.formats[name], dtype, experts.device)
            if is_plain and (reason or num_rows > TRITON_MAX_ROWS):
                return (
                    f"the kernel takes up to {TRITON_MAX_ROWS} rows ({num_rows} here) of 16 or 32 bits in the weights' "
                    f"dtype ({dtype} for {weight.dtype} here), on a CUDA device from Ampere on ({weight.device} here), "
                    "where Triton is installed."
                )
            if reason:
                return f"the kernel does not take these experts. {reason}"
        return None
    if path == "grouped" and not experts.fits_grouped_mm(dtype=dtype):
        return (
            f"torch's grouped product does not take experts of {hidden_size} x {intermediate_size} in {dtype} on "
            f"{weight.device}: their rows must be multiples of 16 bytes, float16 is not for the CPU, float64 for no "
            "device, and compilers take bfloat16 only (on GPUs: of capability 9 and 10)."
        )
    return None


def compute_dtype(experts: Any) -> torch.dtype:
    """Dtype in which experts are computed: autocast's, or the weights' own."""
    form, device_type = experts.format, experts.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return form.compute_dtype
    return form.dtype_in_autocast(torch.get_autocast_dtype(device_type))


def _name(path: Path | None) -> str:
    return IMPLEMENTATION if path is None else f"{IMPLEMENTATION}_{path}"


def _eager(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The loop that defines the result; for compilers and tracers `llamoe_loop`, which keeps it in an operator."""
    if is_recorded(hidden_states) and not is_transformed():
        return compute_experts(experts, hidden_states, top_k_index, top_k_weights, path="loop")
    return experts.loop_over_experts(hidden_states, top_k_index, top_k_weights)


def _grouped_or_eager(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The `grouped_mm` of transformers where it supports these sizes and dtypes, else `eager`."""
    dtype = compute_dtype(experts)
    seen = experts if dtype == experts.down_proj.dtype else _ExpertsInDtype(experts, dtype)
    stacks = seen.gate_up_proj, seen.down_proj
    if grouped_mm_fits(stacks, stacks[1].device, dtype):
        return grouped_mm_experts_forward(seen, hidden_states, top_k_index, top_k_weights)
    return _eager(experts, hidden_states, top_k_index, top_k_weights)


class _ExpertsInDtype:
    """Experts with their weights cast to another dtype: autocast does not cast the weights of `grouped_mm`."""

    def __init__(self, experts: Any, dtype: torch.dtype):
        self.experts = experts
        self.gate_up_proj = experts.gate_up_proj.to(dtype)
        self.down_proj = experts.down_proj.to(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)


for _path in (None, *PATHS):
    ExpertsInterface.register(_name(_path), partial(compute_experts, path=_path))
IMPLEMENTATIONS["eager"] = _eager
IMPLEMENTATIONS["grouped_mm"] = _grouped_or_eager
